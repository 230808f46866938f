"""A simulated machine for ranks, with a virtual clock, and faults wherever there is a step.

The executor here is a model of what every real one promises: it accepts wishes durably, restarts
within the budget by itself, shows itself late, and may lose its supervisor or all its memory. It
may have a start gate of its own, and may hold each exit until it is let go: then its looks ask for
chores, and a rank starts again only once its last exit was let go.
What truly happened is kept apart from what is shown, for the invariants to compare with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from atoll.agent import records
from atoll.agent.records import (
    AttemptFacts,
    Facts,
    desired_record,
    exit_record,
    is_unwanted,
    restarts,
    start_record,
)
from atoll.backends.records import desired_of
from atoll.core.errors import Permanent, Temporary
from atoll.core.plan import STALE_S
from atoll.core.ports import Executor
from atoll.core.status import (
    DesiredState,
    Exit,
    Followup,
    Observation,
    ObservedRank,
    Status,
    Training,
)


class Crash(BaseException):
    """The controller was killed at this step."""


class Open(Followup, frozen=True):
    """The start gate: the ranks are ready."""


class LetExitGo(Followup, frozen=True):
    """Nobody can learn of it again."""

    rank: int
    attempt: int


@dataclass
class Run:
    """One attempt of one rank, as it truly was."""

    rank: int
    attempt: int
    restarts: int
    started_at: float
    ends_at: float
    code: int
    ended_at: float | None = None
    shown_code: int | None = None  # what can be learned of it
    is_forgotten: bool = False  # the executor lost its memory of it


@dataclass
class Machine:
    """The truth about one training's ranks."""

    random: random.Random
    spec_restarts: int
    facts: Facts = field(default_factory=Facts)
    runs: list[Run] = field(default_factory=list)
    is_supervised: bool = False
    stop_at: dict[int, float] = field(default_factory=dict)
    told_at: dict[int, float] = field(default_factory=dict)  # when they were told to stop
    starts_at: dict[tuple[int, int], float] = field(default_factory=dict)
    history: list[tuple[float, Observation]] = field(default_factory=list)
    fail_chance: float = 0.2
    is_released: bool = False
    has_gate: bool = False
    ready_at: float | None = None  # when all ranks are at the gate, which nobody is told of
    openings: list[float] = field(default_factory=list)
    gate_opened_at: float | None = None
    wipes: int = 0
    has_exit_finalizer: bool = False
    gone: set[tuple[int, int]] = field(default_factory=set)  # exits that were let go
    is_touched: bool = False

    def alive(self) -> list[Run]:
        return [run for run in self.runs if run.ended_at is None]

    def accept(self, desired: DesiredState, now: float) -> None:
        self.is_released = False
        if desired.version < self.facts.version:
            return
        known = self.facts.newest()
        self.facts.add(
            desired_record(
                desired.version,
                desired.size,
                desired.discarded_attempts,
                self.facts.desired,
                known,
                now,
            )
        )
        self.is_supervised = True
        if self.has_gate and self.ready_at is None:
            self.ready_at = now + self.random.choice([0.0, 1.0, 20.0, 100.0])
        self.touch(now)

    def open(self, now: float) -> None:
        if self.gate_opened_at is None:
            self.gate_opened_at = now
            self.openings.append(now)
            self.touch(now)

    def let_go(self, rank: int, attempt: int, now: float) -> None:
        self.gone.add((rank, attempt))
        self.touch(now)

    def touch(self, now: float) -> None:
        """It looks different now, which every executor tells of."""
        self.is_touched = True
        self.remember(now)

    def advance(self, now: float) -> bool:
        """Everything due by `now` happens. True if anything did."""
        changed, self.is_touched = self.is_touched, False
        for run in self.alive():
            changed |= self._maybe_end(run, now)
        if self.is_supervised:
            changed |= self._start_due(now)
        if changed:
            self.remember(now)
        return changed

    def _maybe_end(self, run: Run, now: float) -> bool:
        desired = self.facts.desired or {}
        is_told = self.is_supervised and is_unwanted(desired, run.rank, run.attempt)
        if is_told and run.rank not in self.stop_at:
            self.told_at[run.rank] = now
            self.stop_at[run.rank] = now + self.random.choice([0.01, 0.5, 2.0, 8.0])
        stop_at = self.stop_at.get(run.rank, float("inf"))
        if min(run.ends_at, stop_at) > now:
            return False
        is_stopped = stop_at < run.ends_at
        self._end(run, min(run.ends_at, stop_at), 143 if is_stopped else run.code, is_stopped)
        self._heed(run.rank)
        return True

    def _heed(self, rank: int) -> None:
        self.stop_at.pop(rank, None)
        self.told_at.pop(rank, None)

    def _end(self, run: Run, at: float, code: int | None, stopped: bool, reason: str = "") -> None:
        run.ended_at, run.shown_code = at, code
        reason = reason or ("Completed" if code == 0 else "Error")
        end = {"code": code, "stopped": stopped, "at": at, "signal": None, "reason": reason}
        self.facts.add(exit_record(run.rank, run.attempt, end))

    def _start_due(self, now: float) -> bool:
        changed = False
        for due in list(self._due()):
            name = (due.rank, due.attempt)
            at = self.starts_at.setdefault(name, max(_not_before(due), now) + self.random.random())
            if at > now:
                continue
            life = self.random.choice([0.05, 1.0, 5.0, 30.0])
            code = self.random.choice([1, 3, 137]) if self.random.random() < self.fail_chance else 0
            run = Run(due.rank, due.attempt, due.restarts, at, at + life, code)
            self.runs.append(run)
            self.facts.add(start_record(due.rank, due.attempt, at, pid=1, startTicks=1))
            changed = True
        return changed

    def _due(self) -> Iterator[Any]:
        """Ranks that nothing holds back from being started."""
        if self.has_gate and self.gate_opened_at is None:
            return
        for due in records.due(self.facts, self.spec_restarts):
            last = self.facts.current(due.rank)
            if (
                not self.has_exit_finalizer
                or last is None
                or (last.rank, last.attempt) in self.gone
            ):
                yield due

    def next_time(self, now: float) -> float | None:
        times = [min(r.ends_at, self.stop_at.get(r.rank, r.ends_at)) for r in self.alive()]
        if self.is_supervised:
            for due in self._due():
                at = max(_not_before(due), now)
                times.append(self.starts_at.get((due.rank, due.attempt), at))
        return min(times, default=None)

    def supervisor_dies(self, now: float) -> None:
        for run in self.alive():
            self._end(run, now, self.random.choice([None, 137]), False, "SupervisorLost")
        self.is_supervised = False
        self.stop_at.clear()
        self.told_at.clear()
        self.remember(now)

    def is_wiped(self, now: float) -> None:
        """The host is gone with all it knew."""
        for run in self.alive():
            run.ended_at, run.shown_code = now, None
        for run in self.runs:
            run.is_forgotten = True
        self.facts = Facts()
        self.starts_at.clear()
        self.stop_at.clear()
        self.told_at.clear()
        self.is_supervised = False
        self.ready_at = self.gate_opened_at = None
        self.wipes += 1
        self.gone.clear()
        self.history.clear()  # late answers come from the same memory

    def shown_at(self, at: float) -> Observation:
        """What was true then. Times before the first wish show nothing."""
        nothing = Observation(has_gate=self.has_gate)
        observation = next(
            (observation for when, observation in reversed(self.history) if when <= at), nothing
        )
        is_shut = (
            observation.desired is not None
            and observation.desired.size > 0
            and observation.gate_opened_at is None
        )
        if not self.has_gate or not is_shut or self.ready_at is None:
            return observation
        if at < self.ready_at:
            return replace(observation, again_in_s=self.ready_at - at)
        return replace(observation, followups=(*observation.followups, Open()))

    def remember(self, now: float) -> None:
        self.history.append((now, self.show()))

    def show(self) -> Observation:
        currents = [self.facts.current(rank) for rank in self.facts.ranks]
        shown = [a for a in currents if a is not None and (a.rank, a.attempt) not in self.gone]
        ended = [a for a in shown if a.exit is not None and self.has_exit_finalizer]
        return Observation(
            ranks=[_seen(self.facts, a) for a in shown],
            desired=desired_of(self.facts),
            is_supervised=self.is_supervised,
            has_gate=self.has_gate,
            gate_opened_at=self.gate_opened_at,
            followups=tuple(LetExitGo(rank=a.rank, attempt=a.attempt) for a in ended),
        )


