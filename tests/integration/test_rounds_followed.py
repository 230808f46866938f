"""Rounds that are followed while replicas die and join equal what the manifests hold in the end."""

from __future__ import annotations

import random
import threading

import pytest
from tests.allreduce.world import World, kill_at, run_threads, seed

from atoll.core.rounds import StoredRound, with_observed
from atoll.diloco.allreduce import keys
from atoll.diloco.allreduce.keys import Keys
from atoll.diloco.allreduce.manifest import Manifest
from atoll.diloco.allreduce.past import read_manifests
from atoll.objectstore import ObjectStore
from atoll.rounds.manifests import RunReader

SIZE = 3


def follow(rounds: int, number: int) -> None:
    """`rounds` rounds of three replicas, each killed at some request and started again."""
    world = World(SIZE)
    is_over = threading.Event()
    retained: dict[int, StoredRound] = {}

    def live(rank: int) -> None:
        chance, is_done = random.Random(seed(number, rank)), False

        def until(at: int) -> bool:
            nonlocal is_done
            is_done = at >= rounds
            return is_done

        while not is_done:
            fault = kill_at(chance.randrange(20, 400), chance.random() < 0.5)
            world.take_part(rank, until, fault, keep_rounds=4)

    def check(reader: RunReader) -> None:
        is_all = False
        while not is_all:
            matches = reader.observe()
            for facts in matches.rounds:
                retained[facts.round] = with_observed(
                    retained.get(facts.round, StoredRound()), facts
                )
            is_all = matches.is_all

    def watch() -> None:
        chance = random.Random(number)
        reader = RunReader(ObjectStore(world.store, "reader"), "run")
        while not is_over.wait(chance.random() / 5):
            check(reader)
            if chance.random() < 0.1:  # the control plane is killed
                reader = RunReader(ObjectStore(world.store, "reader"), "run", reader.following)
        check(reader)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        run_threads(*(lambda rank=rank: live(rank) for rank in range(SIZE)))
    finally:
        is_over.set()
        watching.join()
    truth = {
        each.round: each for each in read_manifests(ObjectStore(world.store, "judge"), Keys("run"))
    }
    assert len(truth) > rounds
    assert sorted(retained) == sorted(truth)
    for at, manifest in truth.items():
        assert shown(retained[at]) == stored(manifest)


def shown(retained: StoredRound) -> tuple[object, ...]:
    facts = retained.facts
    assert facts is not None
    weights = dict(zip(facts.members, facts.weights, strict=True))
    return facts.attempt, weights, facts.missing


def stored(manifest: Manifest) -> tuple[object, ...]:
    return manifest.attempt, manifest.weights, sorted(manifest.missing)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "BLOCK", 8)


def test_rounds_are_followed_through_kills() -> None:
    follow(30, 1)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", range(10))
def test_a_thousand_rounds_are_followed_through_kills(number: int) -> None:
    follow(100, number)
