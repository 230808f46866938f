"""Deltas of weights come back bit for bit, whatever the type; damage is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.weights import codec
from atoll.weights.records import Damaged
from atoll.weights.state import DTYPE_SIZES, Tensors, TensorsSource, TensorValue

Array = NDArray[np.unsignedinteger]
UNITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def encode(old: Array, new: Array) -> bytes:
    return codec.encode_row(old, new, codec.changed_indices(old, new))


def decoded(data: bytes, old: Array) -> Array:
    indices, values = codec.decode_row(data, old)
    new = old.copy()
    new[slice(None) if indices is None else indices] = values
    return new


@st.composite
def rows(draw: st.DrawFn) -> tuple[Array, Array]:
    unit = UNITS[draw(st.sampled_from([1, 2, 4]))]
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.integers(1, 3000))
    old = rng.integers(0, np.iinfo(unit).max, size, dtype=unit, endpoint=True)
    new = old.copy()
    share = draw(st.sampled_from([0.001, 0.01, 0.3, 0.59, 0.61, 1.0]))
    chosen = rng.random(size) < share
    chosen[draw(st.integers(0, size - 1))] = True
    reach = draw(st.sampled_from([1, 3, 300, np.iinfo(unit).max]))
    with np.errstate(over="ignore"):
        new[chosen] += rng.integers(1, min(reach, np.iinfo(unit).max), chosen.sum(), unit, True)
    return old, new


@settings(max_examples=150, deadline=None)
@given(rows())
def test_a_row_comes_back(pair: tuple[Array, Array]) -> None:
    old, new = pair
    np.testing.assert_array_equal(decoded(encode(old, new), old), new)
    np.testing.assert_array_equal(
        codec.decode_plain(codec.encode_plain(new), new.size, new.dtype), new
    )


def test_every_bf16_to_every_kind_of_bf16() -> None:
    """NaN payloads, -0.0, infinities and wraps included."""
    every = np.arange(1 << 16, dtype=np.uint16)
    for other in (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x3F80, 0x0001):
        target = np.full_like(every, other)
        for old, new in ((every, target), (target, every)):
            np.testing.assert_array_equal(decoded(encode(old, new), old), new)


def test_neighbouring_numbers_are_one_step_apart() -> None:
    """A step of one unit in the last place costs the same on both sides of zero."""
    values = np.array([1.0, -1.0, 3e-8, -3e-8], np.float32)
    up = np.nextafter(values, np.float32(np.inf)).view(np.uint32)
    steps = codec._order(up) - codec._order(values.view(np.uint32))
    assert steps.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 765])
def test_gaps_around_the_escape(gap: int) -> None:
    old = np.zeros(3000, np.uint16)
    new = old.copy()
    new[[gap, 2 * gap + 1, 2 * gap + 2]] = 7
    np.testing.assert_array_equal(decoded(encode(old, new), old), new)


@settings(max_examples=300, deadline=None)
@given(rows(), st.integers(0, 2**32), st.integers(1, 255))
def test_damage_is_refused_or_gives_other_values_never_more(
    pair: tuple[Array, Array], at: int, flip: int
) -> None:
    """Nothing but Damaged is raised; what decodes has the size of the row."""
    old, new = pair
    data = bytearray(encode(old, new))
    data[at % len(data)] ^= flip
    for bad in (bytes(data), bytes(data[: at % len(data)]), bytes(data) + b"x"):
        try:
            indices, values = codec.decode_row(bad, old)
        except Damaged:
            continue
        assert values.size == (old.size if indices is None else indices.size)
        assert indices is None or (indices[0] >= 0 and indices[-1] < old.size)


@settings(max_examples=100, deadline=None)
@given(rows())
def test_a_digest_moves_by_the_values_that_change(pair: tuple[Array, Array]) -> None:
    old, new = pair
    indices = codec.changed_indices(old, new)

    def digest(values: Array) -> int:
        data = values.view(np.uint8)
        return codec.digest(np.concatenate([data, np.zeros(-data.size % 4, np.uint8)]).view("u4"))

    step = codec.digest_step(indices, old[indices], new[indices])
    assert (digest(old) + step) % 2**64 == digest(new) != digest(old)


def run(work: object, items: object) -> list[object]:
    return [work(item) for item in items]  # type: ignore[operator,attr-defined]


def tensors_of(rng: np.random.Generator, names: int) -> dict[str, TensorValue]:
    tensors = {}
    for name in range(names):
        dtype = str(rng.choice(sorted(DTYPE_SIZES)))
        shape = tuple(int(n) for n in rng.integers(0, 40, rng.integers(0, 3)))
        size = int(np.prod(shape, dtype=np.int64)) * DTYPE_SIZES[dtype]
        tensors[f"t{name}"] = TensorValue(dtype, shape, rng.integers(0, 256, size, dtype=np.uint8))
    return tensors


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_versions_of_all_types_with_new_changed_and_removed_tensors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    base = TensorsSource(tensors_of(rng, 8).items(), {}, run).copy()  # type: ignore[arg-type]
    for _ in range(3):
        new = {
            name: each._replace(data=each.data.copy())
            for name, each in base.tensors.items()
            if rng.random() < 0.9
        }
        for each in new.values():
            chosen = rng.random(each.data.size) < rng.choice([0.0, 0.01, 0.9])
            each.data[chosen] += rng.integers(0, 256, chosen.sum(), dtype=np.uint8)
        new |= {k: v for k, v in tensors_of(rng, 12).items() if rng.random() < 0.2}
        delta = TensorsSource(new.items(), {}, run).delta(base)  # type: ignore[arg-type]
        parts = list(delta)
        change = base.prepare(parts, delta.removed)
        assert change.state == delta.state
        base.apply(change)
        assert {n: (t.dtype, t.shape, t.data.tobytes()) for n, t in base.tensors.items()} == {
            n: (t.dtype, t.shape, t.data.tobytes()) for n, t in new.items()
        }
        assert base.state == delta.state == Tensors(dict(base.tensors), {}, run).state  # type: ignore[arg-type]
        base.verify()
