"""Random lives of a channel: settings and faults are drawn from a seed, then it is quiet.

`run_schedule(seed)` raises Violation, with the seed in its text, or returns what happened.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from atoll.objectstore.effects import Create
from atoll.weights.machine import DEAD_LEASE_S
from atoll.weights.records import Claim, VersionRecord, log_number, read_try
from tests.sim.weights.world import Actor, Setup, Sim, Violation

STEPS = 500


def draw(seed: int, changes: dict[str, Any]) -> tuple[Sim, bool]:
    rng = random.Random(seed)
    is_fence = rng.random() < 0.3  # a trainer naps right before a create while another one comes
    settings: dict[str, Any] = {
        "full_every": 1 if is_fence else rng.randint(1, 8),
        "keep": 0 if is_fence else rng.randint(0, 5),
        "failing": rng.choice((0.0, 0.02, 0.1, 0.3)),
        "damage": rng.choice((0.0, 0.0, 0.01, 0.05)),
    }
    setup = Setup(**(settings | changes))
    return Sim(rng, setup, has_damage=setup.damage > 0), is_fence


def run_schedule(seed: int, **changes: Any) -> Counter[str]:
    sim, is_fence = draw(seed, changes)
    try:
        _run_faults(sim, is_fence)
        _run_quiet(sim)
    except Violation as error:
        raise Violation(f"schedule {seed}: {error}") from error
    return sim.counts


def _run_faults(sim: Sim, is_fence: bool) -> None:
    rng = sim.rng
    kill, nap = rng.choice((0.0, 0.01, 0.03)), rng.choice((0.0, 0.01, 0.03))
    pace_s = rng.choice((0.5, 2.0, 8.0))
    sim.new_trainer()
    for _ in range(STEPS):
        sim.advance(rng.expovariate(1 / pace_s))
        trainers = [actor for actor in sim.actors if actor.is_trainer]
        followers = [actor for actor in sim.actors if not actor.is_trainer]
        if not trainers or rng.random() < 0.01:
            sim.new_trainer()
        if len(followers) < 3 and rng.random() < 0.1:
            sim.new_follower()
        take_step(sim, kill, nap, is_fence=is_fence)


def take_step(sim: Sim, kill: float, nap: float, *, is_fence: bool = False) -> None:
    """Somebody who is awake makes a request, dies, or falls asleep."""
    rng = sim.rng
    awake = [actor for actor in sim.actors if actor.awake_at <= sim.now]
    if not awake:
        sim.advance(min(actor.awake_at for actor in sim.actors) - sim.now)
        return
    actor = rng.choice(awake)
    if rng.random() < kill:
        sim.kill(actor)
        return
    if rng.random() < nap:
        actor.awake_at = sim.now + rng.uniform(0, 2000)
        sim.counts["naps"] += 1
        return
    if is_fence and isinstance(actor.effect, Create) and rng.random() < 0.1:
        actor.awake_at = sim.now + rng.uniform(50, 2000)
        sim.new_trainer()
        return
    sim.step(actor)
    if rng.random() < sim.setup.damage:
        _damage(sim)


def _damage(sim: Sim) -> None:
    keys = [key for key in sim.objects if not key.startswith("lease/")]
    if not keys:
        return
    key = sim.rng.choice(keys)
    sim.counts["damage"] += 1
    if key.startswith("log/") or sim.rng.random() < 0.5:
        sim.objects[key].body = b"damage"
    else:
        del sim.objects[key]


def _run_quiet(sim: Sim) -> None:
    """(h) all reach the newest version; (i) what is left is bounded."""
    sim.is_quiet = True
    sim.advance(2100)
    for actor in [actor for actor in sim.actors if actor.is_trainer and not actor.is_open]:
        sim.kill(actor)  # it might claim after the last one
    setup = sim.setup
    trainer = sim.new_trainer()
    for _ in range(3):
        publish_until(sim, [trainer], setup.full_every + setup.keep + 2)
        catch_up(sim)
        sim.advance(DEAD_LEASE_S / 2)
    for actor in [actor for actor in sim.actors if actor.is_trainer and actor is not trainer]:
        raise Violation(f"(h) trainer {actor.name} goes on beside {trainer.name}")
    check_left(sim)


def _round(sim: Sim) -> None:
    for actor in list(sim.actors):
        if not actor.is_done:
            actor.awake_at = 0.0
            sim.advance(0.1)
            sim.step(actor)


def publish_until(sim: Sim, trainers: Sequence[Actor], count: int) -> None:
    """Until these have published so often."""
    goal = sim.counts["answered"] + count
    for _ in range(20_000):
        if any(each.is_done for each in trainers):
            raise Violation("(h) the last trainer was superseded")
        if sim.counts["answered"] >= goal:
            return
        _round(sim)
    raise Violation("(h) the last trainer does not publish")


def catch_up(sim: Sim) -> None:
    """Followers alone, until they stand on the newest version."""
    for _ in range(2_000):
        followers = [actor for actor in sim.actors if not actor.is_trainer]
        if all(actor.machine.number == sim.newest_version() for actor in followers):
            return
        for actor in followers:
            sim.advance(0.1)
            sim.step(actor)
    raise Violation("(h) a follower does not reach the newest version")


def check_left(sim: Sim) -> None:
    setup = sim.setup
    followers = sum(not actor.is_trainer for actor in sim.actors)
    damage = sim.counts["damage"]
    # Between two runs of gc there are full_every versions more; followers stood as far back.
    versions = 3 * (setup.full_every + 1) + setup.keep + 3 + damage
    records = [sim.records[n] for key in sim.objects if (n := log_number(key)) is not None]
    tries = {attempt.folder for key in sim.objects if (attempt := read_try(key))}
    counted = {
        "versions": (sum(isinstance(each, VersionRecord) for each in records), versions),
        "claims": (
            sum(isinstance(each, Claim) for each in records),
            sum(isinstance(each, Claim) for each in sim.records.values()),
        ),
        "tries": (len(tries), 2 * versions + 2 * damage),
        "leases": (sum(key.startswith("lease/") for key in sim.objects), 2 * followers + 1),
    }
    for what, (count, bound) in counted.items():
        if count > bound:
            raise Violation(f"(i) {count} {what} are left, at most {bound} expected")


def run_schedules(first: int, count: int, **changes: Any) -> Counter[str]:
    total = Counter[str]()
    for seed in range(first, first + count):
        total += run_schedule(seed, **changes)
    return total
