"""Ranks: merges what is known with an observation, and derives the phase of each.

Attempt numbers only grow, so an older observation never undoes a newer one. `root_cause_of` names
the one rank that made a training fail.
"""

from __future__ import annotations

import builtins
import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from atoll.core.describe import describe_exit
from atoll.core.errors import RankError
from atoll.core.model import Model
from atoll.core.phase import ExitReason, PhaseReason
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import (
    AttemptStatus,
    Exit,
    Observation,
    ObservedRank,
    ObservedRounds,
    RankExit,
    RankPhase,
    RankStatus,
    Status,
    Training,
    in_ms,
)
from atoll.core.text import escape_control

# A running rank that no observation shows is given up after this: longer than an observation may
# be late (`plan.STALE_S`), short enough that a lost host is noticed within 5 s.
LOST_AFTER_S = 3.0
# Failures closer together than this have one cause: peers fail because the first one did. NCCL and
# gloo give up on a lost peer within seconds to half a minute.
CASCADE_S = 60.0
# Text of all ranks in one status, of their ends and of what they wait for: a Kubernetes object may
# have 1.5 MB, and thousands of ranks may each end with different lines.
MAX_TEXT_BYTES = 64 * 1024
MAX_EXCEPTION_CHARS = 500  # of the last line of a traceback; some print whole tensors
OMITTED = "omitted: too many ranks wait for different things"

_RANK_PREFIX = re.compile(r"\[rank\d+\]: ?")  # torch puts it before each line of a traceback
_FRAME = re.compile(r'Traceback \(most recent call last\):|  File ".*", line \d+')
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(:\s.*)?")
# Of torchrun's report on a process that printed nothing when it ended.
_SIGNAL = re.compile(r"\s*traceback : (Signal \d+ \(SIG\w+\) received by PID \d+)")


def merge_ranks(
    known: Sequence[RankStatus], observation: Observation, spec: TrainingSpec, now: float
) -> dict[int, RankStatus]:
    """Every rank ever known, by number, as of this observation."""
    merged = {r.rank: r for r in known}
    observed_ranks = {observed_rank.rank: observed_rank for observed_rank in observation.ranks}
    for rank, observed_rank in observed_ranks.items():
        merged[rank] = _merge(merged.get(rank), observed_rank, now)
    for rank, before in merged.items():
        if before.is_alive and rank not in observed_ranks:
            merged[rank] = _missing(before, now)
        elif before.is_stopping and rank not in observed_ranks:
            merged[rank] = replace(before, is_stopping=False)  # it never ran
        elif before.attempt < 0 and rank not in observed_ranks:
            merged[rank] = replace(before, message="")  # an earlier pass wrote it
    return merged


def _merge(before: RankStatus | None, observed_rank: ObservedRank, now: float) -> RankStatus:
    before = before or RankStatus(rank=observed_rank.rank)
    is_older = observed_rank.attempt < before.attempt
    is_undone = observed_rank.attempt == before.attempt and before.exit is not None
    if is_older or is_undone:
        return replace(before, missing_since=None)
    if before.is_alive and observed_rank.attempt > before.attempt:
        # Its end was never observed; it had ended by the time its successor started.
        before = _ended(
            before, _unlearned(observed_rank.started_at or now, "its end was not observed")
        )
    after = replace(
        before,
        pod_name=observed_rank.pod_name or before.pod_name,
        node=observed_rank.host or before.node,
        provider=observed_rank.provider or before.provider,
        region=observed_rank.region or before.region,
        message=observed_rank.message,
        missing_since=None,
        is_stopping=observed_rank.is_stopping
        or (before.is_stopping and observed_rank.attempt == before.attempt),
    )
    if observed_rank.state == "waiting":
        return after
    after = replace(
        after,
        attempt=observed_rank.attempt,
        pid=observed_rank.pid,
        restarts=observed_rank.restarts,
        started_at=None if observed_rank.started_at is None else in_ms(observed_rank.started_at),
        metered_s=after.metered_s
        if observed_rank.metered_s is None
        else in_ms(observed_rank.metered_s),
        previous_exit=_previous(before, observed_rank),
        exit=None,
    )
    return after if observed_rank.exit is None else _ended(after, observed_rank.exit)


def _previous(before: RankStatus, observed_rank: ObservedRank) -> Exit | None:
    if observed_rank.previous_exit is not None:
        return with_explanation(_round_dates(observed_rank.previous_exit))
    return before.exit if observed_rank.attempt > before.attempt else before.previous_exit


