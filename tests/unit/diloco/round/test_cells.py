"""Cells as bytes: any change of them is found, and before memory is taken."""

from __future__ import annotations

import uuid
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.diloco.codecs import get_codec
from atoll.diloco.round import cells as wire
from atoll.diloco.round.cells import CellReader, Damaged
from atoll.objectstore import ObjectStore

PLACE = wire.place_of("mean/1", "x")


def stored(data: bytes) -> ObjectStore:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    store.put("k", data)
    return store


def read_all(data: bytes, sizes: list[int], codec: str, place: bytes = PLACE) -> list[np.ndarray]:
    reader = CellReader(stored(data), "k", place, len(sizes), slice(0, len(sizes)))
    rows = [np.empty(size, np.float32) for size in sizes]
    for row in rows:
        reader.read(get_codec(codec), row)
    return rows


def packed(codec: str, sizes: list[int]) -> tuple[bytes, list[np.ndarray]]:
    rows = [np.random.default_rng(n).standard_normal(n).astype(np.float32) for n in sizes]
    encoded = [wire.encode_cell(get_codec(codec), row) for row in rows]
    return b"".join([wire.pack_table(PLACE, encoded), *encoded]), rows


@pytest.mark.parametrize("codec", ["fp32", "int8", "sparse"])
def test_any_run_of_cells_is_read(codec: str) -> None:
    sizes = [70_000, 1, 0, 4096, 9]
    data, rows = packed(codec, sizes)
    whole = read_all(data, sizes, codec)
    if codec == "fp32":
        assert all(map(np.array_equal, whole, rows))
    reader = CellReader(stored(data), "k", PLACE, 5, slice(1, 4))
    for number in (1, 2, 3):
        out = np.empty(sizes[number], np.float32)
        reader.read(get_codec(codec), out)
        assert np.array_equal(out, whole[number])


@given(st.data())
def test_a_changed_byte_or_a_cut_is_found(data: st.DataObject) -> None:
    good, _ = packed("fp32", [5000, 17])
    at = data.draw(st.integers(0, len(good) - 1))
    if data.draw(st.booleans()):
        bad = good[:at]
    else:
        bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    with pytest.raises(Damaged):
        read_all(bad, [5000, 17], "fp32")


def test_cells_of_another_place_are_refused() -> None:
    data, _ = packed("fp32", [10])
    with pytest.raises(Damaged, match="another position"):
        read_all(data, [10], "fp32", wire.place_of("mean/2", "x"))


def test_a_size_that_no_codec_makes_is_refused_before_memory_is_taken() -> None:
    body = wire._HEAD.pack(wire._MAGIC, PLACE) + wire._rows(1).pack(1 << 40, 0)
    data = body + wire._CHECK.pack(zlib.crc32(body))
    with pytest.raises(Damaged, match="1099511627776 bytes for 100 values"):
        read_all(data, [100], "int8")


def test_words_that_moved_are_found() -> None:
    row = np.arange(40_000, dtype=np.float32)
    moved = row.copy()
    moved[:20_000], moved[20_000:] = row[20_000:], row[:20_000]
    assert wire.checksum(wire.bytes_of(row)) != wire.checksum(wire.bytes_of(moved))
