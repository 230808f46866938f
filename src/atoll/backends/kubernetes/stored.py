"""The status of a Training object: a summary that a person reads, and the ranks compressed.

An object of Kubernetes holds 1.5 MiB and a training 10,000 ranks, whose JSON is 6 MB. `rankData`
is that JSON through zlib, and the only part that is read back; `ranks`, `retired` and `rankExits`
say the same for `kubectl get -o yaml`, in groups of ranks that are alike.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from atoll.core.decoders import json_decoder
from atoll.core.errors import ValidationError
from atoll.core.model import Model, encode
from atoll.core.rank_ranges import spans
from atoll.core.status import Exit, RankExit, RankPhase, RankStatus, Status, StatusHead

MAX_GROUPS = 64  # of a summary: more than this nobody reads
# 10,000 ranks that differ in everything are 6 MB; whoever may write the object may write anything.
MAX_RANK_BYTES = 64 * 2**20


class RankGroup(Model, frozen=True):
    """Ranks that are in the same state."""

    ranks: str
    phase: RankPhase | None = None
    restarts: int | None = None
    message: str | None = None


class ExitGroup(Model, frozen=True):
    """Ranks that ended in the same way."""

    ranks: str
    exit_code: int | None = None
    termination_reason: str | None = None
    signal: str | None = None
    collateral: bool | None = None
    message: str | None = None


class RankData(Model, frozen=True):
    """What `rankData` holds."""

    ranks: list[RankStatus] = []
    removed_ranks: list[RankStatus] = []
    rank_exits: list[RankExit] = []
    discarded_attempts: dict[int, int] = {}
    desired_discarded: dict[int, int] = {}


class StoredStatus(StatusHead, frozen=True):
    ranks: list[RankGroup] = []
    removed_ranks: list[RankGroup] = []
    rank_exits: list[ExitGroup] = []
    rank_data: str = ""


_head = json_decoder(StatusHead)
_data = json_decoder(RankData)


def fold_status(status: Status) -> StoredStatus:
    head = {name: getattr(status, name) for name in StatusHead.__struct_fields__}
    desired = status.desired
    data = RankData(
        ranks=status.ranks,
        removed_ranks=status.removed_ranks,
        rank_exits=status.rank_exits,
        discarded_attempts=status.discarded_attempts,
        desired_discarded=desired.discarded_attempts if desired else {},
    )
    return StoredStatus(
        **head
        | {
            "discarded_attempts": {},
            "desired": desired and replace(desired, discarded_attempts={}),
        },
        ranks=_rank_groups(status.ranks),
        removed_ranks=_rank_groups(status.removed_ranks),
        rank_exits=_exit_groups(status.rank_exits),
        rank_data="" if data == RankData() else _packed(data),
    )


def unfold_status(raw: dict[str, Any]) -> Status:
    """Raises ValidationError if `rankData` cannot be read, and msgspec's for the rest."""
    packed = raw.get("rankData", "")
    head = _head.decode(msgspec.json.encode({k: v for k, v in raw.items() if k != "rankData"}))
    data = _unpacked(packed) if packed else RankData()
    fields = {name: getattr(head, name) for name in StatusHead.__struct_fields__}
    desired = head.desired
    return Status(
        **fields
        | {
            "discarded_attempts": data.discarded_attempts,
            "desired": desired and replace(desired, discarded_attempts=data.desired_discarded),
        },
        ranks=data.ranks,
        removed_ranks=data.removed_ranks,
        rank_exits=data.rank_exits,
    )


def smaller_statuses(status: Status) -> Iterator[tuple[str, Status]]:
    """The status with less and less in it, and what is left out, for an object with little room.

    Of a training that goes on, nothing is left out that it needs to go on; of one that is over,
    the verdict stays.
    """
    status = replace(status, world_size_history=[])
    placeless = [
        [replace(r, pod_name="", node=None) for r in rows]
        for rows in (status.ranks, status.removed_ranks)
    ]
    yield (
        "the pods and nodes of ranks",
        replace(status, ranks=placeless[0], removed_ranks=placeless[1]),
    )
    if status.phase.is_terminal:
        exits = [
            RankExit(rank=e.rank, exit_code=e.exit_code, termination_reason=e.termination_reason)
            for e in status.rank_exits
        ]
        yield (
            "all about ranks but their exit codes",
            replace(
                status,
                ranks=[_bare(r, status) for r in status.ranks],
                removed_ranks=[_bare(r, status) for r in status.removed_ranks],
                rank_exits=exits,
            ),
        )
        yield "all about the ranks", replace(status, ranks=[], removed_ranks=[], rank_exits=[])


def _bare(row: RankStatus, status: Status) -> RankStatus:
    exit = row.exit and Exit(code=row.exit.code, at=status.ended_at or 0.0, reason=row.exit.reason)
    return RankStatus(rank=row.rank, phase=row.phase, attempt=row.attempt, exit=exit)


def _packed(data: RankData) -> str:
    return base64.b64encode(zlib.compress(encode(data))).decode()


def _unpacked(text: str) -> RankData:
    reader = zlib.decompressobj()
    try:
        content = reader.decompress(base64.b64decode(text, validate=True), MAX_RANK_BYTES)
        if not reader.eof:
            raise ValueError(f"it is cut, or more than {MAX_RANK_BYTES} bytes")
        return _data.decode(content)
    except (ValueError, TypeError, zlib.error, binascii.Error, msgspec.DecodeError) as error:
        expected = f"expected what atoll wrote there: {error}"
        raise ValidationError("status.rankData", "…", expected) from error


def _rank_groups(rows: Iterable[RankStatus]) -> list[RankGroup]:
    groups = _grouped((r.rank, (r.phase, r.restarts or None, r.message or None)) for r in rows)
    return [
        RankGroup(ranks=ranks, phase=key[0], restarts=key[1], message=key[2])
        if key
        else RankGroup(ranks=ranks, message="others: see `atoll status`")
        for ranks, key in groups
    ]


def _exit_groups(exits: Iterable[RankExit]) -> list[ExitGroup]:
    groups = _grouped(
        (
            e.rank,
            (e.exit_code, e.termination_reason, e.signal, e.collateral or None, e.message or None),
        )
        for e in exits
    )
    return [
        ExitGroup(
            ranks=ranks,
            exit_code=key[0],
            termination_reason=key[1],
            signal=key[2],
            collateral=key[3],
            message=key[4],
        )
        if key
        else ExitGroup(ranks=ranks, message="others: see `atoll status`")
        for ranks, key in groups
    ]


def _grouped(rows: Iterable[tuple[int, Sequence[Any]]]) -> list[tuple[str, Sequence[Any]]]:
    """Ranks by what they share, in order; those beyond the last group are one without a key."""
    members: dict[Sequence[Any], list[int]] = {}
    for rank, key in rows:
        members.setdefault(key, []).append(rank)
    groups = list(members.items())
    others = sorted(rank for _, ranks in groups[MAX_GROUPS:] for rank in ranks)
    shown = [(spans(ranks), key) for key, ranks in groups[:MAX_GROUPS]]
    return [*shown, (spans(others), ())] if others else shown