def _not_before(due: records.Due) -> float:
    return 0.0 if due.after is None else float(due.after["at"] + due.delay_s)


def _seen(facts: Facts, attempt: AttemptFacts) -> ObservedRank:
    ended, desired, rank = attempt.exit, facts.desired, attempt.rank
    assert desired is not None
    earlier = [one for one in facts.ranks[rank].values() if one.attempt < attempt.attempt]
    return ObservedRank(
        rank=attempt.rank,
        state="running" if ended is None else "exited",
        attempt=attempt.attempt,
        restarts=restarts(desired, rank, attempt.attempt),
        started_at=attempt.started_at,
        metered_s=sum(one.ran_s() for one in earlier),
        is_stopping=ended is None and is_unwanted(desired, rank, attempt.attempt),
        exit=None
        if ended is None
        else Exit(
            code=ended["code"],
            at=ended["at"],
            reason=ended["reason"],
            is_stopped=ended["stopped"],
        ),
    )


class SimExecutor(Executor):
    """The Executor port over a Machine, with a fault at any step."""

    name = "local"

    def __init__(
        self,
        machine: Machine,
        clock: Callable[[], float],
        faults: Faults,
        stored: Callable[[], Status],
    ) -> None:
        self.machine = machine
        self._stored = stored
        self._clock = clock
        self._faults = faults

    async def apply(self, training: Training, desired: DesiredState) -> None:
        with self._faults.step("apply"):
            if self.machine.facts.desired is None:
                if desired.size == 0:
                    return
                if training.status.has_run:
                    raise Permanent("there is no record of the ranks")
            self.machine.accept(desired, self._clock())

    async def release(self, training: Training) -> None:
        with self._faults.step("release"):
            self.machine.is_wiped(self._clock())
            self.machine.is_released = True

    async def purge(self, training: Training) -> None:
        await self.release(training)

    async def observe(self, training: Training) -> Observation:
        with self._faults.step("observe"):
            lag = STALE_S * 0.99 * self._faults.lateness()
            return replace(self.machine.shown_at(self._clock() - lag), at=self._clock())

    async def perform(self, training: Training, followup: Followup) -> None:
        with self._faults.step("perform"):
            match followup:
                case Open():
                    self.machine.open(self._clock())
                case LetExitGo(rank=rank, attempt=attempt):
                    assert has_exit(self._stored(), rank, attempt), "let go of before it was stored"
                    self.machine.let_go(rank, attempt, self._clock())


