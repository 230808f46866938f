"""A status as stores keep it: small for any number of ranks, and readable for a person.

Ranks that are alike are one entry with ranges; how a rank ended is there once, and what differs
from rank to rank is in columns. `rankExits` takes the place of `exits` once there is a verdict.
What releases wrote that kept a list of ranks is read as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType
from msgspec.structs import replace

from atoll.core.columns import Columns, Group, fold_rows, unfold_rows
from atoll.core.errors import ValidationError
from atoll.core.model import Model, encode
from atoll.core.narrate import exit_in_words
from atoll.core.ranks import final_record, metered_for
from atoll.core.spans import in_spans, spans
from atoll.core.spec import TrainingSpec
from atoll.core.status import (
    Exit,
    RankExit,
    RankPhase,
    RankStatus,
    Status,
    StatusHead,
    Training,
)

RANK_TIMES = frozenset({"startedAt", "meteredS", "missingSince"})
EXIT_TIMES = frozenset({"endedAt", "failedAt"})
NOTHING = Raw(b"[]")


class RankGroup(Model, frozen=True):
    """Ranks that are in the same state."""

    ranks: str
    phase: RankPhase | None = None
    restarts: int | None = None
    provider: str | None = None
    region: str | None = None
    is_stopping: bool | None = None
    message: str | None = None  # where it is not the one of its exit


class ExitGroup(Model, frozen=True):
    """Ranks that ended in the same way."""

    ranks: str
    exit_code: int | None = None
    termination_reason: str | None = None
    signal: str | None = None
    collateral: bool | None = None
    is_stopped: bool | None = None
    is_backends_word: bool | None = None
    message: str | None = None
    log_tail: tuple[str, ...] | None = None


class RedoneGroup(Model, frozen=True):
    """Ranks whose attempts up to this one do not count."""

    ranks: str
    attempt: int


class RankColumns(Model, frozen=True):
    """What differs from rank to rank: the columns beside the groups of that name."""

    ranks: Columns = {}
    exits: Columns = {}
    previous_exits: Columns = {}


class StoredStatus(StatusHead, frozen=True):
    """`rank_columns` is unset where ranks are listed one by one."""

    ranks: Raw = NOTHING
    retired: Raw = NOTHING
    rank_exits: Raw = NOTHING
    exits: Raw | UnsetType = UNSET  # unset where `rank_exits` are these
    previous_exits: list[ExitGroup] = []
    redone: list[RedoneGroup] = []
    asked_redone: list[RedoneGroup] = []
    rank_columns: RankColumns | UnsetType = UNSET


class StoredTraining(Model, frozen=True):
    """The fields of `Training`, its status as it is stored."""

    namespace: str
    uid: str
    spec: TrainingSpec
    status: StoredStatus = StoredStatus()
    generation: int = 1
    resource_version: int = 0
    created_at: float = 0.0
    deletion_requested_at: float | None = None


_training = msgspec.json.Decoder(StoredTraining)
_status = msgspec.json.Decoder(StoredStatus)
_rank_list = msgspec.json.Decoder(list[RankStatus])
_exit_list = msgspec.json.Decoder(list[RankExit])
_rank_groups = msgspec.json.Decoder(list[RankGroup])
_exit_groups = msgspec.json.Decoder(list[ExitGroup])


def encode_training(training: Training) -> bytes:
    fields = {name: getattr(training, name) for name in training.__struct_fields__}
    return encode(StoredTraining(**fields | {"status": fold(training.status)}))


def decode_training(data: bytes) -> Training:
    stored = _training.decode(data)
    fields = {name: getattr(stored, name) for name in stored.__struct_fields__}
    return Training(**fields | {"status": unfold(stored.status)})


def decode_status(data: bytes) -> Status:
    """Raises msgspec.ValidationError, and ValidationError where ranges or columns are wrong."""
    return unfold(_status.decode(data))


def fold(status: Status) -> StoredStatus:
    head = {name: getattr(status, name) for name in StatusHead.__struct_fields__}
    rows = sorted((*status.ranks, *status.retired), key=lambda r: r.rank)
    if not _is_plain(status, rows):
        lists = {name: Raw(encode(getattr(status, name))) for name in _LISTS}
        return StoredStatus(**head | lists)
    retired = {r.rank for r in status.retired}
    groups, columns = _fold_ranks(rows, retired)
    collateral = {record.rank for record in status.rank_exits if record.collateral}
    is_over = bool(status.rank_exits) and status.rank_exits == _records(rows, collateral)
    exits, exit_columns = _fold_exits({r.rank: r.exit for r in rows if r.exit}, collateral)
    previous, previous_columns = _fold_exits({r.rank: r.previous for r in rows if r.previous})
    asked = status.asked
    head |= {"redo": {}, "asked": asked and replace(asked, redo={})}
    return StoredStatus(
        **head,
        ranks=Raw(encode([g for g, is_retired in groups if not is_retired])),
        retired=Raw(encode([g for g, is_retired in groups if is_retired])),
        rank_exits=Raw(encode(exits if is_over else status.rank_exits)),
        exits=UNSET if is_over else Raw(encode(exits)),
        previous_exits=previous,
        redone=_fold_redo(status.redo),
        asked_redone=_fold_redo(asked.redo if asked else {}),
        rank_columns=RankColumns(
            ranks=columns, exits=exit_columns, previous_exits=previous_columns
        ),
    )


def unfold(stored: StoredStatus) -> Status:
    """Raises ValidationError if ranges or columns are wrong."""
    head = {name: getattr(stored, name) for name in StatusHead.__struct_fields__}
    if stored.rank_columns is UNSET:
        return Status(
            **head,
            ranks=_rank_list.decode(stored.ranks),
            retired=_rank_list.decode(stored.retired),
            rank_exits=_exit_list.decode(stored.rank_exits),
        )
    try:
        return _unfolded(stored, stored.rank_columns, head)
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, msgspec.ValidationError | ValidationError):
            raise
        raise ValidationError("status.rankColumns", "…", str(error)) from error


_LISTS = ("ranks", "retired", "rank_exits")


def _unfolded(stored: StoredStatus, columns: RankColumns, head: dict[str, Any]) -> Status:
    is_over = stored.exits is UNSET
    exit_groups = stored.rank_exits if stored.exits is UNSET else stored.exits
    noticed_at = stored.ended_at or 0.0  # where a store had no room for each time
    exits, collateral = _unfold_exits(_exit_groups.decode(exit_groups), columns.exits, noticed_at)
    previous, _ = _unfold_exits(stored.previous_exits, columns.previous_exits, noticed_at)
    active = _rank_groups.decode(stored.ranks)
    retired = _rank_groups.decode(stored.retired)
    rows = unfold_rows(_entries([*active, *retired]), columns.ranks, RANK_TIMES)
    gone = {rank for group in retired for rank in in_spans(group.ranks)}
    ranks = [_rank(rank, row, exits.get(rank), previous.get(rank)) for rank, row in rows.items()]
    asked = head["asked"]
    head |= {
        "redo": _unfold_redo(stored.redone),
        "asked": asked and replace(asked, redo=_unfold_redo(stored.asked_redone)),
    }
    return Status(
        **head,
        ranks=[r for r in ranks if r.rank not in gone],
        retired=[r for r in ranks if r.rank in gone],
        rank_exits=_records(ranks, collateral) if is_over else _exit_list.decode(stored.rank_exits),
    )


def _is_plain(status: Status, rows: Sequence[RankStatus]) -> bool:
    """Whether every rank is there once, in order; otherwise they are stored as they are."""
    numbers = [r.rank for r in rows]
    return len(set(numbers)) == len(numbers) and all(
        [r.rank for r in part] == sorted(r.rank for r in part)
        for part in (status.ranks, status.retired)
    )


def _fold_ranks(
    rows: Sequence[RankStatus], retired: set[int]
) -> tuple[list[tuple[RankGroup, bool]], Columns]:
    groups, columns = fold_rows(
        [r.rank for r in rows],
        {
            "isRetired": [r.rank in retired for r in rows],
            "phase": [r.phase for r in rows],
            "restarts": [r.restarts for r in rows],
            "provider": [r.provider for r in rows],
            "region": [r.region for r in rows],
            "isStopping": [r.is_stopping or None for r in rows],
            "message": [None if r.message == _usual_message(r.phase, r.exit) else r.message
                        for r in rows],
        },
        {
            "podName": [r.pod_name or None for r in rows],
            "node": [r.node for r in rows],
            "attempt": [None if r.attempt == -1 else r.attempt for r in rows],
            "startedAt": [r.started_at for r in rows],
            "meteredS": [None if r.metered_s == metered_for(r.started_at, r.exit) else r.metered_s
                         for r in rows],
            "missingSince": [r.missing_since for r in rows],
        },
        RANK_TIMES,
    )  # fmt: skip
    made = []
    for ranks, values in groups:
        is_retired = values.pop("isRetired")
        made.append((msgspec.convert({"ranks": ranks, **values}, RankGroup), is_retired))
    return made, columns


def _rank(
    rank: int, row: Mapping[str, Any], exit: Exit | None, previous: Exit | None
) -> RankStatus:
    phase, started_at = row["phase"], row.get("startedAt")
    metered_s = row.get("meteredS")
    return RankStatus(
        rank=rank,
        phase=phase,
        pod_name=row.get("podName", ""),
        node=row.get("node"),
        provider=row.get("provider"),
        region=row.get("region"),
        restarts=row.get("restarts", 0),
        message=row["message"] if "message" in row else _usual_message(phase, exit),
        attempt=row.get("attempt", -1),
        started_at=started_at,
        exit=exit,
        previous=previous,
        metered_s=metered_for(started_at, exit) if metered_s is None else metered_s,
        missing_since=row.get("missingSince"),
        is_stopping=row.get("isStopping", False),
    )


def _usual_message(phase: RankPhase, exit: Exit | None) -> str:
    """The message of a rank in that phase that ended so."""
    if exit is None or phase == "Running":
        return ""
    words = exit_in_words(exit)
    return f"restarting: it {words}" if phase == "Pending" else words


def _fold_exits(
    ends: Mapping[int, Exit], collateral: Iterable[int] = ()
) -> tuple[list[ExitGroup], Columns]:
    exits, fallen = list(ends.values()), set(collateral)
    groups, columns = fold_rows(
        list(ends),
        {
            "exitCode": [e.code for e in exits],
            "terminationReason": [e.reason for e in exits],
            "signal": [e.signal for e in exits],
            "collateral": [rank in fallen or None for rank in ends],
            "isStopped": [e.is_stopped or None for e in exits],
            "isBackendsWord": [e.is_backends_word or None for e in exits],
            "message": [e.message or None for e in exits],
            "logTail": [tuple(e.log_tail) or None for e in exits],
        },
        {"endedAt": [e.at for e in exits], "failedAt": [e.failed_at for e in exits]},
        EXIT_TIMES,
    )
    return [msgspec.convert({"ranks": r, **values}, ExitGroup) for r, values in groups], columns


def _unfold_exits(
    groups: Sequence[ExitGroup], columns: Columns, noticed_at: float
) -> tuple[dict[int, Exit], set[int]]:
    rows = unfold_rows(_entries(groups), columns, EXIT_TIMES)
    exits = {
        rank: Exit(
            code=row.get("exitCode"),
            at=row.get("endedAt", noticed_at),
            reason=row.get("terminationReason", ""),
            signal=row.get("signal"),
            is_stopped=row.get("isStopped", False),
            failed_at=row.get("failedAt"),
            message=row.get("message", ""),
            log_tail=list(row.get("logTail", ())),
            is_backends_word=row.get("isBackendsWord", False),
        )
        for rank, row in rows.items()
    }
    return exits, {rank for rank, row in rows.items() if row.get("collateral")}


def _entries(groups: Iterable[RankGroup | ExitGroup]) -> Iterable[Group]:
    for group in groups:
        values = msgspec.to_builtins(group)
        yield values.pop("ranks"), values


def _records(rows: Iterable[RankStatus], collateral: set[int]) -> list[RankExit]:
    return [final_record(r, collateral=r.rank in collateral) for r in rows if r.exit is not None]


def _fold_redo(redo: Mapping[int, int]) -> list[RedoneGroup]:
    by_attempt: dict[int, list[int]] = {}
    for rank, attempt in redo.items():
        by_attempt.setdefault(attempt, []).append(rank)
    return [RedoneGroup(ranks=spans(own), attempt=a) for a, own in by_attempt.items()]


def _unfold_redo(groups: Iterable[RedoneGroup]) -> dict[int, int]:
    return {rank: group.attempt for group in groups for rank in in_spans(group.ranks)}
