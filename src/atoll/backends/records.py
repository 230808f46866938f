"""From facts about ranks to an observation: one pure fold for every backend with records.

The ranks' own records come first, and what the backend says of its jobs second: it counts where
there is no record, and may only name the cause of an end that may be its doing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from atoll.agent.records import (
    BY_EXECUTOR,
    AttemptFacts,
    Due,
    Facts,
    exit_record,
    is_unwanted,
    next_attempt,
    restarts,
)
from atoll.core.phase import ExitReason
from atoll.core.ranks import MAX_ATTEMPTS as MAX_PAST_ATTEMPTS
from atoll.core.ranks import close_attempt
from atoll.core.spec import may_start
from atoll.core.status import (
    AttemptStatus,
    DesiredState,
    Exit,
    Followup,
    Observation,
    ObservedRank,
    Training,
    sooner,
)

Json = dict[str, Any]
Record = Mapping[str, Any]
AttemptKey = tuple[int, int]  # rank, attempt

# Signals that a backend may have sent: its own report of the cause is waited for.
BACKEND_SIGNALS = frozenset({"SIGTERM", "SIGKILL", "SIGINT", "SIGHUP"})
AT_GATE = "start gate: it waits for the other ranks"
PAUSED = "paused by its backend"
NO_STACKS = "no stacks: its wrapper, which takes them, left no record"


class JobState(NamedTuple):
    """What the backend says of one attempt. Ended: nothing of it runs, as far as it knows.

    `reason` is an ExitReason where the backend names a cause: Preempted, OOMKilled, HostLost,
    TimeLimit, Deleted. `message` is the backend's own text.
    """

    state: Literal["pending", "running", "ended"]
    reason: str = ""
    message: str = ""
    host: str | None = None
    is_paused: bool = False  # it does not run for now, so heartbeats may be missing
    is_repeated: bool = False  # the backend has started this attempt a second time, or will
    is_withdrawn: bool = False  # by the backend itself, before anything can have run

    @property
    def is_active(self) -> bool:
        return self.state != "ended"

    @property
    def weight(self) -> tuple[bool, ...]:
        """Of two jobs for one attempt the heavier counts: it may run, or says more. One that was
        withdrawn says nothing once the attempt was asked for again."""
        return self.is_active, self.state == "running", not self.is_withdrawn, bool(self.reason)


def best_jobs(jobs: Iterable[tuple[AttemptKey, JobState]]) -> dict[AttemptKey, JobState]:
    """One state for each attempt, of which there may be several jobs."""
    best: dict[AttemptKey, JobState] = {}
    for key, job in jobs:
        if key not in best or job.weight > best[key].weight:
            best[key] = job
    return best


class Timing(NamedTuple):
    """How long the fold waits for what, in seconds. The defaults fit records on NFS."""

    observe_s: float = 0.5  # between two observations
    settle_s: float = 2.5  # for a record of what the backend says has ended: NFS caches for 1 to 2
    heartbeat_timeout_s: float = 20.0  # then the executor writes the exit
    cause_wait_s: float = 10.0  # for the backend to name why a rank was killed
    stop_wait_s: float = 10.0  # after the grace, which stacks need; then the backend is to end it


class Ages(NamedTuple):
    """What only a reader can measure, by its own monotonic clock. A journal has none of it.

    `heartbeat_at`: the last heartbeat by the clock of the store, for attempts of which this reader
    has never seen a change: they may have been silent for long before.
    """

    unchanged_s: Mapping[AttemptKey, float] = {}  # since the newest record or heartbeat
    ended_s: Mapping[AttemptKey, float] = {}  # since the backend first said so
    heartbeat_at: Mapping[AttemptKey, float] = {}


NO_AGES = Ages()


class WriteExit(Followup, frozen=True):
    """The executor writes how an attempt ended: its agent could not."""

    rank: int
    attempt: int
    record: Json


class StopJobs(Followup, frozen=True):
    """The backend ends these attempts by its own means."""

    attempts: tuple[AttemptKey, ...]


class OpenStartGate(Followup, frozen=True):
    """The ranks that wait at the gate start, and so do all that come later."""

    together: int


class TakeStacks(Followup, frozen=True):
    """All ranks take their stacks but these attempts, whose round timed out: they have theirs."""

    asking: tuple[AttemptKey, ...]


class DueAttempt(NamedTuple):
    rank: int
    attempt: int
    in_s: float  # not before


class Fold(NamedTuple):
    """`observation` for the controller, `due` for whoever starts attempts, and the newest attempt
    of each rank, whether known by records or by the backend, for the next desired state."""

    observation: Observation
    due: list[DueAttempt] = []
    newest: dict[int, int] = {}


class Judgement(NamedTuple):
    """What an attempt is, and what that makes necessary."""

    state: Literal["nothing", "waiting", "running", "exited"]
    message: str = ""
    exit: Exit | None = None
    write: Json | None = None  # the exit that the executor has to write
    must_stop: bool = False
    is_unsettled: bool = False  # it has to stop, and may or may not have run


class Case(NamedTuple):
    """All that decides what one attempt is."""

    facts: AttemptFacts
    job: JobState | None
    is_answered: bool  # by the backend
    is_unwanted: bool
    unwanted_s: float  # since the desired state was written
    stop_grace_s: float
    unchanged_s: float
    ended_s: float
    heartbeat_at: float | None
    now: float
    timing: Timing

    @property
    def end(self) -> Record:
        return self.facts.exit or {}

    @property
    def is_active(self) -> bool:
        """Whether something of it may run."""
        return not self.is_answered if self.job is None else self.job.is_active

    @property
    def is_paused(self) -> bool:
        return self.job is not None and self.job.is_paused

    @property
    def is_repeated(self) -> bool:
        return self.job is not None and self.job.is_repeated

    @property
    def message(self) -> str:
        return self.job.message if self.job else ""

    @property
    def is_silent(self) -> bool:
        """Whether its agent has been silent for too long."""
        timing, job = self.timing, self.job
        if not self.is_answered or self.is_paused:
            return False
        is_over = job is not None and not job.is_active and job.reason != ExitReason.HOST_LOST
        return self.unchanged_s >= (timing.settle_s if is_over else timing.heartbeat_timeout_s)

    @property
    def stops_late(self) -> bool:
        limit_s = self.stop_grace_s + self.timing.stop_wait_s
        return self.is_unwanted and self.unwanted_s >= limit_s

    @property
    def must_stop(self) -> bool:
        """Whether a job that is known has to be ended, of an attempt without an exit."""
        return self.job is not None and self.is_active and (self.stops_late or self.is_silent)


def _started_state(case: Case) -> Literal["waiting", "running"]:
    return "waiting" if case.facts.start is None else "running"


def _has_unnamed_cause(case: Case) -> bool:
    is_own = bool(case.end) and case.end.get("by") != BY_EXECUTOR
    is_recent = case.unchanged_s < case.timing.cause_wait_s
    return (
        is_own
        and case.is_active
        and not case.is_repeated
        and is_recent
        and has_open_cause(case.end)
    )


def _outlives_record(case: Case) -> bool:
    # A job without a wrapper can stay for ever: that of a step daemon which was killed.
    is_old = case.unchanged_s >= case.timing.stop_wait_s
    return case.job is not None and case.is_active and (case.is_repeated or is_old)


RUNNING, STOPPING = Judgement("running"), Judgement("running", must_stop=True)
Rule = tuple[Callable[[Case], bool], Callable[[Case], Judgement]]

# The table of what an attempt is. The first row that matches counts, so their order is the rule.
EXIT_RULES: tuple[Rule, ...] = (
    # Its process may run: nothing else may take its place.
    (
        lambda c: c.end.get("by") == BY_EXECUTOR and c.is_active,
        lambda c: Judgement("running", "it is being ended", must_stop=c.job is not None),
    ),
    # The backend may still say why it killed it.
    (_has_unnamed_cause, lambda c: Judgement(_started_state(c), "it has ended")),
    (
        lambda c: c.facts.is_nothing,
        lambda c: Judgement("nothing", must_stop=_outlives_record(c)),
    ),
    (
        lambda c: True,
        lambda c: Judgement("exited", exit=exit_from(c.end, c.job), must_stop=_outlives_record(c)),
    ),
)
UNCLAIMED_RULES: tuple[Rule, ...] = (
    (lambda c: c.job is None, lambda c: Judgement("nothing")),
    (
        lambda c: c.is_active,
        lambda c: Judgement(
            "waiting", c.message, must_stop=c.is_unwanted, is_unsettled=c.is_unwanted
        ),
    ),
    (lambda c: c.is_unwanted, lambda c: Judgement("nothing")),
    (
        lambda c: c.ended_s < c.timing.settle_s,
        lambda c: Judgement("waiting", c.message),
    ),
    # Withdrawn: it is due again.
    (lambda c: c.job is not None and c.job.is_withdrawn, lambda c: Judgement("nothing")),
    (lambda c: True, lambda c: Judgement("waiting", c.message, write=_rejected(c))),
)
CLAIMED_RULES: tuple[Rule, ...] = (
    (
        lambda c: c.is_silent,
        lambda c: Judgement(
            _started_state(c),
            AT_GATE if c.facts.start is None else "",
            write=_lost(c),
            must_stop=c.must_stop,
            is_unsettled=c.is_unwanted and c.facts.start is None,
        ),
    ),
    (
        lambda c: c.facts.start is None,
        lambda c: Judgement("waiting", AT_GATE, must_stop=c.must_stop, is_unsettled=c.is_unwanted),
    ),
    (lambda c: c.is_paused, lambda c: Judgement("running", PAUSED, must_stop=c.must_stop)),
    (lambda c: True, lambda c: STOPPING if c.must_stop else RUNNING),
)


def judge(case: Case) -> Judgement:
    facts = case.facts
    if facts.exit is not None:
        rules = EXIT_RULES
    elif facts.claim is None and facts.start is None:  # in a journal, a start implies its claim
        rules = UNCLAIMED_RULES
    else:
        rules = CLAIMED_RULES
    for matches, outcome in rules:
        if matches(case):
            return outcome(case)
    raise AssertionError("the last rule of each table matches")


def has_open_cause(end: Record) -> bool:
    """Whether the backend may have brought this end about, so that it may name the cause."""
    if end.get("stopped") or end["code"] == 0:
        return False
    return bool(end.get("signalled")) or end.get("signal") in BACKEND_SIGNALS


def exit_from(end: Record, job: JobState | None = None) -> Exit:
    """Return the end of an attempt by its record, with the backend's cause if that was its doing.

    OOMKilled needs a SIGKILL; an attempt that the backend repeats without a reason is Evicted.
    """
    reason, message = end["reason"], end.get("message") or ""
    if job is not None and has_open_cause(end):
        if end.get("by") != BY_EXECUTOR:
            cause = ExitReason.EVICTED.value if job.is_repeated and not job.reason else job.reason
            is_fitting = (
                end["signal"] == "SIGKILL" if cause == ExitReason.OOM_KILLED else bool(cause)
            )
            reason = cause if is_fitting else reason
        if job.message not in message:
            message = f"{message}; {job.message}" if message else job.message
    return Exit(
        code=end["code"],
        at=end["at"],
        reason=str(reason),
        signal=end.get("signal"),
        is_stopped=bool(end.get("stopped")),
        failed_at=end.get("failedAt"),
        message=message,
        log_tail=end.get("tail") or [],
        stack=end.get("stack") or [],
        is_from_backend=end.get("by") == BY_EXECUTOR,
    )


def _rejected(case: Case) -> Json:
    """The exit of an attempt that the backend ended before it began."""
    assert case.job is not None
    end = {
        "by": BY_EXECUTOR,
        "ran": False,
        "code": None,
        "signal": None,
        "reason": case.job.reason or ExitReason.REJECTED.value,
        "message": case.job.message,
        "at": case.now - case.ended_s,
        "host": case.job.host,
    }
    return exit_record(case.facts.rank, case.facts.attempt, end)


def _lost(case: Case) -> Json:
    """The exit of an attempt whose agent fell silent."""
    facts, job = case.facts, case.job
    reason, message = ExitReason.SUPERVISOR_LOST.value, "its wrapper left no record"
    if job is not None and job.reason and not job.is_active:
        reason = str(job.reason)
    if job is not None and job.message:
        message += f"; {job.message}"
    ended_at = case.now - case.unchanged_s
    if case.heartbeat_at is not None:  # by the clock of the store, which may be ahead
        ended_at = min(ended_at, case.heartbeat_at)
    end = {
        "by": BY_EXECUTOR,
        "ran": facts.start is not None,
        "code": 137 if reason == ExitReason.OOM_KILLED else None,
        "signal": None,
        "reason": reason,
        "message": message,
        "at": max(ended_at, facts.started_at or 0.0),
        "startedAt": facts.started_at,
        "host": facts.host,
        "stopped": case.is_unwanted,
        **({} if facts.start is None else {"stack": [NO_STACKS]}),
    }
    return exit_record(facts.rank, facts.attempt, end)


def desired_of(facts: Facts) -> DesiredState | None:
    record = facts.desired
    if record is None:
        return None
    discarded = {int(rank): attempt for rank, attempt in record["discarded"].items()}
    return DesiredState(
        version=record["version"], size=record["size"], discarded_attempts=discarded
    )


class RankMemory:
    """The ranks as the reader of a journal last folded them: those without new records are reused.

    A journal is all there is to know of local ranks, and most of 10,000 ranks do not change between
    two observations.
    """

    def __init__(self) -> None:
        self._ranks: dict[int, tuple[int, Record, ObservedRank]] = {}

    def observe(self, training: Training, facts: Facts, host: str) -> list[ObservedRank]:
        desired, before = facts.desired, self._ranks
        if desired is None:
            return []
        self._ranks = {}
        for rank in sorted(facts.ranks):
            count, entry = facts.counts[rank], before.get(rank)
            if entry is None or entry[0] != count or entry[1] is not desired:
                one = facts.current(rank)
                if one is None:
                    continue
                judged = judge(_case(training, facts, (rank, one.attempt), {}, 0.0, Timing()))
                match = observed_rank(training.name, facts, one, judged, {}, host)
                entry = (count, desired, match)
            self._ranks[rank] = entry
        return [entry[2] for entry in self._ranks.values()]


# By rank: all that its ObservedRank was made of, and that.
FoldMemory = dict[int, tuple[tuple[Any, ...], ObservedRank]]


def _case(
    training: Training,
    facts: Facts,
    key: AttemptKey,
    states: Mapping[AttemptKey, JobState] | None,
    now: float,
    timing: Timing,
    ages: Ages = NO_AGES,
) -> Case:
    desired = facts.desired
    assert desired is not None
    return Case(
        facts.attempt(*key) or AttemptFacts(*key, None, None, None),
        None if states is None else states.get(key),
        states is not None,
        is_unwanted(desired, *key),
        now - desired["at"],
        training.spec.stop_grace_s,
        ages.unchanged_s.get(key, 0.0),
        ages.ended_s.get(key, 0.0),
        ages.heartbeat_at.get(key),
        now,
        timing,
    )


def fold(
    training: Training,
    facts: Facts,
    states: Mapping[AttemptKey, JobState] | None,
    *,
    now: float,
    timing: Timing,
    ages: Ages = NO_AGES,
    has_gate: bool = True,
    memory: FoldMemory | None = None,
) -> Fold:
    """Fold facts and what the backend says into an observation and the attempts that are due.

    `memory`: of the last fold, so that ranks of which nothing is new are reused.
    """
    desired = facts.desired
    if desired is None:
        return Fold(Observation())
    by_rank: dict[int, dict[int, Judgement]] = {}
    known = {(rank, number) for rank, attempts in facts.ranks.items() for number in attempts}
    for key in sorted({*known, *(states or ())}):
        case = _case(training, facts, key, states, now, timing, ages)
        by_rank.setdefault(key[0], {})[key[1]] = judge(case)
    currents = {
        rank: max(real)
        for rank, judged in by_rank.items()
        if (real := [number for number, one in judged.items() if one.state != "nothing"])
    }
    due = [] if states is None else _due(training, facts, by_rank, currents, ages)
    opening, gate_in_s = _open_gate(training, facts, by_rank, now) if has_gate else ((), None)
    memory = {} if memory is None else memory
    for rank, number in currents.items():
        judged, job = by_rank[rank][number], (states or {}).get((rank, number))
        basis = (facts.counts.get(rank), number, desired, judged, job)
        if rank not in memory or memory[rank][0] != basis or len(by_rank[rank]) > 1:
            one = facts.attempt(rank, number) or AttemptFacts(rank, number, None, None, None)
            memory[rank] = basis, observed_rank(training.name, facts, one, judged, states or {})
    observation = Observation(
        ranks=[memory[rank][1] for rank in currents],
        desired=desired_of(facts),
        has_gate=has_gate,
        gate_opened_at=(facts.gate or {}).get("at"),
        unsettled=sum(one.is_unsettled for judged in by_rank.values() for one in judged.values()),
        followups=(*_followups(by_rank), *opening),
        again_in_s=sooner(timing.observe_s, gate_in_s, *(d.in_s for d in due if d.in_s > 0)),
        at=now,
    )
    return Fold(observation, due, {rank: max(judged) for rank, judged in by_rank.items()})


def observed_rank(
    name: str,
    facts: Facts,
    one: AttemptFacts,
    judged: Judgement,
    states: Mapping[AttemptKey, JobState],
    host: str | None = None,
) -> ObservedRank:
    """Return the rank as its newest attempt shows it. `host`: where the records do not say."""
    desired, rank, number = facts.desired, one.rank, one.attempt
    assert desired is not None
    job, earlier = states.get((rank, number)), _earlier(facts, one) if number else []
    before = facts.attempt(rank, number - 1) if number else None
    return ObservedRank(
        rank=rank,
        state="waiting" if judged.state == "nothing" else judged.state,
        attempt=number,
        restarts=restarts(desired, rank, number),
        started_at=one.started_at,
        metered_s=sum(each.ran_s() for each in earlier),
        previous_exit=None
        if before is None or before.exit is None
        else exit_from(before.exit, states.get((rank, number - 1))),
        attempts=tuple(
            _ended_attempt(each, states.get((rank, each.attempt)), host)
            for each in earlier
            if each.exit is not None and each.attempt >= number - MAX_PAST_ATTEMPTS
        ),
        exit=judged.exit,
        is_stopping=judged.state in ("running", "waiting") and is_unwanted(desired, rank, number),
        pod_name=f"{name}-{rank}",
        host=one.host or (job.host if job else None) or host,
        pid=(one.start or {}).get("pid"),
        message=judged.message,
    )


def _earlier(facts: Facts, one: AttemptFacts) -> list[AttemptFacts]:
    attempts = facts.ranks.get(one.rank, {})
    return [attempts[number] for number in sorted(attempts) if number < one.attempt]


def _ended_attempt(one: AttemptFacts, job: JobState | None, host: str | None) -> AttemptStatus:
    place = one.host or (job.host if job else None) or host
    bare = AttemptStatus(rank=one.rank, attempt=one.attempt, started_at=one.started_at, host=place)
    return close_attempt(bare, None if one.exit is None else exit_from(one.exit, job))


def _due(
    training: Training,
    facts: Facts,
    by_rank: Mapping[int, Mapping[int, Judgement]],
    currents: Mapping[int, int],
    ages: Ages,
) -> list[DueAttempt]:
    """The attempts to start. Delays are counted from when this reader first saw the end."""
    assert facts.desired is not None
    max_restarts, match = training.spec.max_restarts, []
    for rank in range(facts.desired["size"]):
        last, end = currents.get(rank), None
        if last is not None and by_rank[rank][last].state == "exited":
            one = facts.attempt(rank, last)
            end = None if one is None else one.exit
        due: Due | None = next_attempt(facts, rank, last, end, max_restarts)
        if due is not None:
            waited_s = 0.0 if last is None else ages.unchanged_s.get((rank, last), 0.0)
            in_s = due.delay_s - waited_s if due.after is not None else 0.0
            match.append(DueAttempt(rank, due.attempt, in_s))
    return match


def _open_gate(
    training: Training,
    facts: Facts,
    by_rank: Mapping[int, Mapping[int, Judgement]],
    now: float,
) -> tuple[tuple[Followup, ...], float | None]:
    """The gate opens for all ranks, or for `min` of them once the first has waited long enough."""
    assert facts.desired is not None
    size = facts.desired["size"]
    if facts.gate is not None or not size:
        return (), None
    # One that has ended at the gate may be shown as waiting, until its backend says why it ended.
    claims = [
        one.claim["at"]
        for rank, judged in by_rank.items()
        for number, each in judged.items()
        if rank < size
        and each.state == "waiting"
        and (one := facts.attempt(rank, number)) is not None
        and one.claim is not None
        and one.exit is None
    ]
    left_s = min(claims, default=now) + training.spec.start_grace_s - now
    if may_start(len(claims), training.spec.world_size, is_grace_over=bool(claims) and left_s <= 0):
        return (OpenStartGate(len(claims)),), None
    return (), left_s if claims and left_s > 0 else None


def _followups(by_rank: Mapping[int, Mapping[int, Judgement]]) -> Iterable[Followup]:
    judged = [((rank, n), one) for rank, own in by_rank.items() for n, one in own.items()]
    ends = [WriteExit(*key, one.write) for key, one in judged if one.write is not None]
    stops = tuple(key for key, one in judged if one.must_stop)
    return (*ends, *((StopJobs(stops),) if stops else ()))
