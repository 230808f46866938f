"""One look at a gang: the ranks' own records first, the backend's word second. Pure.

Where there is no record the backend's word counts, and where there is one the backend may only
name what it did: it preempted the rank, its memory ran out, its time was up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from atoll.agent.wrapper import is_unwanted
from atoll.backends.records import (
    AttemptKey,
    AttemptRecord,
    GangRecords,
    desired_of,
    restarts_of,
    stops_of,
)
from atoll.core.attempts import KEPT as ATTEMPTS_KEPT
from atoll.core.attempts import ended_attempt
from atoll.core.gate import may_start
from atoll.core.reasons import ExitReason
from atoll.core.retry import restart_delay_s
from atoll.core.status import (
    AttemptStatus,
    Exit,
    Followup,
    Observation,
    ObservedRank,
    Training,
    sooner,
)

Json = dict[str, Any]

BY_BACKEND = "backend"  # who wrote an exit record that is not the wrapper's
# Ends that a backend may have brought about: its word on why is waited for.
ITS_SIGNALS = frozenset({"SIGTERM", "SIGKILL", "SIGINT", "SIGHUP"})


class BackendJob(NamedTuple):
    """What the backend says of one attempt. Ended: nothing of it runs, as far as it knows.

    `reason` is one of ExitReason where the backend names a cause: Preempted, OOMKilled, HostLost,
    TimeLimit, Deleted. `words` are its own.
    """

    state: Literal["pending", "running", "ended"]
    reason: str = ""
    words: str = ""
    host: str | None = None
    is_paused: bool = False  # it does not run for now, and may not beat
    is_again: bool = False  # the backend has started this attempt a second time, or will
    is_given_up: bool = False  # by the backend itself, before anything can have run

    @property
    def is_active(self) -> bool:
        return self.state != "ended"


class Pace(NamedTuple):
    """How long is waited for what, in seconds."""

    look_s: float = 0.5  # between two looks
    settle_s: float = 2.5  # for a record of what the backend says has ended
    silent_s: float = 20.0  # for a beat; then the attempt is given up
    name_s: float = 10.0  # for the backend's word on a rank that was killed
    leave_s: float = 5.0  # after the grace; then the backend is asked to end it


class Conclude(Followup, frozen=True):
    """The end of an attempt is written by the executor: its wrapper could not."""

    rank: int
    attempt: int
    record: Json


class StopJobs(Followup, frozen=True):
    """The backend ends these attempts by its own means."""

    attempts: tuple[AttemptKey, ...]


class OpenStartGate(Followup, frozen=True):
    """The ranks that wait at the gate run, and so do all that come later."""

    together: int


class DueAttempt(NamedTuple):
    rank: int
    attempt: int
    in_s: float  # not before


class View(NamedTuple):
    """`seen` for the controller, `due` for whoever starts attempts, `newest` for the next wish."""

    observation: Observation
    due: list[DueAttempt] = []
    newest: dict[int, int] = {}


class _Attempt(NamedTuple):
    state: Literal["none", "waiting", "running", "exited"]
    exit: Exit | None = None
    message: str = ""
    conclude: Json | None = None
    must_stop: bool = False
    is_unsettled: bool = False


def observe_gang(
    training: Training,
    records: GangRecords,
    jobs: Mapping[AttemptKey, BackendJob] | None,
    *,
    now: float,
    pace: Pace,
    ended_for_s: Mapping[AttemptKey, float],
    has_gate: bool = True,
) -> View:
    """`jobs` is None while the backend does not answer. `ended_for_s`: since when it said so."""
    document = records.desired
    if document is None:
        return View(Observation())
    desired = desired_of(document)
    by_rank: dict[int, dict[int, _Attempt]] = {}
    for key in sorted({*records.attempts, *(jobs or ())}):
        attempt = _attempt(
            training,
            document,
            key,
            records.attempts.get(key, AttemptRecord()),
            None if jobs is None else jobs.get(key),
            is_answered=jobs is not None,
            now=now,
            pace=pace,
            ended_for_s=ended_for_s.get(key, 0.0),
        )
        by_rank.setdefault(key[0], {})[key[1]] = attempt
    ranks = [
        rank
        for number, attempts in by_rank.items()
        if (rank := _rank(training, document, number, attempts, records, jobs)) is not None
    ]
    followups, due_in_s = (
        _gate(training, records, desired.size, by_rank, now) if has_gate else ((), None)
    )
    due = [] if jobs is None else list(_due(training, document, by_rank, records))
    later = min((each.in_s for each in due if each.in_s > 0), default=None)
    observation = Observation(
        ranks=ranks,
        desired=desired,
        has_gate=has_gate,
        gate_opened_at=(records.gate or {}).get("at"),
        unsettled=sum(
            attempt.is_unsettled for attempts in by_rank.values() for attempt in attempts.values()
        ),
        followups=(*_followups(by_rank), *followups),
        again_in_s=sooner(pace.look_s, due_in_s, later),
        at=now,
    )
    newest = {rank: max(attempts) for rank, attempts in by_rank.items()}
    return View(observation, due, newest)


def _attempt(
    training: Training,
    desired: Json,
    key: AttemptKey,
    record: AttemptRecord,
    job: BackendJob | None,
    *,
    is_answered: bool,
    now: float,
    pace: Pace,
    ended_for_s: float,
) -> _Attempt:
    is_leaving = is_unwanted(desired, *key)
    is_active = not is_answered if job is None else job.is_active
    if record.exit is not None:
        return _ended(training, record, job, is_active=is_active, is_leaving=is_leaving, pace=pace)
    if record.claim is None:
        return _unclaimed(job, ended_for_s, is_leaving=is_leaving, now=now, pace=pace)
    is_paused = job is not None and job.is_paused
    if is_active:
        patience_s = pace.silent_s
    elif job is not None and job.reason != ExitReason.HOST_LOST:
        patience_s = pace.settle_s
    else:
        patience_s = pace.silent_s
    is_silent = is_answered and not is_paused and record.quiet_s >= patience_s
    conclusion = _conclusion(record, job, now, is_leaving=is_leaving) if is_silent else None
    grace_s = training.spec.stop_grace_s + pace.leave_s
    is_late = is_leaving and is_active and now >= desired["at"] + grace_s
    must_stop = job is not None and is_active and (is_late or is_silent)
    if record.start is None:
        words = "start gate: it waits for the other ranks"
        return _Attempt("waiting", None, words, conclusion, must_stop, is_leaving)
    words = "paused by its backend" if is_paused else ""
    return _Attempt("running", None, words, conclusion, must_stop)


def _unclaimed(
    job: BackendJob | None, ended_for_s: float, *, is_leaving: bool, now: float, pace: Pace
) -> _Attempt:
    """Nothing has run yet: it waits for the backend, or the backend could not start it."""
    if job is None:
        return _Attempt("none")
    if job.is_active:
        return _Attempt("waiting", None, job.words, must_stop=is_leaving, is_unsettled=is_leaving)
    if is_leaving or ended_for_s < pace.settle_s:
        return _Attempt("none" if is_leaving else "waiting", None, job.words)
    if job.is_given_up:
        return _Attempt("none")  # asked for again
    record = {
        "atollExit": 1,
        "by": BY_BACKEND,
        "ran": False,
        "code": None,
        "signal": None,
        "reason": job.reason or ExitReason.REJECTED.value,
        "message": job.words,
        "at": now - ended_for_s,
        "host": job.host,
        "stopped": False,
    }
    return _Attempt("waiting", None, job.words, record)


def _conclusion(
    record: AttemptRecord, job: BackendJob | None, now: float, *, is_leaving: bool
) -> Json:
    """What is written of an attempt whose wrapper fell silent."""
    reason, words = ExitReason.SUPERVISOR_LOST.value, "its wrapper left no record"
    if job is not None and job.reason and not job.is_active:
        reason = str(job.reason)
    if job is not None and job.words:
        words += f"; {job.words}"
    ended_at = now - record.quiet_s
    if record.beaten_at is not None:  # by the clock of the place, which may be ahead
        ended_at = min(ended_at, record.beaten_at)
    return {
        "atollExit": 1,
        "by": BY_BACKEND,
        "ran": record.start is not None,
        "code": 137 if reason == ExitReason.OOM_KILLED else None,
        "signal": None,
        "reason": reason,
        "message": words,
        "at": max(ended_at, record.started_at or 0.0),
        "startedAt": record.started_at,
        "host": record.host,
        "stopped": is_leaving,
    }


def _ended(
    training: Training,
    record: AttemptRecord,
    job: BackendJob | None,
    *,
    is_active: bool,
    is_leaving: bool,
    pace: Pace,
) -> _Attempt:
    document = record.exit
    assert document is not None
    is_again = job is not None and job.is_again
    # A job without a wrapper can stay for ever: that of a step daemon which was killed.
    must_stop = job is not None and is_active and (is_again or record.quiet_s >= pace.leave_s)
    if document.get("by") == BY_BACKEND:
        if is_active:  # its process may run; nothing else may take its place
            return _Attempt("running", None, "it is being ended", must_stop=job is not None)
    elif is_active and not is_again and may_be_named(document) and record.quiet_s < pace.name_s:
        state: Literal["waiting", "running"] = "waiting" if record.start is None else "running"
        return _Attempt(state, None, "it has ended")
    if document.get("ran") is False and document.get("stopped"):
        return _Attempt("none", must_stop=must_stop)
    return _Attempt("exited", exit_of(document, job), must_stop=must_stop)


def may_be_named(document: Json) -> bool:
    """Whether the backend may have ended it, and has not said why yet."""
    if document.get("stopped") or document["code"] == 0:
        return False
    return bool(document.get("signalled")) or document["signal"] in ITS_SIGNALS


def exit_of(document: Json, job: BackendJob | None) -> Exit:
    """The end of an attempt by its record, named by the backend where that was its doing."""
    reason, message = document["reason"], document.get("message") or ""
    if job is not None and document.get("by") != BY_BACKEND and may_be_named(document):
        cause = ExitReason.EVICTED.value if job.is_again and not job.reason else job.reason
        is_killed = document["signal"] == "SIGKILL"
        is_named = is_killed if cause == ExitReason.OOM_KILLED else bool(cause)
        reason = cause if is_named else reason
    if job is not None and job.words and may_be_named(document):
        message = (
            f"{message}; {job.words}"
            if message and job.words not in message
            else (message or job.words)
        )
    return Exit(
        code=document["code"],
        at=document["at"],
        reason=str(reason),
        signal=document.get("signal"),
        is_stopped=bool(document.get("stopped")),
        failed_at=document.get("failedAt"),
        message=message,
        log_tail=document.get("tail") or [],
        is_backends_word=document.get("by") == BY_BACKEND,
    )


def _rank(
    training: Training,
    desired: Json,
    rank: int,
    attempts: dict[int, _Attempt],
    records: GangRecords,
    jobs: Mapping[AttemptKey, BackendJob] | None,
) -> ObservedRank | None:
    """The newest attempt of the rank that is anything at all."""
    real = [number for number, attempt in attempts.items() if attempt.state != "none"]
    if not real:
        return None
    number = max(real)
    attempt, record = attempts[number], records.attempts.get((rank, number), AttemptRecord())
    job = (jobs or {}).get((rank, number))
    before = records.attempts.get((rank, number - 1), AttemptRecord())
    earlier = [records.attempts.get((rank, n), AttemptRecord()) for n in range(number)]
    past = tuple(
        _past_attempt(rank, n, earlier[n], (jobs or {}).get((rank, n)))
        for n in range(max(0, number - ATTEMPTS_KEPT), number)
        if earlier[n].exit is not None
    )
    return ObservedRank(
        rank=rank,
        state="waiting" if attempt.state == "none" else attempt.state,
        attempt=number,
        restarts=restarts_of(desired, rank, number),
        started_at=record.started_at,
        metered_s=sum(map(_ran_s, earlier)),
        previous_exit=None
        if before.exit is None
        else exit_of(before.exit, (jobs or {}).get((rank, number - 1))),
        attempts=past,
        exit=attempt.exit,
        is_stopping=attempt.state in ("running", "waiting") and is_unwanted(desired, rank, number),
        pod_name=f"{training.name}-{rank}",
        host=record.host or (job.host if job else None),
        message=attempt.message,
    )


def _past_attempt(
    rank: int, number: int, record: AttemptRecord, job: BackendJob | None
) -> AttemptStatus:
    host = record.host or (job.host if job else None)
    bare = AttemptStatus(rank=rank, attempt=number, started_at=record.started_at, host=host)
    return ended_attempt(bare, None if record.exit is None else exit_of(record.exit, job))


def _ran_s(record: AttemptRecord) -> float:
    if record.started_at is None or record.exit is None:
        return 0.0
    ran: float = max(record.exit["at"] - record.started_at, 0.0)
    return ran


def _due(
    training: Training,
    desired: Json,
    by_rank: dict[int, dict[int, _Attempt]],
    records: GangRecords,
) -> list[DueAttempt]:
    """The attempts to be started for the wish, within the restart budget."""
    due = []
    for rank in range(desired["size"]):
        attempts = by_rank.get(rank, {})
        known = [n for n in attempts if (rank, n) in records.attempts]
        number = max([*stops_of(desired, rank), *known], default=-1) + 1
        real = [n for n, attempt in attempts.items() if attempt.state != "none"]
        if not real:
            due.append(DueAttempt(rank, number, 0.0))
            continue
        last = max(real)
        ended = attempts[last].exit
        if ended is None:
            continue
        if last <= desired["discarded"].get(str(rank), -1):
            due.append(DueAttempt(rank, number, 0.0))
        elif not ended.is_stopped and not ended.is_success:
            restarts = restarts_of(desired, rank, last)
            if restarts < training.spec.max_restarts:
                quiet_s = records.attempts[rank, last].quiet_s
                due.append(DueAttempt(rank, number, restart_delay_s(restarts) - quiet_s))
    return due


def _gate(
    training: Training,
    records: GangRecords,
    size: int,
    by_rank: dict[int, dict[int, _Attempt]],
    now: float,
) -> tuple[tuple[Followup, ...], float | None]:
    """The gate opens for all ranks, or for `min` of them once the first has waited long enough."""
    if records.gate is not None or not size:
        return (), None
    waiting = [
        records.attempts[rank, attempt]
        for rank, attempts in by_rank.items()
        for attempt, each in attempts.items()
        if rank < size and each.state == "waiting" and (rank, attempt) in records.attempts
    ]
    # One that has ended at the gate may be shown as waiting, until its backend says why it ended.
    claims = [record.claim for record in waiting if record.exit is None]
    times = [claim["at"] for claim in claims if claim is not None]
    left_s = min(times, default=now) + training.spec.start_grace_s - now
    if may_start(len(times), training.spec.world_size, is_grace_over=bool(times) and left_s <= 0):
        return (OpenStartGate(len(times)),), None
    return (), left_s if times and left_s > 0 else None


def _followups(by_rank: dict[int, dict[int, _Attempt]]) -> tuple[Followup, ...]:
    ends = [
        Conclude(rank, number, attempt.conclude)
        for rank, attempts in by_rank.items()
        for number, attempt in attempts.items()
        if attempt.conclude is not None
    ]
    stops = [
        (rank, number)
        for rank, attempts in by_rank.items()
        for number, attempt in attempts.items()
        if attempt.must_stop
    ]
    return (*ends, *((StopJobs(tuple(stops)),) if stops else ()))
