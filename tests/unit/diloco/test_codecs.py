from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
import pytest

from atoll.core.errors import ValidationError
from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.diloco.codecs import CODECS, dense, frame, get_codec, sparse


def normal(size: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 1e-3).astype(np.float32)


def test_an_unknown_codec_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValidationError, match="'fp32' or 'bf16' or 'int8' .* or 'sparse'"):
        get_codec("int6")


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("bf16", 11.0),
        ("int8", 7.8),
        ("int5", 5.15),
        ("int4", 3.65),
        ("e3m0", 3.65),
        ("int3", 3.05),
        ("sparse", 0.155),
    ],
)
def test_bits_a_value_of_a_gaussian(name: str, most: float) -> None:
    row = normal(1 << 20)
    assert len(get_codec(name).encode(row)) * 8 / row.size <= most


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("bf16", 0.002),
        ("int8", 0.008),
        ("int5", 0.037),
        ("int4", 0.105),
        ("e3m0", 0.2),
        ("int3", 0.16),
        ("sparse", 0.945),
    ],
)
def test_relative_error_of_a_gaussian(name: str, most: float) -> None:
    row = normal(1 << 18)
    out = get_codec(name).decode(get_codec(name).encode(row), row.size)
    assert np.linalg.norm(out - row) <= most * np.linalg.norm(row)


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0", "sparse"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_has_no_code_is_refused_by_place(name: str, bad: float) -> None:
    row = normal(1000)
    row[417] = bad
    with pytest.raises(ValidationError, match=r"values\[417\]"):
        get_codec(name).encode(row)


@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_nan_and_infinity_travel_where_there_is_a_code(name: str) -> None:
    row = np.array([1, np.nan, np.inf, -np.inf, np.finfo(np.float32).max], np.float32)
    out = get_codec(name).decode(get_codec(name).encode(row), row.size)
    assert np.isnan(out[1])
    assert out[2] == np.inf
    assert out[3] == -np.inf
    assert np.isfinite(out[[0, 4]]).all()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("size", [0, 1, 300, 5000])
def test_zeros_come_back_as_zeros(name: str, size: int) -> None:
    out = get_codec(name).decode(get_codec(name).encode(np.zeros(size, np.float32)), size)
    assert not out.any()


@pytest.mark.parametrize("name", CODECS)
def test_a_wrong_size_is_refused(name: str) -> None:
    encoded = get_codec(name).encode(normal(512))
    for size in (0, 511, 513):
        with pytest.raises(ValueError, match="expected"):
            get_codec(name).decode(encoded, size)


@pytest.mark.parametrize("name", CODECS)
def test_a_view_of_a_larger_buffer_decodes(name: str) -> None:
    row = normal(777)
    encoded = get_codec(name).encode(row)
    view = memoryview(b"abc" + encoded + b"xyz")[3:-3]
    assert np.array_equal(
        get_codec(name).decode(view, row.size), get_codec(name).decode(encoded, row.size)
    )


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0", "int3", "sparse"])
def test_error_feedback_delivers_everything_in_the_end(name: str) -> None:
    codec, row = get_codec(name), normal(8192)
    residuals = np.zeros_like(row)
    sent = np.zeros(row.size)
    rounds = 400
    for _ in range(rounds):
        wanted = row + residuals
        got = codec.decode(codec.encode(wanted), row.size)
        residuals = wanted - got
        sent += got
    error = np.linalg.norm(sent / rounds - row) / np.linalg.norm(row)
    assert error < {"int8": 1e-4, "sparse": 0.2}.get(name, 2e-3)


def test_a_part_that_would_unpack_to_more_than_fits_is_refused() -> None:
    small = get_codec("e3m0").encode(np.zeros(10, np.float32))
    large = get_codec("e3m0").encode(np.zeros(10_000_000, np.float32))
    forged = large[:4] + small[4:12] + large[12:]
    with pytest.raises(ValueError, match="more than"):
        get_codec("e3m0").decode(forged, 10)


def _by_zlib(values: np.ndarray) -> bytes:
    """As release 0.1 coded a part."""
    coder = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(np.ascontiguousarray(values).data) + coder.flush()


@pytest.mark.parametrize("name", [name for name in CODECS if name != "fp32"])
def test_what_release_0_1_encoded_decodes_to_the_same_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = normal(10_000)
    coded = get_codec(name).encode(row)
    for module in (dense, sparse):
        monkeypatch.setattr(module, "squeeze", _by_zlib)
    old = get_codec(name).encode(row)
    assert old != coded
    assert get_codec(name).decode(old, row.size).tobytes() == (
        get_codec(name).decode(coded, row.size).tobytes()
    )


@pytest.mark.parametrize("squeeze", [frame.squeeze, _by_zlib])
def test_a_part_that_would_expand_beyond_its_limit_is_refused(
    squeeze: Callable[[np.ndarray], bytes],
) -> None:
    bomb = squeeze(np.zeros(64 << 20, np.uint8))
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than the 1000 bytes"):
        frame.unsqueeze(bomb, 1000)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    for bad in (bomb[:-1], bomb + b"x"):
        with pytest.raises(ValueError, match="coded part"):
            frame.unsqueeze(bad, 64 << 20)


def test_an_unknown_codec_of_means_is_refused_by_its_own_name() -> None:
    with pytest.raises(ValidationError, match="down_codec: 'zip'"):
        ObjectStoreAllReduce("memory:///codecs", 0, 1, codec="int4", down_codec="zip")
