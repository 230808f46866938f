"""Checkpoints of values: any replica loads them, whatever its cut; damage is found."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from atoll.core.errors import ValidationError
from atoll.diloco.codecs import get_codec
from atoll.diloco.packing import TensorSpec, Vector
from atoll.diloco.round import pieces
from atoll.diloco.round.cells import Cut, RunLayout, Share
from atoll.diloco.round.objects import Checkpoint, piece_key
from atoll.diloco.round.pieces import check_same, load_pieces, save_piece
from atoll.diloco.round.reduce import Fragment
from atoll.objectstore import ObjectStore

SIZES = (300_000, 7, 140_001)
NONCE = "0" * 16


class State:
    """Rows of an outer rule."""

    def __init__(self, share: Share, is_full: bool) -> None:
        place = np.arange(share.start, share.stop, dtype=np.float32)
        self.values = place + 1 if is_full else np.full(share.size, np.nan, np.float32)
        self.momentum = np.zeros(share.size, np.float32)
        if not is_full:
            self.momentum.fill(np.nan)

    is_wanted = True

    @property
    def rows(self) -> Mapping[str, Vector]:
        return {"values": self.values, "momentum": self.momentum}

    def room(self, start: int, size: int) -> None:
        return None

    def step(self, round: int, start: int, mean: Vector) -> None: ...


def layout(world: int, codec: str, outer: str = "nesterov") -> RunLayout:
    fragments = tuple((TensorSpec("float32", (size,)),) for size in SIZES)
    return RunLayout(fragments, world, codec, codec, outer)


def fragments(world: int, codec: str, process: int, count: int, *, full: bool) -> list[Fragment]:
    cuts = [Cut.of(size, world, [get_codec(codec)]) for size in SIZES]
    shares = [Share(cut, process, count) for cut in cuts]
    return [Fragment(share, State(share, full)) for share in shares]


def save(store: ObjectStore, world: int = 3, codec: str = "fp32", processes: int = 1) -> Checkpoint:
    meta = Checkpoint(4, "0" * 32, "0" * 32, world, NONCE, processes)
    for process in range(processes):
        carried = fragments(world, codec, process, processes, full=True)
        save_piece(store, "run/", meta, layout(world, codec), carried)
    return meta


@pytest.mark.parametrize("saver", [(3, "fp32", 1), (2, "int8", 3), (8, "int4", 4)])
@pytest.mark.parametrize("reader", [(3, "fp32", 1), (5, "int4", 2), (2, "int8", 3)])
def test_a_state_is_loaded_by_any_world_with_any_cut(
    saver: tuple[int, str, int], reader: tuple[int, str, int]
) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    meta = save(store, *saver)
    world, codec, count = reader
    for process in range(count):
        into = fragments(world, codec, process, count, full=False)
        assert load_pieces(store, "run/", meta, lambda _: None, into)
        for fragment in into:
            share, rows = fragment.share, fragment.outer.rows
            expected = np.arange(share.start, share.stop, dtype=np.float32) + 1
            assert np.array_equal(rows["values"], expected)
            assert not rows["momentum"].any()
            assert np.isfinite(rows["momentum"]).all()


def test_zeros_take_no_bytes() -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    save(store)
    (info,) = store.list("run/state")
    assert info.size < 4 * sum(SIZES) + 2000


def test_damage_anywhere_is_found() -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    meta = save(store)
    key = f"run/{piece_key(4, NONCE, 0)}"
    good = bytes(store.get(key))
    chance = np.random.default_rng(0)
    places = [*range(0, 500, 3), *chance.integers(500, len(good), 60).tolist()]
    for at in places:
        store.put(key, good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        assert not _loads(store, meta), at
    for at in (0, 5, 400, len(good) // 2, len(good) - 1):
        store.put(key, good[:at])
        assert not _loads(store, meta), at
    store.delete([key])
    assert not _loads(store, meta)


@pytest.mark.parametrize(
    "changes",
    [{"spans": ((0, 1 << 62),) * 3}, {"spans": ((5, 1),) * 3}, {"rows": ()}, {"spans": ()}],
    ids=str,
)
def test_a_piece_of_other_values_is_refused_before_memory_is_taken(changes: Any) -> None:
    """Whoever may write to the bucket can give it a good checksum."""
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    meta = save(store)
    key = f"run/{piece_key(4, NONCE, 0)}"
    good = bytes(store.get(key))
    magic, length, _ = pieces._HEAD.unpack(good[: pieces._HEAD.size])
    header = pieces._HEADER.decode(good[pieces._HEAD.size :][:length])
    body = msgspec.json.encode(msgspec.structs.replace(header, **changes))
    head = pieces._HEAD.pack(magic, len(body), zlib.crc32(body)) + body
    store.put(key, head + good[pieces._HEAD.size + length :])
    assert not _loads(store, meta)


def _loads(store: ObjectStore, meta: Checkpoint) -> bool:
    into = fragments(3, "fp32", 0, 1, full=False)
    return load_pieces(store, "run/", meta, lambda _: None, into)


def test_another_model_or_rule_is_refused_by_name() -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    meta = save(store)
    into = fragments(3, "fp32", 0, 1, full=False)
    other = layout(3, "fp32", "adam")
    with pytest.raises(ValidationError, match="outer is 'nesterov' there and 'adam' here"):
        load_pieces(store, "run/", meta, lambda each: check_same(each, other), into)
