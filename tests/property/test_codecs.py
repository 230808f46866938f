"""What every codec promises, for any finite array."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from atoll.diloco.codecs import CODECS, get_codec

SIZES = st.one_of(
    st.integers(0, 40),
    st.sampled_from([255, 256, 257, 511, 4095, 4096, 4097, (1 << 17) - 1, (1 << 17) + 257]),
)
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
LARGEST = np.finfo(np.float32).max


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    size = draw(SIZES)
    if size <= 40:
        return draw(arrays.arrays(np.float32, size, elements=FINITE))
    # Large ones come from a generator: hypothesis would spend its time on drawing them.
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    row = rng.standard_normal(size) * 10.0 ** draw(st.integers(-44, 37))
    row[rng.random(size) < draw(st.sampled_from([0.0, 0.5, 1.0]))] = 0
    return row.clip(-LARGEST, LARGEST).astype(np.float32)


def there_and_back(name: str, row: np.ndarray) -> np.ndarray:
    codec = get_codec(name)
    return codec.decode(codec.encode(row), row.size)


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=120, deadline=None)
@given(row=rows())
def test_decoding_gives_as_many_finite_float32_values(name: str, row: np.ndarray) -> None:
    out = there_and_back(name, row)
    assert out.shape == row.shape
    assert out.dtype == np.float32
    assert np.isfinite(out).all()


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=30, deadline=None)
@given(row=rows())
def test_encoding_is_deterministic_and_leaves_its_input_alone(name: str, row: np.ndarray) -> None:
    before = row.copy()
    row.setflags(write=False)
    assert get_codec(name).encode(row) == get_codec(name).encode(row.copy())
    assert np.array_equal(row, before)


@settings(max_examples=120, deadline=None)
@given(row=rows())
def test_fp32_is_exact_to_the_bit(row: np.ndarray) -> None:
    assert np.array_equal(there_and_back("fp32", row).view(np.uint32), row.view(np.uint32))


@settings(max_examples=120, deadline=None)
@given(row=rows())
def test_bf16_is_the_nearest_bf16(row: np.ndarray) -> None:
    torch = pytest.importorskip("torch")
    expected = torch.from_numpy(row).bfloat16().float().numpy()
    largest = np.uint32(0x7F7F0000).view(np.float32)
    assert np.array_equal(there_and_back("bf16", row), expected.clip(-largest, largest))


def block_largest(row: np.ndarray, block: int) -> np.ndarray:
    padded = np.zeros(-(-row.size // block) * block)
    padded[: row.size] = np.abs(row)
    return np.repeat(padded.reshape(-1, block).max(axis=1), block)[: row.size]


@settings(max_examples=120, deadline=None)
@given(row=rows())
def test_int8_is_off_by_at_most_half_a_step(row: np.ndarray) -> None:
    error = np.abs(row.astype(np.float64) - there_and_back("int8", row))
    smallest_scale = 127 * 1.2e-38
    assert (error <= block_largest(row, 256) / 127 * 0.5001 + smallest_scale).all()


@settings(max_examples=120, deadline=None)
@given(row=rows())
def test_int4_is_off_by_at_most_half_a_step_unless_127_steps_away(row: np.ndarray) -> None:
    error = np.abs(row.astype(np.float64) - there_and_back("int4", row))
    step = 0.36 * block_mean_square(row, 512) ** 0.5
    is_far = np.abs(row) > 120 * np.minimum(step, 2.0**120)  # the largest step there is
    is_tiny = step < 1.2e-38  # the block may be zeros: there is no smaller step
    assert (error <= step * 0.51 + 2.4e-38)[~is_far & ~is_tiny].all()
    most = np.maximum(np.abs(row.astype(np.float64)), step * 0.51)
    assert (error <= most)[is_far | is_tiny].all()


def block_mean_square(row: np.ndarray, block: int) -> np.ndarray:
    padded = np.zeros(-(-row.size // block) * block)
    padded[: row.size] = row
    return np.repeat((padded.reshape(-1, block) ** 2).mean(axis=1), block)[: row.size]


@settings(max_examples=120, deadline=None)
@given(row=rows())
def test_e3m0_is_off_by_at_most_a_third_or_a_76th_of_the_largest(row: np.ndarray) -> None:
    row = row.clip(-2.5e38, 2.5e38)
    error = np.abs(row.astype(np.float64) - there_and_back("e3m0", row))
    allowed = np.maximum(np.abs(row.astype(np.float64)) / 3, block_largest(row, 256) / 76)
    assert (error <= allowed * 1.0001 + 1.2e-38).all()


@settings(max_examples=120, deadline=None)
@given(row=rows())
def test_sparse_keeps_the_largest_and_their_signs(row: np.ndarray) -> None:
    out = there_and_back("sparse", row)
    for start in range(0, row.size, 4096):
        chunk = np.abs(row[start : start + 4096].astype(np.float64))
        kept = out[start : start + 4096] != 0
        assert kept.sum() <= 64
        if kept.any() and not kept.all():
            # Magnitudes are compared by their upper 20 bits, hence the margin.
            assert chunk[~kept].max() <= chunk[kept].min() * 1.001 + 1e-38
    assert (np.sign(out)[out != 0] == np.sign(row)[out != 0]).all()


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=120, deadline=None)
@given(row=rows(), data=st.data())
def test_damaged_bytes_raise_value_error_or_decode_to_an_array(
    name: str, row: np.ndarray, data: st.DataObject
) -> None:
    encoded = bytearray(get_codec(name).encode(row))
    if not encoded:
        return
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    try:
        out = get_codec(name).decode(bytes(encoded), row.size)
    except ValueError:
        return
    assert out.shape == row.shape


@pytest.mark.parametrize("name", CODECS)
@settings(max_examples=40, deadline=None)
@given(rubbish=st.binary(max_size=200), size=st.integers(0, 1000))
def test_rubbish_is_refused(name: str, rubbish: bytes, size: int) -> None:
    if name == "fp32":
        rubbish += bytes([0] * (1 if len(rubbish) == 4 * size else 0))
    with pytest.raises(ValueError, match=r"."):
        get_codec(name).decode(rubbish, size)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4", "e3m0", "sparse"])
def test_cut_short_at_any_byte_is_refused(name: str) -> None:
    row = np.random.default_rng(0).standard_normal(700).astype(np.float32)
    encoded = get_codec(name).encode(row)
    for end in range(len(encoded)):
        with pytest.raises(ValueError, match=r"."):
            get_codec(name).decode(encoded[:end], row.size)
