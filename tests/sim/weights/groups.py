"""Trainers of several processes, each a coroutine with memory of its own, and their collectives.

A process that dies fails the next collective of the others, which end: that is what gloo does. What
goes through a collective is pickled. All processes of a group publish the same steps.
"""

from __future__ import annotations

import pickle
import random
import zlib
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from atoll.objectstore.effects import StoreError
from atoll.weights.group import Gather, GroupMachine
from atoll.weights.machine import DEAD_LEASE_S, Superseded
from atoll.weights.records import VersionRecord, read_record
from tests.sim.weights import schedule
from tests.sim.weights.world import (
    Actor,
    Setup,
    ShareDelta,
    Sim,
    SimCopy,
    Values,
    Violation,
    change,
    check_superseded,
    load,
    state_of,
)

STEPS = 600


class ProcessEnded(RuntimeError):
    """Another process of the group is no more."""


@dataclass
class OwnSource:
    """The tensors of one process."""

    values: Values
    sim: Sim

    def copy(self) -> SimCopy:
        return SimCopy(dict(self.values), self.sim)

    def delta(self, base: SimCopy) -> ShareDelta:
        removed = [name for name in base.values if name not in self.values]
        return ShareDelta(base, self.copy(), removed)


@dataclass
class TrainerGroup:
    """`steps`: values; `ends`: what each process had after a step, and its base then."""

    sim: Sim
    size: int
    steps: list[Values] = field(default_factory=list)
    ends: dict[int, dict[int, tuple[Any, Values | None]]] = field(default_factory=dict)
    actors: list[Actor] = field(default_factory=list)

    def values(self, step: int) -> Values:
        while len(self.steps) <= step:
            values = dict(self.steps[-1])
            change(self.sim.rng, values)
            self.steps.append(values)
        return self.steps[step]

    def share(self, step: int, rank: int) -> Values:
        """What this process has to publish; (g) knows the states of all shares and versions."""
        values = self.values(step)
        self.sim.states[state_of(values)] = values
        own = {n: v for n, v in values.items() if zlib.crc32(n.encode()) % self.size == rank}
        self.sim.states[state_of(own)] = own
        return own

    def meet(self) -> None:
        """All processes are at a collective, or one of them will never come."""
        waiting = [actor for actor in self.actors if isinstance(actor.effect, Gather)]
        if any(actor.is_done for actor in self.actors):
            for actor in waiting:
                self.sim.resume(actor, None, ProcessEnded())
        elif len(waiting) == self.size:
            brought = pickle.dumps([actor.effect.value for actor in self.actors])
            for actor in waiting:
                self.sim.resume(actor, pickle.loads(brought))

    def end_step(self, step: int, rank: int, outcome: Any, base: SimCopy | None) -> None:
        """(m) A step ends alike in all processes, and their bases are one version."""
        ends = self.ends.setdefault(step, {})
        ends[rank] = (outcome, None if base is None else dict(base.values))
        if len(ends) < self.size:
            return
        if len({repr(each) for each, _ in ends.values()}) > 1:
            raise Violation(f"(m) step {step} ends as {[each for each, _ in ends.values()]}")
        bases = [each for _, each in ends.values()]
        complete = {name: value for each in bases for name, value in (each or {}).items()}
        versions = [read_record(body, n) for n, body in self.sim.committed.items()]
        states = {each.state for each in versions if isinstance(each, VersionRecord)}
        is_none = all(each is None for each in bases)
        if not is_none and (None in bases or state_of(complete) not in states):
            raise Violation(f"(m) after step {step} the bases are not those of one version")


def new_group(sim: Sim, size: int) -> TrainerGroup:
    group = TrainerGroup(sim, size)
    group.steps.append({f"w{n}": sim.rng.randrange(1000) for n in range(7)})
    sim.number += 1
    for _ in range(size):
        actor = Actor(f"{sim.number:08x}", is_trainer=True)
        actor.meet = group.meet
        group.actors.append(actor)
    for rank, actor in enumerate(group.actors):
        sim.start(actor, run_process(sim, actor, group, rank))
    return group


def combine(rows: Any) -> str:
    return state_of(dict(rows))


def run_process(
    sim: Sim, actor: Actor, group: TrainerGroup, rank: int
) -> Generator[Any, Any, None]:
    setup = sim.setup
    leader = None
    if rank == 0:
        skew = sim.rng.choice((0.0, -4000.0, 4000.0))
        leader = setup.publisher(
            actor.name, load(sim), lambda: sim.now + skew, setup.full_every, setup.keep
        )
    machine = actor.machine = setup.group(rank, leader, combine)
    step = 0
    try:
        yield from machine.open(lambda: None)
        actor.is_open = True
        while True:
            source = OwnSource(group.share(step, rank), sim)
            outcome: Any = "no answer"
            sim.counts["publishes"] += 1
            try:
                record = yield from machine.publish(source, step, lambda: None)
            except StoreError:
                pass
            else:
                outcome = record.number
                if rank == 0:
                    check_answer(sim, record, group.values(step))
            group.end_step(step, rank, outcome, machine.base)
            step += 1
    except (StoreError, ProcessEnded):
        return
    except Superseded:
        if leader is not None:
            check_superseded(sim, leader)


