"""Replicas of DiLoCo runs that publish together, in the world of the other schedules.

A run is a list of rounds, each with its values and members; replicas do them one after the other,
each in its own time. Some fall behind, some die, new ones join at the newest round; another run, or
a trainer, takes the channel.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from atoll.objectstore.effects import StoreError
from atoll.weights.machine import DEAD_LEASE_S, Superseded
from atoll.weights.records import read_record
from atoll.weights.replicas import Round
from tests.sim.weights import schedule
from tests.sim.weights.world import (
    Actor,
    Setup,
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


@dataclass
class Run:
    """`rounds`: values and members. The first has no members, as nobody has met yet."""

    name: str
    sim: Sim
    patience_s: float = 40.0
    rounds: list[tuple[Values, tuple[str, ...]]] = field(default_factory=list)
    replicas: list[Actor] = field(default_factory=list)

    def add(self, values: Values, members: tuple[str, ...]) -> None:
        self.sim.rounds[self.name, len(self.rounds)] = values
        self.sim.states[state_of(values)] = values
        self.rounds.append((values, members))

    @property
    def alive(self) -> list[Actor]:
        return [actor for actor in self.replicas if not actor.is_done]

    def end_round(self) -> None:
        """The next round, with most of those that are there."""
        values = dict(self.rounds[-1][0])
        change(self.sim.rng, values)
        alive = self.alive
        some = [each.name for each in alive if self.sim.is_quiet or self.sim.rng.random() < 0.9]
        self.add(values, tuple(some or [alive[0].name]))


def new_run(sim: Sim, replicas: int) -> Run:
    sim.number += 1
    run = Run(f"{sim.number:016x}", sim, sim.rng.choice((15.0, 40.0, 200.0)))
    run.add({f"w{n}": sim.rng.randrange(1000) for n in range(7)}, ())
    for _ in range(replicas):
        new_replica(sim, run)
    return run


def new_replica(sim: Sim, run: Run) -> Actor:
    sim.number += 1
    actor = Actor(f"{sim.number:08x}", is_trainer=True)
    run.replicas.append(actor)
    return sim.start(actor, replicate(sim, actor, run))


def replicate(sim: Sim, actor: Actor, run: Run) -> Generator[Any, Any, None]:
    """A replica: from the newest round on, it publishes after each until it is superseded."""
    rng = sim.rng
    skew = rng.choice((0.0, 0.0, -4000.0, 4000.0))
    setup = sim.setup
    machine = actor.machine = setup.replica(
        actor.name, load(sim), lambda: sim.now + skew, setup.full_every, setup.keep
    )
    machine.run, machine.poll_s = run.name, 2.0
    number = len(run.rounds) - 1
    while True:
        values, members = run.rounds[number]
        what = Round(number, members, number, run.patience_s)
        sim.counts["publishes"] += 1
        try:
            record = yield from machine.publish_round(SimCopy(dict(values), sim), what)
        except StoreError:
            sim.check_values(machine.reader.record, machine.reader.copy, actor.name)
            if rng.random() < 0.5:
                continue  # it calls again, with the same round
            record = None
        except Superseded:
            check_superseded(sim, machine)
            return
        sim.check_values(machine.reader.record, machine.reader.copy, actor.name)
        actor.is_open = machine.is_joined
        if record is not None:
            sim.counts["answered"] += 1
            body = sim.committed.get(record.number)
            if body is None or read_record(body, record.number) != record:
                raise Violation(f"(e) version {record.number} was returned, and is not there")
            if (record.round, record.state) != (number, state_of(values)):
                raise Violation(f"(e) version {record.number} is not what was published")
        actor.awake_at = sim.now + rng.uniform(0, 10 if sim.is_quiet else 60)
        if number + 1 == len(run.rounds):
            run.end_round()
        behind = len(run.rounds) - 1 - number
        number += rng.randint(1, behind)


def run_replica_schedule(seed: int, **changes: Any) -> Counter[str]:
    rng = random.Random(seed)
    settings: dict[str, Any] = {
        "full_every": rng.randint(1, 8),
        "keep": rng.randint(0, 5),
        "failing": rng.choice((0.0, 0.02, 0.1, 0.3)),
        "damage": rng.choice((0.0, 0.0, 0.0, 0.02)),
    }
    setup = Setup(**(settings | changes))
    sim = Sim(rng, setup, has_damage=setup.damage > 0)
    try:
        _run_faults(sim)
        _run_quiet(sim)
    except Violation as error:
        raise Violation(f"schedule {seed} of replicas: {error}") from error
    return sim.counts


def _run_faults(sim: Sim) -> None:
    rng = sim.rng
    kill, nap = rng.choice((0.0, 0.01, 0.03)), rng.choice((0.0, 0.01, 0.03))
    pace_s, count = rng.choice((0.5, 2.0, 8.0)), rng.randint(1, 4)
    run = new_run(sim, count)
    for _ in range(STEPS):
        sim.advance(rng.expovariate(1 / pace_s))
        if rng.random() < 0.003:
            sim.counts["runs"] += 1
            run = new_run(sim, count)
        elif rng.random() < 0.002:
            sim.new_trainer()
        if len(run.alive) < count and rng.random() < 0.1 or not run.alive:
            new_replica(sim, run)
        if sum(not actor.is_trainer for actor in sim.actors) < 2 and rng.random() < 0.1:
            sim.new_follower()
        schedule.take_step(sim, kill, nap)


def _run_quiet(sim: Sim) -> None:
    sim.is_quiet = True
    sim.advance(2100)
    for actor in [actor for actor in sim.actors if actor.is_trainer and not actor.is_open]:
        sim.kill(actor)  # it might claim after the last one
    run = new_run(sim, 3)
    for _ in range(3):
        versions = sim.setup.full_every + sim.setup.keep + 2
        schedule.publish_until(sim, run.replicas, versions * len(run.replicas))
        schedule.catch_up(sim)
        sim.advance(DEAD_LEASE_S / 2)
    for actor in sim.actors:
        if actor.is_trainer and actor not in run.replicas:
            raise Violation(f"(h) {actor.name} goes on beside run {run.name}")
    schedule.check_left(sim)


def run_replica_schedules(first: int, count: int, **changes: Any) -> Counter[str]:
    total = Counter[str]()
    for seed in range(first, first + count):
        total += run_replica_schedule(seed, **changes)
    return total
