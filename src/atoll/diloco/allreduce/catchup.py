"""Joining from the store alone: the newest checkpoint and the means of the rounds after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import Gone, NotFound, ValidationError
from atoll.core.model import msgpack_decoder
from atoll.diloco.allreduce import layout as layouts
from atoll.diloco.allreduce import past, wire
from atoll.diloco.allreduce.exchange import Abandoned, Exchange
from atoll.diloco.allreduce.feedback import Entry
from atoll.diloco.allreduce.keys import Keys, parse_attempt, parse_round, parse_upload
from atoll.diloco.allreduce.layout import Layout
from atoll.diloco.allreduce.manifest import Manifest
from atoll.diloco.allreduce.pace import poll_pause
from atoll.diloco.allreduce.settle import Decider
from atoll.diloco.allreduce.team import Team, lead, together
from atoll.diloco.packing import Vector
from atoll.objectstore import ObjectStore

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


class Outdated(Exception):
    """A newer checkpoint has replaced the one that the join began with."""


class Reader(Protocol):
    """How one process reads the rounds of a run."""

    team: Team
    decider: Decider

    def exchange(self, manifest: Manifest, layout: Layout) -> Exchange: ...


class _Arrays(msgspec.Struct, frozen=True):
    specs: list[tuple[str, tuple[int, ...]]]
    data: list[bytes]


_STATE: msgspec.msgpack.Decoder[bytes | _Arrays] = msgpack_decoder(
    bytes | _Arrays  # type: ignore[arg-type]
)


def save(blobs: ObjectStore, keys: Keys, number: int, state: bytes | Sequence[Any]) -> bool:
    """Store the state after round `number`; False if there already is one."""
    key = keys.checkpoint(number + 1)
    return blobs.create(key, wire.seal(wire.CHECKPOINT, wire.fence(key), _pack(state)))


def load(blobs: ObjectStore, keys: Keys) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None."""
    for blob in reversed(blobs.list(keys.checkpoints())):
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


def latest(blobs: ObjectStore, keys: Keys, after: int = -1) -> tuple[int, int] | None:
    """Round and attempt of the newest manifest of a round later than `after`, or None."""
    listing = blobs.list(keys.manifests(), keys.manifest(after, 9999) if after >= 0 else None)
    return max(filter(None, (parse_attempt(blob.key) for blob in listing)), default=None)


def newest(blobs: ObjectStore, keys: Keys, known: int = -1) -> tuple[int, int] | None:
    """As `latest`, at a cost that does not grow with the number of rounds.

    There may be thousands of manifests, but few uploads. Nobody uploads to a round before the one
    before it is decided, so the newest uploads tell where in the manifests to begin. `known`: a
    round that was.
    """
    after = known - 1
    if known < 0:
        names = filter(None, (parse_upload(blob.key) for blob in blobs.list(keys.uploads())))
        after = max((name.round for name in names), default=-1) - 2
    recent = latest(blobs, keys, after)
    return latest(blobs, keys) if recent is None and after >= 0 else recent


def join(reader: Reader) -> JoinState:
    """What a joiner starts from, as of the newest round.

    Raises Gone if there is no checkpoint and the first means are no longer in the store.
    """
    decider = reader.decider
    while True:
        checkpoint = load(decider.blobs, decider.keys)
        start = following = 0 if checkpoint is None else checkpoint.round + 1
        means = []
        try:
            for following, round_mean in read_since(reader, start):
                if round_mean is not None:
                    flat, layout = round_mean
                    tensors = layouts.split(flat, layout)
                    means.append(Mean(following - 1, layout.name, tensors))
        except Outdated:
            continue
        return JoinState(following, checkpoint, means)


def was_committed(reader: Reader, entry: Entry) -> bool:
    """Whether the round of the entry has its upload. Waits for the round, or ends it, as `join`."""
    decider, number = reader.decider, entry.manifest.round

    def newest() -> tuple[int, int] | None:
        return latest(decider.blobs, decider.keys, number)

    def has_own() -> bool:
        return reader.exchange(entry.manifest, entry.share.layout).has(entry.rank)

    is_last = lead(reader.team, newest) is None
    if is_last and not lead(reader.team, has_own):
        return False  # nobody else could have made the shard of this rank
    try:
        mean = _read_round(reader, number, is_last=is_last)
    except (Outdated, Gone):  # its means are deleted: it is over, and its last attempt counts
        return not lead(
            reader.team, lambda: _was_decided(decider, number, entry.manifest.attempt + 1)
        )
    committed = decider.last
    return mean is not None and committed is not None and committed.has(entry.upload)


RoundMean = tuple[Vector, Layout]


