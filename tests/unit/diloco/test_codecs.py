from __future__ import annotations

import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from atoll.core.errors import ValidationError
from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.diloco.codecs import CODECS, Codec, CodecRow, get_codec, get_codecs
from atoll.diloco.diloco import DiLoCo
from atoll.diloco.estimate import estimate
from atoll.diloco.reports import RoundReport
from atoll.objectstore import entropy


def normal(size: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * 1e-3).astype(np.float32)


def test_an_unknown_codec_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ValidationError, match=" or ".join(map(repr, CODECS))):
        get_codec("int6")


@pytest.mark.parametrize("row", CODECS.values(), ids=CODECS)
def test_a_row_says_the_bits_of_a_gaussian(row: CodecRow) -> None:
    values = normal(1 << 20)
    assert len(get_codec(row.name).encode(values)) * 8 / values.size == pytest.approx(
        row.bits, rel=0.02
    )


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


def test_a_part_that_would_expand_beyond_its_limit_is_refused() -> None:
    bomb = entropy.squeeze(np.zeros(64 << 20, np.uint8))
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than the 1000 bytes"):
        entropy.unsqueeze(bomb, 1000)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()
    for bad in (bomb[:-1], bomb + b"x", zlib.compress(bytes(1000)), b""):
        with pytest.raises(ValueError, match="coded part"):
            entropy.unsqueeze(bad, 64 << 20)


def test_an_unknown_codec_of_means_is_refused_by_its_own_name() -> None:
    with pytest.raises(ValidationError, match="down_codec: 'zip'"):
        ObjectStoreAllReduce("memory:///codecs", 0, 1, codec="int4", down_codec="zip")


class Half(Codec):
    """IEEE half precision: all that somebody writes who adds a codec, beside the row."""

    def encode(self, values: np.ndarray) -> bytes:
        return values.astype("<f2").tobytes()

    def decode(self, data: bytes | memoryview, size: int) -> np.ndarray:
        if len(data) != 2 * size:
            raise ValueError(f"expected {2 * size} bytes, found {len(data)}")
        return np.frombuffer(data, "<f2").astype(np.float32)


@pytest.fixture
def half() -> Iterator[str]:
    row = CodecRow("half", f"{__name__}:Half", 16.0, 900, 900, "a test", mean_codec="fp32")
    CODECS["half"] = row
    yield row.name
    del CODECS["half"]


def test_a_class_and_a_row_are_all_that_a_codec_needs(half: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def train(rank: int) -> tuple[np.ndarray, list[RoundReport]]:
        model = torch.nn.Linear(40, 50, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        options = {"outer": "nesterov", "outer_lr": 1.0, "outer_momentum": 0.0}
        with DiLoCo(
            *(model, inner),
            **{"uri": str(tmp_path), "rank": rank, "world_size": 2, "sync_every": 1},
            **{"codec": half, "timeout": 60, "grace_s": 30} | options,
        ) as diloco:
            for _ in range(3):
                model.weight.grad = torch.from_numpy(normal(2000, rank)).reshape(50, 40)
                inner.step()
            return model.weight.detach().numpy().reshape(-1).copy(), list(diloco.reports)

    with ThreadPoolExecutor(2) as pool:
        (first, reports), (second, _) = pool.map(train, range(2))
    assert first.tobytes() == second.tobytes()
    exact = -3 * (normal(2000, 0) + normal(2000, 1)) / 2
    assert 0 < np.abs(first - exact).max() < 2e-6  # of half precision, and fed back
    assert all(each.members == (0, 1) for each in reports)


def test_whoever_names_codecs_names_a_new_one(half: str) -> None:
    costs = {"parameters": 1000, "replicas": 2, "sync_every": 1, "step_s": 1.0, "link_gbps": 1.0}
    assert estimate(codec=half, **costs).bytes_up == 1000 * 2
    for field, call in (
        ("codec", lambda: estimate(codec="zip", **costs)),
        ("codec", lambda: get_codec("zip")),
        ("down_codec", lambda: get_codecs(half, "zip")),
    ):
        with pytest.raises(ValidationError, match=f"{field}: 'zip'.* or 'half'"):
            call()
    assert get_codecs(half, None)[1].name == "fp32"
    assert get_codecs("int4", None)[1].name == "int4"
    with pytest.raises(ValidationError, match="half:2"):
        get_codec("half:2")


def test_the_table_of_codecs_loads_none_of_them() -> None:
    code = "import sys, atoll.diloco.codecs; print({'numpy', 'zstandard'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