def _ended(rank: RankStatus, exit: Exit) -> RankStatus:
    metered_s = in_ms(rank.metered_s + metered_for(rank.started_at, exit))
    return replace(
        rank,
        exit=with_explanation(_round_dates(exit)),
        metered_s=metered_s,
        missing_since=None,
        is_stopping=False,
    )


def metered_for(started_at: float | None, exit: Exit | None) -> float:
    """How long an attempt ran, if it has ended."""
    if started_at is None or exit is None:
        return 0.0
    return in_ms(max(exit.at - started_at, 0.0))


def _round_dates(exit: Exit) -> Exit:
    failed_at = None if exit.failed_at is None else in_ms(exit.failed_at)
    return replace(exit, at=in_ms(exit.at), failed_at=failed_at)


def with_explanation(exit: Exit) -> Exit:
    """Return the exit with the exception in its last lines as its message, if it has none."""
    tail = exit.log_tail
    # An uncaught exception of Python ends with code 1; another code was chosen by the program.
    is_silent = exit.code == 1 and exit.reason == ExitReason.ERROR and not exit.message
    return replace(exit, message=exception_in(tail)) if is_silent else exit


def _unlearned(at: float, message: str) -> Exit:
    return Exit(code=None, at=at, reason=ExitReason.VANISHED, message=message)


def _missing(before: RankStatus, now: float) -> RankStatus:
    since = now if before.missing_since is None else before.missing_since
    if now < since + LOST_AFTER_S:
        return replace(before, missing_since=since, message="not observed any more")
    return _ended(before, _unlearned(since, f"not observed for {LOST_AFTER_S:g} s"))


def is_discardable(exit: Exit) -> bool:
    """Whether an attempt that ended so does not count if the rank is wanted again: atoll stopped
    it, or the executor lost it."""
    return exit.is_stopped or exit.reason == ExitReason.VANISHED


def classify(rank: RankStatus, spec: TrainingSpec, *, is_discarded: bool = False) -> RankStatus:
    return replace(rank, phase=_phase(rank, spec, is_discarded))


def _phase(rank: RankStatus, spec: TrainingSpec, is_discarded: bool) -> RankPhase:
    if rank.is_alive:
        return "Running"
    if rank.exit is None:
        return "Pending"
    has_budget = rank.restarts < spec.max_restarts
    if rank.exit.reason == ExitReason.VANISHED and not has_budget:
        return "Failed"
    if is_discarded:
        return "Pending"
    if rank.exit.is_stopped:
        return "Stopped"
    if rank.exit.is_success:
        return "Succeeded"
    return "Pending" if has_budget else "Failed"


def is_lost(rank: RankStatus) -> bool:
    """Failed, with no restart left."""
    return rank.phase == "Failed"


def waiting_message(
    rank: RankStatus, status: Status, observation: Observation, world: WorldSize
) -> RankStatus:
    """The rank with a message that says what it waits for, or how it ended."""
    return replace(rank, message=_message(rank, status, observation, world))


def _message(rank: RankStatus, status: Status, observation: Observation, world: WorldSize) -> str:
    if rank.rank >= world.target and (rank.is_alive or rank.is_stopping):
        return "stopping: scaled down"
    if rank.phase == "Running" and rank.is_stopping:
        is_wanted = status.desired is not None and rank.rank < status.desired.size
        return "stopping: it restarts once it has ended" if is_wanted else "stopping"
    if rank.phase == "Running":
        return rank.message
    if rank.phase != "Pending":
        return describe_exit(rank.exit) if rank.exit else ""
    if status.gate_opened_at is None and status.bench.phase in ("Pending", "Running"):
        return f"start gate: the link must be measured first; {status.bench.message}"
    capacity, message = observation.capacity, observation.message
    if status.gate_opened_at is None and capacity is not None and not observation.has_gate:
        return f"start gate: capacity for {capacity} of {world.target} ranks; {message}"
    if capacity is not None and rank.rank >= capacity:
        return f"no capacity: {message}"
    if rank.exit is not None and not is_discardable(rank.exit):
        return f"restarting: it {describe_exit(rank.exit)}"
    # The message of the executor for this rank, else its message for the whole training.
    return rank.message or observation.message or "starting"