def read_since(
    reader: Reader, following: int, out: Vector | None = None
) -> Iterator[tuple[int, RoundMean | None]]:
    """The mean of each round from `following` on, None if it is void, and the round after it.

    Means are in `out`, one after the other, if it is of their size.

    Raises Outdated or Gone if a mean is no longer in the store.
    """
    decider = reader.decider
    while True:
        after = following - 1
        newest = lead(reader.team, lambda: latest(decider.blobs, decider.keys, after))  # noqa: B023
        if newest is None:
            return
        for number in range(following, newest[0] + 1):
            is_last = number == newest[0]
            yield number + 1, _read_round(reader, number, out, is_last=is_last)
        following = newest[0] + 1


def _read_round(
    reader: Reader, number: int, out: Vector | None = None, *, is_last: bool
) -> RoundMean | None:
    """The mean of the round as far as this process carries it, or None if it is void.

    A round that nobody completes any more becomes void.
    """
    decider, team = reader.decider, reader.team
    attempt, started = 0, time.monotonic()
    while True:

        def read(attempt: int = attempt, started: float = started) -> tuple[Manifest | None, bool]:
            key = decider.keys.manifest(number, attempt)
            manifest = decider.read(key)
            is_over = not is_last or _is_overdue(decider, started)
            if manifest is None and is_over:
                manifest = _end(decider, number, attempt)
            return manifest, is_over

        manifest, is_over = lead(team, read)
        if manifest is not None and not manifest.members:
            return None
        if manifest is not None:
            decider.last = manifest
            check = _Look(reader.exchange(manifest, Layout.unpack(manifest.layout)), out)
            messages = together(team, check.read)
            if is_over and MISSING in messages and VOID not in messages:
                lead(team, lambda: _fail_if_swept(decider, number, is_last=is_last))
                messages = together(team, check.end)
            if VOID in messages:
                attempt, started = attempt + 1, time.monotonic()
                continue
            if check.is_read and MISSING not in messages:
                return check.out, check.exchange.layout
        time.sleep(poll_pause(time.monotonic() - started, 0.0))


COMPLETE, MISSING, VOID = "complete", "missing", "void"


class _Look:
    """What this process has of the mean of an attempt."""

    def __init__(self, exchange: Exchange, out: Vector | None) -> None:
        self.exchange = exchange
        size = exchange.share.size
        is_room = out is not None and out.size == size
        self.out = out if out is not None and is_room else np.empty(size, np.float32)
        self.is_read = False

    def read(self) -> str:
        try:
            self.is_read = self.exchange.read_all(self.out)
        except Abandoned:
            return VOID
        return COMPLETE if self.is_read else MISSING

    def end(self) -> str:
        """As `read`, but what is missing now makes the attempt void."""
        try:
            if not self.is_read:
                self.exchange.abandon_missing(self.out)
        except Abandoned:
            return VOID
        return self.read()


def _fail_if_swept(decider: Decider, number: int, *, is_last: bool) -> None:
    """Raises Outdated or Gone if the means of round `number` have been deleted.

    Once there is a checkpoint, means are deleted only when a newer one covers them.
    """
    saved = decider.blobs.list(decider.keys.checkpoints())
    if any((parse_round(blob.key) or 0) > number for blob in saved):
        raise Outdated
    if not saved and not is_last:
        raise Gone(number, number + 1)


def _end(decider: Decider, number: int, attempt: int) -> Manifest:
    """The manifest of an attempt that nobody decides any more: a void one, if there is none.

    Raises Outdated or Gone if the round is past: its manifest is not missing, but folded.
    """
    key, void = decider.keys.manifest(number, attempt), decider.void(number, attempt)
    _fail_if_past(decider, number)
    manifest = decider.write(key, void)
    if manifest is void:  # the run may have gone on while this process slept
        try:
            _fail_if_past(decider, number)
            is_last = latest(decider.blobs, decider.keys, number) is None
            _fail_if_swept(decider, number, is_last=is_last or not attempt)
        except (Outdated, Gone):
            decider.blobs.delete([key])
            raise
    return manifest


def _fail_if_past(decider: Decider, number: int) -> None:
    if past.is_past(decider.blobs, decider.keys, number):
        _fail_if_swept(decider, number, is_last=False)
        raise Gone(number, number + 1)


def _was_decided(decider: Decider, number: int, attempt: int) -> bool:
    if decider.read(decider.keys.manifest(number, attempt)) is not None:
        return True
    folded = past.read_round(decider.blobs, decider.keys, number)
    return any(manifest.attempt == attempt for manifest in folded)


def _is_overdue(decider: Decider, started: float) -> bool:
    return time.monotonic() - started > 2 * decider.history.owner_grace(0.0)


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
        state = _STATE.decode(body)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not a checkpoint: {error}") from error
    if isinstance(state, bytes):
        return state
    return [
        np.frombuffer(data, dtype).reshape(shape).copy()
        for (dtype, shape), data in zip(state.specs, state.data, strict=True)
    ]