def has_exit(status: Status, rank: int, attempt: int) -> bool:
    """Whether it knows the end of that attempt, or has known it and knows a later one."""
    known = {r.rank: r for r in (*status.ranks, *status.removed_ranks)}.get(rank)
    if known is None or known.attempt < attempt:
        return False
    return known.attempt > attempt or known.exit is not None


@dataclass
class Faults:
    """What goes wrong, by chance, until it is calm."""

    random: random.Random
    crash_chance: float = 0.0
    lost_chance: float = 0.0
    late_chance: float = 0.0
    is_calm: bool = False
    on_step: Callable[[str], None] = lambda name: None

    def lateness(self) -> float:
        is_late = not self.is_calm and self.random.random() < self.late_chance
        return self.random.random() if is_late else 0.0

    def step(self, name: str) -> Step:
        return Step(self, name)


class Step:
    """Crashes before the effect, after it, or not at all."""

    def __init__(self, faults: Faults, name: str) -> None:
        self._faults = faults
        self._name = name

    def __enter__(self) -> None:
        faults = self._faults
        faults.on_step(self._name)
        if faults.is_calm:
            return
        if faults.random.random() < faults.crash_chance / 2:
            raise Crash(f"before {self._name}")
        if faults.random.random() < faults.lost_chance:
            raise Temporary(f"{self._name} was not answered")

    def __exit__(self, kind: object, *_: object) -> None:
        faults = self._faults
        if kind is None and not faults.is_calm:
            if faults.random.random() < faults.crash_chance / 2:
                raise Crash(f"after {self._name}")