def check_answer(sim: Sim, record: VersionRecord, values: Values) -> None:
    sim.counts["answered"] += 1
    body = sim.committed.get(record.number)
    if body is None or read_record(body, record.number) != record:
        raise Violation(f"(e) version {record.number} was returned, and is not there")
    if record.state != state_of(values):
        raise Violation(f"(e) version {record.number} is not what was published")


def run_group_schedule(seed: int, **changes: Any) -> Counter[str]:
    rng = random.Random(seed)
    settings: dict[str, Any] = {
        "full_every": rng.randint(1, 8),
        "keep": rng.randint(0, 5),
        "failing": rng.choice((0.0, 0.02, 0.1, 0.2)),
        "damage": rng.choice((0.0, 0.0, 0.0, 0.02)),
    }
    setup = Setup(**(settings | changes))
    sim = Sim(rng, setup, has_damage=setup.damage > 0)
    try:
        _run_faults(sim)
        _run_quiet(sim)
    except Violation as error:
        raise Violation(f"schedule {seed} of groups: {error}") from error
    return sim.counts


def _run_faults(sim: Sim) -> None:
    rng = sim.rng
    kill, nap = rng.choice((0.0, 0.003, 0.01)), rng.choice((0.0, 0.01, 0.03))
    pace_s = rng.choice((0.5, 2.0, 8.0))
    for _ in range(STEPS):
        sim.advance(rng.expovariate(1 / pace_s))
        if not any(actor.is_trainer for actor in sim.actors) or rng.random() < 0.003:
            new_group(sim, rng.randint(1, 4))
        elif rng.random() < 0.001:
            sim.new_trainer()
        if sum(not actor.is_trainer for actor in sim.actors) < 2 and rng.random() < 0.1:
            sim.new_follower()
        schedule.take_step(sim, kill, nap)


def _run_quiet(sim: Sim) -> None:
    sim.is_quiet = True
    sim.advance(2100)
    for actor in [actor for actor in sim.actors if actor.is_trainer and not actor.is_open]:
        sim.kill(actor)  # it might claim after the last one
    group = new_group(sim, 3)
    for _ in range(3):
        versions = sim.setup.full_every + sim.setup.keep + 2
        schedule.publish_until(sim, group.actors, versions)
        schedule.catch_up(sim)
        sim.advance(DEAD_LEASE_S / 2)
    for actor in sim.actors:
        if actor.is_trainer and actor not in group.actors:
            raise Violation(f"(h) {actor.name} goes on beside {group.actors[0].name}")
    schedule.check_left(sim)


def run_group_schedules(first: int, count: int, **changes: Any) -> Counter[str]:
    total = Counter[str]()
    for seed in range(first, first + count):
        total += run_group_schedule(seed, **changes)
    return total


# -- Rules of a group, each broken once


class BaseMovesAlone(GroupMachine):
    """A process moves its base when its own share is there."""

    def _write(self, turn: Any, source: Any, own: Any) -> Any:
        move = yield from super()._write(turn, source, own)
        if self._rank:
            move()
            return lambda: None
        return move


class ErrorIgnored(GroupMachine):
    """The leader goes on without a process that has failed."""

    def _write(self, turn: Any, source: Any, own: Any) -> Any:
        try:
            return (yield from super()._write(turn, source, own))
        except StoreError:
            return lambda: None


class OutcomeNotBroadcast(GroupMachine):
    """The others take it that the create was made."""

    def _broadcast(self, work: Any) -> Any:
        try:
            return (yield from super()._broadcast(work))
        finally:
            if self._rank and self._move is not None:
                self._move()
                self._move = None


class LostPublishForgotten(GroupMachine):
    """A create without an answer counts as one that was not made, in the others."""

    def _broadcast(self, work: Any) -> Any:
        try:
            return (yield from super()._broadcast(work))
        except StoreError:
            self._move = self._move if self._rank == 0 else None
            raise


class RecordBeforeParts(GroupMachine):
    """A process puts its parts when the record is there."""

    def _write(self, turn: Any, source: Any, own: Any) -> Any:
        steps, self._puts = super()._write(turn, source, own), list[Any]()
        while True:
            try:
                self._puts.append(next(steps))
            except StopIteration as end:
                return end.value
        yield

    def _finish(self, record: Any) -> Any:
        yield from self._puts
        yield from super()._finish(record)


# With the seed of a schedule that catches it.
MUTANTS: dict[str, tuple[type[GroupMachine], int]] = {
    "one base moves alone": (BaseMovesAlone, 6),
    "the error of one process is ignored": (ErrorIgnored, 6),
    "the outcome is not broadcast": (OutcomeNotBroadcast, 6),
    "a lost publish is forgotten by the others": (LostPublishForgotten, 6),
    "record before the parts of all": (RecordBeforeParts, 0),
}