def root_cause_of(status: Status, world: WorldSize) -> RankStatus | None:
    """The first failure of the run of failures that took the world below its minimum.

    Order is when each rank says it failed, or else when it ended: peers that crash on a lost
    connection may be gone before the culprit has unwound.
    """
    lost = sorted(
        (r for r in status.ranks if r.rank < world.target and is_lost(r)),
        key=lambda r: (r.exit.order if r.exit else 0.0, r.rank),
    )
    spare = world.target - world.min
    if not lost or status.failing != PhaseReason.RANK_FAILED:
        return None
    at = min(spare, len(lost) - 1)
    while at > 0 and _order(lost[at]) - _order(lost[at - 1]) <= CASCADE_S:
        at -= 1
    return lost[at]


def _order(rank: RankStatus) -> float:
    return rank.exit.order if rank.exit else 0.0


def final_exits(status: Status, root: RankStatus | None) -> list[RankExit]:
    """One record for every rank that ever ran."""
    ran = (r for r in (*status.ranks, *status.removed_ranks) if r.exit is not None)
    return [_record(r, root) for r in sorted(ran, key=lambda r: r.rank)]


def _record(rank: RankStatus, root: RankStatus | None) -> RankExit:
    ended = rank.exit
    assert ended is not None
    fell_after = root is not None and rank.rank != root.rank and ended.order >= _order(root)
    was_running = rank.phase in ("Stopped", "Failed") or not ended.is_success
    return final_record(rank, collateral=fell_after and was_running)


def final_record(rank: RankStatus, *, collateral: bool) -> RankExit:
    """The record of a rank that has ended."""
    ended = rank.exit
    assert ended is not None
    return RankExit(
        rank=rank.rank,
        exit_code=ended.code,
        termination_reason=ended.reason,
        restart_count=rank.restarts,
        signal=ended.signal,
        started_at=rank.started_at,
        ended_at=ended.at,
        host=rank.node,
        collateral=collateral,
        message=ended.message,
        log_tail=ended.log_tail,
        stack=ended.stack,
    )


class TextBudget:
    """Counts the bytes of texts up to a limit. A text that several ranks share counts once."""

    def __init__(self, max_bytes: int = MAX_TEXT_BYTES) -> None:
        self._left = max_bytes
        self._known: set[str] = set()

    def takes(self, *texts: str) -> bool:
        """Whether these fit, too; if they do, they are counted."""
        news = {text for text in texts if text not in self._known}
        cost = sum(len(text.encode(errors="replace")) for text in news)
        if cost > self._left:
            return False
        self._left -= cost
        self._known |= news
        return True


def with_bounded_ends(ranks: Iterable[RankStatus]) -> dict[int, RankStatus]:
    """The ranks by number; only those that ended first keep their messages and last lines."""
    budget, bounded = TextBudget(), {r.rank: r for r in ranks}
    ended = [r for r in bounded.values() if r.exit is not None or r.previous_exit is not None]
    for rank in sorted(ended, key=_end_order):
        bounded[rank.rank] = replace(
            rank,
            exit=_bounded(rank.exit, budget),
            previous_exit=_bounded(rank.previous_exit, budget),
        )
    return bounded


def with_bounded_messages(ranks: Iterable[RankStatus]) -> list[RankStatus]:
    """The ranks; of those that wait, the lowest numbers keep their messages."""
    budget = TextBudget()
    return [
        r if r.exit is not None or budget.takes(r.message) else replace(r, message=OMITTED)
        for r in ranks
    ]


def with_texts_of(rank: RankStatus, observation: Observation) -> RankStatus:
    """The rank with message and last lines of its end, if the executor still has them."""
    if rank.exit is None or rank.exit.log_tail or rank.exit.message:
        return rank
    for other in observation.ranks:
        is_same = (other.rank, other.attempt) == (rank.rank, rank.attempt)
        if other.exit is not None and is_same:
            ended = with_explanation(other.exit)
            texts = {
                "message": ended.message,
                "log_tail": ended.log_tail,
                "stack": ended.stack,
            }
            return replace(rank, exit=replace(rank.exit, **texts))
    return rank


def _bounded(ended: Exit | None, budget: TextBudget) -> Exit | None:
    if ended is None or budget.takes(ended.message, *ended.log_tail, *ended.stack):
        return ended
    if ended.log_tail and budget.takes(ended.message):
        return replace(ended, log_tail=[], stack=[])
    return replace(ended, message="", log_tail=[], stack=[])


def _end_order(rank: RankStatus) -> tuple[float, int]:
    ended = rank.exit or rank.previous_exit
    return (ended.order if ended else 0.0), rank.rank


