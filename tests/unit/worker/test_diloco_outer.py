from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import ValidationError
from atoll.worker.outer import Fragment, Slot, load_bytes, split, to_bytes

SHAPES = st.lists(
    st.lists(st.integers(1, 7), max_size=3).map(tuple).map(lambda shape: shape), min_size=1
)


def fragment(size: int) -> Fragment:
    return Fragment([Slot("w", (size,), 0, size)])


@pytest.mark.parametrize(("lr", "beta"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.5)])
def test_ten_steps_are_those_of_torch_sgd_with_nesterov(lr: float, beta: float) -> None:
    rng = np.random.default_rng(0)
    ours = fragment(100_000)
    ours.values[:] = rng.standard_normal(100_000)
    theirs = torch.nn.Parameter(torch.from_numpy(ours.values.copy()))
    optimizer = torch.optim.SGD([theirs], lr=lr, momentum=beta, nesterov=beta > 0)
    for _ in range(10):
        gradient = rng.standard_normal(100_000).astype(np.float32)
        theirs.grad = torch.from_numpy(gradient)
        optimizer.step()
        ours.step(gradient, lr, beta)
    np.testing.assert_allclose(ours.values, theirs.detach().numpy(), rtol=0, atol=1e-5)


def test_lr_one_without_momentum_lands_on_the_mean_of_the_replicas() -> None:
    ours = fragment(3)
    ours.values[:] = [1, 2, 3]
    replicas = np.array([[2, 2, 2], [4, 0, 3]], np.float32)
    ours.step((ours.values - replicas).mean(axis=0), 1.0, 0.0)
    assert ours.values.tolist() == [3, 1, 2.5]


@settings(max_examples=100, deadline=None)
@given(shapes=SHAPES, parts=st.integers(1, 6))
def test_every_parameter_is_in_exactly_one_fragment(
    shapes: list[tuple[int, ...]], parts: int
) -> None:
    named = [(f"p{at}", shape) for at, shape in enumerate(shapes)]
    if parts > len(named):
        with pytest.raises(ValidationError, match="at most"):
            split(named, parts)
        return
    fragments = split(named, parts)
    slots = [slot for each in fragments for slot in each.slots]
    assert sorted((slot.name, slot.shape) for slot in slots) == sorted(named)
    for each in fragments:
        edges = [(slot.start, slot.stop) for slot in each.slots]
        assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
        assert each.values.size == edges[-1][1]


def test_fragments_of_a_transformer_are_about_equal() -> None:
    layer = [(256, 768), (768,), (256, 256), (256,), (256, 1024), (1024,), (1024, 256), (256,)]
    named = [(f"{at}", shape) for at, shape in enumerate([(256, 256), *layer * 6])]
    sizes = [each.values.size for each in split(named, 4)]
    assert max(sizes) / min(sizes) < 1.1


def some() -> list[Fragment]:
    fragments = split([("a", (3, 2)), ("b", (4,)), ("c", ())], 2)
    for at, each in enumerate(fragments):
        each.values[:] = np.arange(each.values.size) + at
        each.momentum[:] = -each.values
    return fragments


def test_a_checkpoint_comes_back_to_the_bit() -> None:
    fresh = split([("a", (3, 2)), ("b", (4,)), ("c", ())], 2)
    load_bytes(fresh, to_bytes(some()))
    for ours, theirs in zip(fresh, some(), strict=True):
        assert np.array_equal(ours.values, theirs.values)
        assert np.array_equal(ours.momentum, theirs.momentum)


def test_a_damaged_checkpoint_is_refused_and_changes_nothing() -> None:
    data = to_bytes(some())
    fresh = split([("a", (3, 2)), ("b", (4,)), ("c", ())], 2)
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(ValueError, match=r"."):
            load_bytes(fresh, bytes(damaged))
        with pytest.raises(ValueError, match=r"."):
            load_bytes(fresh, data[:at])
    assert not any(each.values.any() for each in fresh)


def test_a_checkpoint_of_another_model_names_the_first_difference() -> None:
    other = split([("a", (3, 2)), ("b", (5,)), ("c", ())], 2)
    with pytest.raises(ValueError, match=r"b \[4\] where this replica has b \[5\]"):
        load_bytes(other, to_bytes(some()))
