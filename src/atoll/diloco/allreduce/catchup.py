"""Joining from the store alone: the newest checkpoint and the means of the rounds after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import Gone, NotFound, ValidationError
from atoll.diloco.allreduce import layout as layouts
from atoll.diloco.allreduce import wire
from atoll.diloco.allreduce.exchange import Abandoned, Exchange
from atoll.diloco.allreduce.feedback import Entry
from atoll.diloco.allreduce.keys import Keys, parse_attempt, parse_round
from atoll.diloco.allreduce.layout import Layout, Vector
from atoll.diloco.allreduce.pace import poll_pause
from atoll.diloco.allreduce.roster import Roster
from atoll.diloco.allreduce.settle import Settler
from atoll.diloco.blobs import Blobs

log = logging.getLogger("atoll.allreduce")


@dataclass(frozen=True)
class Checkpoint:
    """The state after `round` (-1: before the first): bytes, or a list of arrays."""

    round: int
    state: bytes | list[Any]


@dataclass(frozen=True)
class Mean:
    """The mean of a committed round: float32 arrays with the shapes of its tensors."""

    round: int
    name: str
    tensors: list[Vector]


@dataclass(frozen=True)
class JoinState:
    """How to catch up: apply `means` in order to `checkpoint`, then go on at `round`."""

    round: int
    checkpoint: Checkpoint | None
    means: list[Mean]


MakeExchange = Callable[[Roster, Layout], Exchange]


class _Outdated(Exception):
    """A newer checkpoint has replaced the one that the join began with."""


class _Arrays(msgspec.Struct, frozen=True):
    specs: list[tuple[str, tuple[int, ...]]]
    data: list[bytes]


def save(blobs: Blobs, keys: Keys, number: int, state: bytes | Sequence[Any]) -> bool:
    """Store the state after round `number`; False if there already is one."""
    key = keys.checkpoint(number + 1)
    return blobs.create(key, wire.seal(wire.CHECKPOINT, wire.fence(key), _pack(state)))


def load(blobs: Blobs, keys: Keys) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None."""
    for blob in reversed(blobs.find(keys.checkpoints())):
        number = parse_round(blob.key)
        if number is None:
            continue
        try:
            data = blobs.get(blob.key)
            body = wire.unseal(wire.CHECKPOINT, wire.fence(blob.key), data)
            return Checkpoint(number - 1, _unpack(body))
        except (NotFound, ValueError) as error:
            log.warning("checkpoint %s cannot be used: %s", blob.key, error)
    return None


def latest(blobs: Blobs, keys: Keys, after: int = -1) -> tuple[int, int] | None:
    """Round and attempt of the newest roster of a round later than `after`, or None."""
    listing = blobs.find(keys.rosters(), keys.roster(after, 9999) if after >= 0 else None)
    return max(filter(None, (parse_attempt(blob.key) for blob in listing)), default=None)


def join(settler: Settler, exchange: MakeExchange) -> JoinState:
    """What a joiner starts from, as of the newest round.

    Raises Gone if there is no checkpoint and the first means are no longer in the store.
    """
    while True:
        checkpoint = load(settler.blobs, settler.keys)
        try:
            start = 0 if checkpoint is None else checkpoint.round + 1
            means, following = _read_since(settler, exchange, start)
        except _Outdated:
            continue
        return JoinState(following, checkpoint, means)


def was_committed(settler: Settler, exchange: MakeExchange, entry: Entry) -> bool:
    """Whether the round of the entry has its upload. Waits for the round, or ends it, as `join`."""
    number = entry.roster.round
    newest = latest(settler.blobs, settler.keys, number)
    if newest is None and not exchange(entry.roster, entry.layout).has(entry.rank):
        return False  # nobody else could have made the shard of this rank
    try:
        mean = _read_round(settler, exchange, number, is_last=newest is None)
    except (_Outdated, Gone):  # its means are deleted: it is over, and its last attempt counts
        attempt = entry.roster.attempt + 1
        return settler.read(settler.keys.roster(number, attempt)) is None
    committed = settler.last
    return mean is not None and committed is not None and committed.has(entry.upload)


def _read_since(settler: Settler, exchange: MakeExchange, following: int) -> tuple[list[Mean], int]:
    means: list[Mean] = []
    while True:
        newest = latest(settler.blobs, settler.keys, following - 1)
        if newest is None:
            return means, following
        for number in range(following, newest[0] + 1):
            mean = _read_round(settler, exchange, number, is_last=number == newest[0])
            if mean is not None:
                means.append(mean)
        following = newest[0] + 1


def _read_round(
    settler: Settler, exchange: MakeExchange, number: int, *, is_last: bool
) -> Mean | None:
    """The mean of the round, or None if it is void.

    A round that nobody completes any more becomes void.
    """
    attempt, started = 0, time.monotonic()
    while True:
        key = settler.keys.roster(number, attempt)
        roster = settler.read(key)
        is_over = not is_last or _is_overdue(settler, started)
        if roster is None and is_over:
            roster = settler.write(key, settler.void(number, attempt))
        if roster is not None and not roster.members:
            return None
        if roster is not None:
            settler.last = roster
            layout = Layout.unpack(roster.layout)
            reader = exchange(roster, layout)
            try:
                flat = reader.read_all()
                if flat is not None:
                    return Mean(number, layout.name, layouts.split(flat, layout))
                if is_over:
                    _fail_if_swept(settler, number, is_last=is_last)
                    reader.abandon_missing()
            except Abandoned:
                attempt, started = attempt + 1, time.monotonic()
                continue
        time.sleep(poll_pause(time.monotonic() - started, 0.0))


def _fail_if_swept(settler: Settler, number: int, *, is_last: bool) -> None:
    """Raises _Outdated or Gone if the means of round `number` have been deleted.

    Once there is a checkpoint, means are deleted only when a newer one covers them.
    """
    saved = settler.blobs.find(settler.keys.checkpoints())
    if any((parse_round(blob.key) or 0) > number for blob in saved):
        raise _Outdated
    if not saved and not is_last:
        raise Gone(number, number + 1)


def _is_overdue(settler: Settler, started: float) -> bool:
    return time.monotonic() - started > 2 * settler.history.owner_grace(0.0)


def _pack(state: bytes | Sequence[Any]) -> bytes:
    if isinstance(state, bytes | bytearray | memoryview):
        return msgspec.msgpack.encode(bytes(state))
    if not isinstance(state, list | tuple):
        raise ValidationError("state", type(state).__name__, "expected bytes or a list of arrays")
    arrays = [_array(at, each) for at, each in enumerate(state)]
    return msgspec.msgpack.encode(
        _Arrays([(a.dtype.str, a.shape) for a in arrays], [a.tobytes() for a in arrays])
    )


def _array(at: int, value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # numpy has none; float32 holds every value of it
            value = value.float()
    array = np.asarray(value)
    if array.dtype.hasobject:  # its bytes would be addresses in this process
        raise ValidationError(f"state[{at}]", type(value).__name__, "expected an array of numbers")
    return array


def _unpack(body: memoryview) -> bytes | list[Any]:
    try:
        state = msgspec.msgpack.decode(body, type=bytes | _Arrays)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a checkpoint: {error}") from error
    if isinstance(state, bytes):
        return state
    return [
        np.frombuffer(data, dtype).reshape(shape).copy()
        for (dtype, shape), data in zip(state.specs, state.data, strict=True)
    ]