def exception_in(lines: Sequence[str]) -> str:
    """`ValueError: oops`, if `lines` end with a traceback, or else an empty text.

    A program that printed more after a traceback went on; indented lines are more of the message,
    as torch's "Missing key(s) in state_dict". Torch marks each line of the traceback of a process,
    so what others printed in between does not matter.
    """
    for at in range(len(lines) - 1, -1, -1):
        prefix = _prefix_of(lines[at])
        if not _FRAME.match(lines[at], len(prefix)):
            continue
        after = [line[len(prefix) :] for line in lines[at + 1 :] if line.startswith(prefix)]
        after = [line for line in after if line.strip()]
        end = next((n for n, line in enumerate(after) if not line[0].isspace()), None)
        if end is None or not _EXCEPTION.fullmatch(after[end]):
            break
        if not prefix and not all(line[0].isspace() for line in after[end + 1 :]):
            break
        return after[end].rstrip()[:MAX_EXCEPTION_CHARS]
    return _signal_in(lines)


def exception_of(training: Training) -> Exception | None:
    """The exception with which the rank that failed first ended, with its traceback as a note.

    It has its own type if that is one of Python's, else it is a RankError. None if the last lines
    of the rank hold no traceback.
    """
    cause = training.status.root_cause
    tail = [] if cause is None else cause.log_tail
    starts = [at for at, line in enumerate(tail) if line.startswith("Traceback (most recent call")]
    if cause is None or not starts:
        return None
    # The launcher of functions says what was raised: more lines may be the rest of its message.
    is_told = bool(cause.message) and cause.message in (line.rstrip() for line in tail)
    text = cause.message if is_told else exception_in(tail)
    if not text:
        return None
    error: Exception = RankError(text)
    name, _, message = text.partition(": ")
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # it takes other arguments than a message
            own = kind(message) if message else kind()
            error = own if str(own) == message else error
    trace = "\n".join(map(escape_control, tail[starts[0] :]))
    error.add_note(f"in rank {cause.rank} of {training.display_name}:\n{trace}")
    return error


def _prefix_of(line: str) -> str:
    prefix = _RANK_PREFIX.match(line)
    return prefix.group() if prefix else ""


def _signal_in(lines: Sequence[str]) -> str:
    matches = (_SIGNAL.fullmatch(line.rstrip()) for line in reversed(lines))
    return next((match.group(1) for match in matches if match), "")


# The attempts of ranks: each start of a rank's process, and how it ended.
#
# A status has the newest attempt of each rank. Stores keep those before it, as many as
# `MAX_ATTEMPTS`, beside the status, and only once they have a successor: a rank that never restarts
# costs nothing.

MAX_ATTEMPTS = 20  # of one rank, before its newest
MESSAGE_CHARS = 300  # of a past attempt: the exception, not its traceback
TIMES = 10**6  # larger numbers of attempts are seconds since the epoch


class AttemptList(Model, frozen=True):
    """In order of rank and attempt."""

    items: list[AttemptStatus]


def superseded_attempts(
    old: Status, new: Status, observation: Observation
) -> tuple[AttemptStatus, ...]:
    """The attempts that have a successor in `new` and had none in `old`."""
    before = {r.rank: r for r in (*old.ranks, *old.removed_ranks)}
    observed_ranks = {observed_rank.rank: observed_rank for observed_rank in observation.ranks}
    ended: list[AttemptStatus] = []
    for rank in (*new.ranks, *new.removed_ranks):
        was = before.get(rank.rank) or RankStatus(rank=rank.rank)
        if rank.attempt <= max(was.attempt, 0):
            continue
        observed_rank = observed_ranks.get(rank.rank)
        earlier = {} if observed_rank is None else {a.attempt: a for a in observed_rank.attempts}
        if was.attempt >= 0 and was.attempt not in earlier:
            earlier[was.attempt] = attempt_of(was, _end(was, rank))
        ended += (earlier[number] for number in sorted(earlier) if number < rank.attempt)
    return tuple(ended)


def _end(was: RankStatus, rank: RankStatus) -> Exit:
    """How the attempt in `was` ended, if `rank` is a later one."""
    if was.exit is not None:
        return was.exit
    if rank.attempt == was.attempt + 1 and rank.previous_exit is not None:
        return rank.previous_exit
    at = rank.started_at or was.started_at or 0.0
    return Exit(code=None, at=at, reason=ExitReason.VANISHED, message="its end was not observed")


