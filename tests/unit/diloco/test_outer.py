from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import ValidationError
from atoll.diloco.outer import Fragment, Slot, load_bytes, split, to_bytes

SHAPES = st.lists(
    st.lists(st.integers(1, 7), max_size=3).map(tuple).map(lambda shape: shape), min_size=1
)


def fragment(size: int, lr: float, beta: float) -> Fragment:
    return Fragment([Slot("w", (size,), 0, size)], lr, beta)


@pytest.mark.parametrize(("lr", "beta"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.5)])
def test_ten_steps_are_those_of_torch_sgd_with_nesterov(lr: float, beta: float) -> None:
    rng = np.random.default_rng(0)
    ours = fragment(100_000, lr, beta)
    ours.values[:] = rng.standard_normal(100_000)
    theirs = torch.nn.Parameter(torch.from_numpy(ours.values.copy()))
    optimizer = torch.optim.SGD([theirs], lr=lr, momentum=beta, nesterov=beta > 0)
    for _ in range(10):
        gradient = rng.standard_normal(100_000).astype(np.float32)
        theirs.grad = torch.from_numpy(gradient)
        optimizer.step()
        ours.step(gradient)
    np.testing.assert_allclose(ours.values, theirs.detach().numpy(), rtol=0, atol=2e-6)


def test_lr_one_without_momentum_lands_on_the_mean_of_the_replicas() -> None:
    ours = fragment(3, 1.0, 0.0)
    ours.values[:] = [1, 2, 3]
    replicas = np.array([[2, 2, 2], [4, 0, 3]], np.float32)
    ours.step((ours.values - replicas).mean(axis=0))
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


def fresh(**changes: object) -> Fragment:
    given: dict = {"a": (3, 2), "b": (4,), "c": ()}
    lr, beta = changes.pop("lr", 0.7), changes.pop("beta", 0.9)
    (matches,) = split(list((given | changes).items()), 1, lr, beta)
    return matches


def some() -> Fragment:
    matches = fresh()
    matches.values[:] = np.arange(matches.values.size) + 0.5
    matches.step(np.ones(matches.values.size, np.float32))
    return matches


def test_a_checkpoint_comes_back_to_the_bit() -> None:
    ours, theirs = fresh(), some()
    load_bytes(ours, to_bytes(theirs))
    assert np.array_equal(ours.values, theirs.values)
    assert np.array_equal(ours.momentum, theirs.momentum)
    assert ours.rounds == 1


def test_a_damaged_checkpoint_is_refused_and_changes_nothing() -> None:
    data, ours = to_bytes(some()), fresh()
    body_start = data.index(b"}", data.index(b"has_momentum")) + 1
    for at in range(body_start, len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        with pytest.raises(ValueError, match="digest"):
            load_bytes(ours, bytes(damaged))
    for end in range(len(data)):
        with pytest.raises(ValueError, match="checkpoint"):
            load_bytes(ours, data[:end])
    assert not ours.values.any()
    assert ours.rounds == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": (5,)}, r"model: 'b \[5\]' .* the run has b \[4\]"),
        ({"d": (2,)}, "model: 4 .* the run has 3 parameters"),
        ({"lr": 0.5}, r"outer_lr: 0.5 .* began with 0.7"),
        ({"beta": 0.5}, r"outer_momentum: 0.5 .* began with 0.9"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimiser_names_what_differs(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        load_bytes(fresh(**changes), to_bytes(some()))
