"""Schedules in which a rule matters that random ones hardly ever reach."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from atoll.objectstore.effects import Create, Delete, Get, List, Put
from atoll.weights.machine import LEASE_LIFE_S
from tests.sim.weights.world import Actor, Setup, Sim


def _run_until(sim: Sim, actor: Actor, is_at: Callable[[Any], bool], most: int = 400) -> None:
    """Let one actor alone make requests, until its next one is the one."""
    for _ in range(most):
        if actor.is_done or is_at(actor.effect):
            return
        sim.now += 0.1
        sim.step(actor)
    raise AssertionError(f"{actor.name} never comes there")


def _is_list(prefix: str) -> Callable[[Any], bool]:
    return lambda effect: effect == List(prefix)


def joiner_between_two_lists(**changes: Any) -> None:
    """Rule 14. A trainer lists for its gc; a joiner comes, then a successor makes a full copy.

    The trainer sees the successor's copy as the newest. Had it listed leases before, it would not
    know of the joiner, and delete the older copy that the joiner reads.
    """
    sim = Sim(random.Random(1), Setup(full_every=1, keep=0, **changes))
    sim.is_quiet = True
    trainer = sim.new_trainer()
    _run_until(sim, trainer, lambda _: sim.counts["answered"] == 2)
    assert len(sim.copies()) == 1
    # It publishes once more, and lists for gc until leases (or the log) have been listed.
    _run_until(sim, trainer, lambda effect: isinstance(effect, List))
    first = trainer.effect.prefix
    sim.step(trainer)
    joiner = sim.new_follower()
    _run_until(sim, joiner, lambda effect: isinstance(effect, Put) is False and effect is not None)
    if first == "lease/":
        sim.step(trainer)  # the log, as it is before the successor
    _run_until(sim, joiner, lambda effect: not isinstance(effect, Put | List))
    successor = sim.new_trainer()
    _run_until(sim, successor, lambda _: sim.counts["answered"] == 4)
    _run_until(sim, successor, lambda effect: isinstance(effect, Create))
    _run_until(sim, trainer, lambda effect: isinstance(effect, Delete | Create))
    _run_until(sim, trainer, lambda effect: isinstance(effect, Create))
    _run_until(sim, joiner, lambda _: sim.counts["moves"] > 0)


def claim_in_the_past(**changes: Any) -> None:
    """Rule 2. A trainer freezes before it claims; the number becomes a version and is deleted."""
    sim = Sim(random.Random(2), Setup(full_every=1, keep=0, **changes))
    sim.is_quiet = True
    trainer = sim.new_trainer()
    _run_until(sim, trainer, lambda _: sim.counts["answered"] == 1)
    late = sim.new_trainer()
    _run_until(sim, late, lambda effect: isinstance(effect, Create))
    number = late.effect.key
    _run_until(sim, trainer, lambda _: sim.counts["answered"] == 6)
    assert number not in sim.objects
    _run_until(sim, late, lambda _: sim.counts["answered"] == 8)
    _run_until(sim, trainer, lambda _: False)
    assert trainer.is_done


def gc_while_a_joiner_reads(**changes: Any) -> None:
    """Rule 13. The copy that a joiner has chosen is no longer the newest when it reads it."""
    sim = Sim(random.Random(3), Setup(full_every=1, keep=0, **changes))
    sim.is_quiet = True
    trainer = sim.new_trainer()
    _run_until(sim, trainer, lambda _: sim.counts["answered"] == 2)
    joiner = sim.new_follower()
    _run_until(sim, joiner, lambda effect: isinstance(effect, Get) and "full/" in effect.key)
    _run_until(sim, trainer, lambda _: sim.counts["answered"] == 5)
    _run_until(sim, joiner, lambda _: sim.counts["moves"] > 0, most=40)


def joiners_that_die(**changes: Any) -> None:
    """Rule 13. There is always one on its way in: old versions are deleted nevertheless."""
    sim = Sim(random.Random(6), Setup(full_every=1, keep=0, **changes))
    sim.is_quiet = True
    trainer = sim.new_trainer()
    for goal in range(2, 30):
        _run_until(sim, trainer, lambda _, goal=goal: sim.counts["answered"] == goal)
        joiner = sim.new_follower()
        _run_until(sim, joiner, lambda effect: isinstance(effect, Get) and "full/" in effect.key)
        sim.kill(joiner)
        sim.advance(LEASE_LIFE_S / 2)
        versions = sum(key.startswith("log/") for key in sim.objects)
        assert versions < 10, f"{versions} records stay for joiners that died"


def many_restarts(**changes: Any) -> None:
    """Trainers claim and die, before the last version and after it: nobody reads their claims."""
    sim = Sim(random.Random(4), Setup(full_every=4, keep=1, **changes))
    sim.is_quiet = True
    trainer = sim.new_trainer()
    _run_until(sim, trainer, lambda _: sim.counts["answered"] == 1)
    for count in (1, 2):
        for _ in range(100):
            late = sim.new_trainer()
            _run_until(sim, late, lambda effect: isinstance(effect, Create))
            sim.step(late)
            sim.kill(late)
        asked = sim.counts["requests"]
        successor = sim.new_trainer()
        goal = sim.counts["answered"] + 6  # one of them with a full copy and gc
        _run_until(sim, successor, lambda _, goal=goal: sim.counts["answered"] == goal)
        assert sim.counts["requests"] - asked < 70, f"{count}: it reads old claims"
        sim.kill(successor)
    asked = sim.counts["requests"]
    joiner = sim.new_follower()
    _run_until(sim, joiner, lambda _: sim.counts["moves"] > 0)
    assert sim.counts["requests"] - asked < 40, "a joiner reads old claims"
    assert joiner.machine.number == sim.newest_version()


def parts_of_a_fenced_trainer(**changes: Any) -> None:
    """Rule 17. The number that a trainer has put parts for becomes the claim of its successor."""
    sim = Sim(random.Random(5), Setup(full_every=1, keep=50, **changes))
    sim.is_quiet = True
    trainer = sim.new_trainer()
    _run_until(sim, trainer, lambda _: sim.counts["answered"] == 1)
    _run_until(sim, trainer, lambda effect: isinstance(effect, Create))
    sim.kill(trainer)
    parts = [key for key in sim.objects if key.startswith("delta/")]
    assert parts
    successor = sim.new_trainer()
    _run_until(sim, successor, lambda _: sim.counts["answered"] == 3)
    assert not any(key in sim.objects for key in parts), "parts of nothing stay until keep is over"


DIRECTED: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        joiner_between_two_lists,
        claim_in_the_past,
        gc_while_a_joiner_reads,
        joiners_that_die,
        many_restarts,
        parts_of_a_fenced_trainer,
    )
}