def attempt_of(rank: RankStatus, exit: Exit | None) -> AttemptStatus:
    """The attempt that the status of a rank shows."""
    return close_attempt(
        AttemptStatus(
            rank=rank.rank, attempt=rank.attempt, started_at=rank.started_at, host=rank.node
        ),
        exit,
    )


def close_attempt(attempt: AttemptStatus, exit: Exit | None) -> AttemptStatus:
    if exit is None:
        return attempt
    exit = with_explanation(exit)
    started_at = None if attempt.started_at is None else in_ms(attempt.started_at)
    return AttemptStatus(
        rank=attempt.rank,
        attempt=attempt.attempt,
        started_at=started_at,
        host=attempt.host,
        ended_at=in_ms(exit.at),
        exit_code=exit.code,
        reason=exit.reason,
        signal=exit.signal,
        is_stopped=exit.is_stopped,
        message=exit.message[:MESSAGE_CHARS],
    )


def attempts_of(status: Status, stored: Iterable[AttemptStatus]) -> list[AttemptStatus]:
    """All that are known, in order of rank and attempt: those stored, and the newest ones.

    Where an executor tells attempts apart by their times, they are counted from 0.
    """
    known = {(a.rank, a.attempt): a for a in stored}
    for rank in (*status.ranks, *status.removed_ranks):
        if rank.attempt >= 0:
            known[rank.rank, rank.attempt] = attempt_of(rank, rank.exit)
    counts: dict[int, int] = {}
    attempts = []
    for key in sorted(known):
        one, count = known[key], counts.get(key[0], 0)
        attempts.append(one if one.attempt < TIMES else replace(one, attempt=count))
        counts[key[0]] = count + 1
    return attempts


def newest_attempts(
    attempts: Sequence[AttemptStatus], most: int | None = None
) -> list[AttemptStatus]:
    """The newest attempts, in order of rank: `MAX_ATTEMPTS` of each rank, and `most` of all."""
    by_rank: dict[int, dict[int, AttemptStatus]] = {}
    for attempt in attempts:
        by_rank.setdefault(attempt.rank, {})[attempt.attempt] = attempt
    attempts_left = [
        own[number] for _, own in sorted(by_rank.items()) for number in sorted(own)[-MAX_ATTEMPTS:]
    ]
    if most is not None and len(attempts_left) > most:
        newest = sorted(attempts_left, key=lambda a: a.ended_at or 0.0)[-most:]
        attempts_left = sorted(newest, key=lambda a: (a.rank, a.attempt))
    return attempts_left


# Warnings of a training: what its ranks and its outer rounds show to be wrong with it. Pure.
#
# A warning is a fact that stays true, so it is never taken back: `status.warnings` only grows. Its
# text is the same however often it is found, so that it is reported once.

WARNED = "TrainingWarning"  # reason of the events and of the condition `Warnings`
MAX_WARNINGS = 20  # of a training: more say nothing new, and a status is bounded
ABSENT_ROUNDS = 10  # in a row without a rank that runs, before that is reported


def merge_warnings(known: Sequence[str], warnings: Iterable[str]) -> list[str]:
    """Those known, then the new ones, each once; the first `MAX_WARNINGS`."""
    return list(dict.fromkeys([*known, *warnings]))[:MAX_WARNINGS]


def find_warnings(
    training: Training, ranks: Iterable[RankStatus], rounds: ObservedRounds | None
) -> list[str]:
    """What the rounds show to be wrong, in sentences."""
    if rounds is None:
        return []
    return [
        *rounds.warnings,
        *(
            f"round {number} left out rank {rank}: its pseudo-gradient was not finite"
            for rank, number in sorted(rounds.bad.items())
        ),
        *_absences(training, ranks, rounds),
    ]


def _absences(
    training: Training, ranks: Iterable[RankStatus], rounds: ObservedRounds
) -> Iterator[str]:
    if not has_replica_per_rank(training, len(rounds.last)) or rounds.recent_since is None:
        return
    for rank in ranks:
        is_old = rank.started_at is not None and rank.started_at < rounds.recent_since
        is_absent = rounds.last.get(rank.rank, -1) <= rounds.newest - ABSENT_ROUNDS
        if rank.is_alive and is_old and is_absent and rank.rank not in rounds.left:
            yield f"rank {rank.rank} was in none of {ABSENT_ROUNDS} rounds in a row while it ran"


def has_replica_per_rank(training: Training, replicas: int) -> bool:
    """Whether every rank should be in the rounds: not if all ranks together are one replica."""
    return replicas > 1 or training.spec.rendezvous.backend == "none"
