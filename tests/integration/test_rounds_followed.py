"""Rounds that are followed while replicas die and join equal what the manifests hold in the end."""

from __future__ import annotations

import random
import threading
from functools import partial

import numpy as np
import pytest
from obstore.store import MemoryStore
from tests.support.stores import FaultyStore, run_threads

from atoll.core.rounds import StoredRound, with_observed
from atoll.diloco import allreduce
from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.diloco.history import read_manifests
from atoll.diloco.round.effects import RoundConfig
from atoll.diloco.round.objects import Manifest
from atoll.objectstore import ObjectStore
from atoll.rounds.manifests import RunReader

SIZE = 3


class Killed(BaseException):
    """What a thread gets instead of SIGKILL: it never makes another request."""


def kill_at(point: int, is_after: bool) -> FaultyStore:
    count = 0

    def fault(what: str, key: str, after: bool) -> None:
        nonlocal count
        count += after == is_after
        if count >= point:
            raise Killed

    store = FaultyStore(STORE, "memory")
    store.fault = fault
    return store


STORE = MemoryStore()


def follow(rounds: int, number: int) -> None:
    """`rounds` rounds of three replicas, each killed at some request and started again."""
    run = f"run-{number}"
    is_over = threading.Event()
    retained: dict[int, StoredRound] = {}

    def live(rank: int) -> None:
        chance, done = random.Random(100 * number + rank), 0
        while done < rounds:
            store = kill_at(chance.randrange(20, 400), chance.random() < 0.5)
            reduce = ObjectStoreAllReduce(
                store, rank, SIZE, min_replicas=1, grace_s=0.3, run_id=run, keep_rounds=4
            )
            try:
                while done < rounds:
                    reduce.allreduce([np.full(8, rank, np.float32)], weight=rank + 1.0)
                    assert reduce.last_round is not None
                    done = reduce.last_round.round
            except Killed:
                continue

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
        reader = RunReader(ObjectStore(STORE, "reader"), run)
        while not is_over.wait(chance.random() / 5):
            check(reader)
            if chance.random() < 0.1:  # the control plane is killed
                reader = RunReader(ObjectStore(STORE, "reader"), run, reader.following)
        check(reader)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        run_threads(*(partial(live, rank) for rank in range(SIZE)), timeout_s=500)
    finally:
        is_over.set()
        watching.join()
    truth = {each.round: each for each in read_manifests(ObjectStore(STORE, "judge"), run)}
    assert len(truth) > rounds
    assert sorted(retained) == sorted(truth)
    for at, manifest in truth.items():
        assert shown(retained[at]) == stored(manifest)


def shown(retained: StoredRound) -> tuple[object, ...]:
    facts = retained.facts
    assert facts is not None
    return facts.members, facts.weights, facts.missing


def stored(manifest: Manifest) -> tuple[object, ...]:
    members = manifest.members
    ranks, weights = [each.rank for each in members], [each.weight for each in members]
    return ranks, weights, sorted(manifest.missing)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allreduce, "RoundConfig", partial(RoundConfig, history_block=8))


@pytest.mark.timeout(300)
def test_rounds_are_followed_through_kills() -> None:
    follow(30, 1)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("number", range(2, 12))
def test_a_thousand_rounds_are_followed_through_kills(number: int) -> None:
    follow(100, number)
