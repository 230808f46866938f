"""Joining from the store alone: the newest checkpoint, and the means of the rounds after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from atoll.core.errors import Gone, NotFound
from atoll.remote.blobs import Blobs
from atoll.worker.allreduce import layout as layouts
from atoll.worker.allreduce import wire
from atoll.worker.allreduce.exchange import Abandoned, Exchange
from atoll.worker.allreduce.keys import Keys, parse_attempt, parse_round
from atoll.worker.allreduce.layout import Layout, Vector
from atoll.worker.allreduce.pace import poll_pause
from atoll.worker.allreduce.roster import Roster
from atoll.worker.allreduce.settle import Settler

log = logging.getLogger("atoll.allreduce")


@dataclass(frozen=True)
class Checkpoint:
    """`state` is what was saved: bytes, or a list of arrays."""

    round: int
    state: bytes | list[Any]


@dataclass(frozen=True)
class Mean:
    """What a committed round gave, as float32 arrays of its tensors' shapes."""

    round: int
    name: str
    tensors: list[Vector]


@dataclass(frozen=True)
class JoinState:
    """Apply `means` in order to `checkpoint`, then go on at `round`."""

    round: int
    checkpoint: Checkpoint | None
    means: list[Mean]


class _Arrays(msgspec.Struct, frozen=True):
    specs: list[tuple[str, tuple[int, ...]]]
    data: list[bytes]


def save(blobs: Blobs, keys: Keys, number: int, state: bytes | Sequence[Any]) -> bool:
    key = keys.checkpoint(number)
    return blobs.create(key, wire.seal(wire.CHECKPOINT, wire.fence(key), _pack(state)))


def load(blobs: Blobs, keys: Keys) -> Checkpoint | None:
    for blob in reversed(blobs.list(keys.checkpoints())):
        number = parse_round(blob.key)
        if number is None:
            continue
        try:
            data = blobs.get(blob.key)
            body = wire.unseal(wire.CHECKPOINT, wire.fence(blob.key), data)
            return Checkpoint(number, _unpack(body))
        except (NotFound, ValueError) as error:
            log.warning("checkpoint %s cannot be used: %s", blob.key, error)
    return None


def latest(blobs: Blobs, keys: Keys, after: int = -1) -> tuple[int, int] | None:
    """Round and attempt of the newest roster."""
    listing = blobs.list(keys.rosters(), keys.roster(after, 9999) if after >= 0 else None)
    return max(filter(None, (parse_attempt(blob.key) for blob in listing)), default=None)


def join(settler: Settler, exchange: Callable[[Roster, Layout], Exchange]) -> JoinState:
    """Raises Gone if means after the checkpoint are no longer kept."""
    blobs, keys = settler.blobs, settler.keys
    checkpoint = load(blobs, keys)
    start = 0 if checkpoint is None else checkpoint.round + 1
    means: list[Mean] = []
    number = start
    while True:
        found = latest(blobs, keys, number - 1)
        if found is None:
            return JoinState(number, checkpoint, means)
        last = found[0]
        for number in range(number, last + 1):
            mean = _read_round(settler, exchange, number, is_last=number == last)
            if mean is not None:
                means.append(mean)
        number = last + 1


def _read_round(
    settler: Settler,
    exchange: Callable[[Roster, Layout], Exchange],
    number: int,
    *,
    is_last: bool,
) -> Mean | None:
    """The round's mean, None if it is void. One that hangs in the air is made void."""
    attempt, started = 0, time.monotonic()
    while True:
        roster = settler.read(settler.keys.roster(number, attempt))
        if roster is None:
            # Given up, and the next attempt is not decided yet: by the members, or never.
            if _is_overdue(settler, started) or not is_last:
                key = settler.keys.roster(number, attempt)
                roster = settler.write(key, settler.void(number, attempt))
            else:
                time.sleep(poll_pause(time.monotonic() - started, 0.0))
                continue
        if not roster.members:
            return None
        settler.last = roster
        layout = Layout.unpack(roster.layout)
        reader = exchange(roster, layout)
        try:
            flat = reader.read_all()
            if flat is not None:
                return Mean(number, layout.name, layouts.split(flat, layout))
            if not is_last:
                raise Gone(number, number + 1)
            if _is_overdue(settler, started):
                reader.abandon_missing()
        except Abandoned:
            attempt += 1
            continue
        time.sleep(poll_pause(time.monotonic() - started, 0.0))


def _is_overdue(settler: Settler, started: float) -> bool:
    return time.monotonic() - started > 2 * settler.history.owner_grace(0.0)


def _pack(state: bytes | Sequence[Any]) -> bytes:
    if isinstance(state, bytes | bytearray | memoryview):
        return msgspec.msgpack.encode(bytes(state))
    arrays = [np.asarray(a.detach().cpu() if hasattr(a, "detach") else a) for a in state]
    return msgspec.msgpack.encode(
        _Arrays([(a.dtype.str, a.shape) for a in arrays], [a.tobytes() for a in arrays])
    )


def _unpack(body: memoryview) -> bytes | list[Any]:
    try:
        found = msgspec.msgpack.decode(body, type=bytes | _Arrays)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a checkpoint: {error}") from error
    if isinstance(found, bytes):
        return found
    return [
        np.frombuffer(data, dtype).reshape(shape).copy()
        for (dtype, shape), data in zip(found.specs, found.data, strict=True)
    ]
