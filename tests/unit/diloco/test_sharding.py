"""A block of a parameter: what lies where, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import ValidationError
from atoll.diloco import sharding as module
from atoll.diloco.parameters import plain_name, read_parameters
from atoll.diloco.sharding import (
    Block,
    before,
    check_blocks,
    check_equal,
    fingerprint,
    locations,
)


@st.composite
def blocks(draw: Any) -> Block:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    offset = tuple(draw(st.integers(0, size)) for size in shape)
    lengths = tuple(draw(st.integers(0, s - o)) for s, o in zip(shape, offset, strict=True))
    return Block(shape, offset, lengths, "float32")


@given(blocks())
def test_the_values_of_a_block_are_found_in_the_whole(block: Block) -> None:
    complete = np.arange(math.prod(block.shape)).reshape(block.shape)
    cut = tuple(slice(o, o + n) for o, n in zip(block.offset, block.lengths, strict=True))
    flat = complete[cut].reshape(-1)
    assert np.array_equal(locations(block.dims, 0, block.size), flat)
    for location in range(complete.size + 1):
        assert before(block.dims, location) == (flat < location).sum()


def rows(start: int, count: int, **changes: Any) -> Block:
    return Block((4, 3), (start, 0), (count, 3), "float32")._replace(**changes)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ([{"w": rows(0, 2)}, {"w": rows(3, 1)}], "model.w: '9 of 12 values'"),
        ([{"w": rows(0, 2)}, {"w": rows(2, 2, dtype="bfloat16")}], "model.w: 'bfloat16"),
        ([{"w": rows(0, 2)}, {"v": rows(2, 2)}], "model.v: 'process 1' .* pipeline"),
        ([{"w": rows(0, 4)}, {}], "model.w: 'process 1' .* same parameters"),
    ],
)
def test_blocks_that_do_not_make_the_model_once_are_named(
    stored: list[dict[str, Block]], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        check_blocks(stored)


def test_copies_that_differ_between_processes_are_named() -> None:
    both = [{"w": rows(0, 4)}, {"w": rows(0, 4)}]
    ours, theirs = torch.ones(4, 3), torch.ones(4, 3)
    check_equal(both, [{"w": fingerprint(ours)}, {"w": fingerprint(theirs)}])
    theirs[1, 1] += 1e-7
    with pytest.raises(ValidationError, match=r"model.w: 'of process 1' .* trains as one"):
        check_equal(both, [{"w": fingerprint(ours)}, {"w": fingerprint(theirs)}])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_float_type_has_a_fingerprint(dtype: torch.dtype) -> None:
    one = torch.arange(6).to(dtype)
    assert fingerprint(one) == fingerprint(one.clone())
    assert fingerprint(one) != fingerprint(one.flip(0))


class FullyShardedDataParallel(torch.nn.Linear):
    """As the first FSDP is called."""


def test_models_that_cannot_be_synchronised_are_refused_by_name() -> None:
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    cases = {
        "expected a parameter with requires_grad": frozen,
        "model.weight: 'on the meta device'": torch.nn.Linear(2, 2, device="meta"),
        "model: 'FullyShardedDataParallel'": FullyShardedDataParallel(2, 2),
    }
    for message, model in cases.items():
        with pytest.raises(ValidationError, match=message):
            read_parameters(model)


def test_what_wraps_a_model_does_not_change_its_names() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    compiled = torch.compile(model, backend="eager")
    assert list(read_parameters(compiled)) == list(read_parameters(model))  # type: ignore[arg-type]
    assert plain_name("layers.0._checkpoint_wrapped_module.w") == "layers.0.w"


class Holder(torch.nn.Module):
    """Something that holds a model as `module`, of which atoll does not know."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def test_wrappers_within_and_around_a_model_are_no_part_of_names() -> None:
    def model(*, is_wrapped: bool) -> torch.nn.Module:
        part = torch.nn.Linear(2, 2)
        inner = torch.nn.DataParallel(part) if is_wrapped else part
        complete = torch.nn.Sequential(inner, torch.nn.Linear(2, 2))
        return Holder(torch.compile(complete, backend="eager")) if is_wrapped else complete  # type: ignore[arg-type]

    names = list(read_parameters(model(is_wrapped=False)))
    assert list(read_parameters(model(is_wrapped=True))) == names
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_fingerprint_is_the_same_however_much_is_summed_at_a_time(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of one replica compare them, and so do replicas that sum in one block."""
    values = torch.arange(1, 1002).to(dtype) * -1e9
    known = set()
    for most in (2, 64, 1 << 20):
        monkeypatch.setattr(module, "_SUMMED", most)
        known.add(fingerprint(values))
    bits = values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])
    assert known == {
        (int(bits.sum(dtype=torch.int64)), int(bits[1::2].sum(dtype=torch.int64))),
    }
