"""Rounds of replicas of several processes: the bits of one-process replicas, all in or all out."""

from __future__ import annotations

import random
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from obstore.store import MemoryStore
from tests.allreduce.teams import ThreadTeam, give, take, thread_team
from tests.allreduce.world import FaultyStore, Killed, kill_at, reduce_row, run_threads

from atoll.core.errors import ValidationError
from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.diloco.allreduce.share import Share
from atoll.objectstore import ObjectStore

SIZE = 200_003
ROUNDS = 3


def value(rank: int, turn: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng([rank, turn]).standard_normal(SIZE).astype("f4")


def run(shape: list[int], codec: str) -> list[bytes]:
    """The mean of each round, with replicas of so many processes."""
    store = MemoryStore()
    means = np.full((len(shape), ROUNDS, SIZE), np.nan, "f4")
    up: dict[tuple[int, int], int] = {}

    def go(rank: int, team: ThreadTeam) -> None:
        blobs = ObjectStore(store, "memory")
        with ObjectStoreAllReduce(
            blobs, rank, len(shape), codec=codec, grace_s=30, team=team
        ) as replica:
            layout = replica.describe([np.empty(SIZE, "f4")])
            for turn in range(ROUNDS):
                row = take(replica, layout, value(rank, turn))
                mean = reduce_row(replica, layout, row, rank + 1.0)
                give(replica, layout, mean, means[rank, turn])
                assert replica.last_round is not None
                assert replica.last_round.is_member
                up[rank, team.process] = replica.last_round.bytes_up

    teams = [(rank, team) for rank, count in enumerate(shape) for team in thread_team(count)]
    run_threads(*(lambda rank=rank, team=team: go(rank, team) for rank, team in teams))
    for rank, count in enumerate(shape):
        complete = sum(up[rank, process] for process in range(count))
        assert max(up[rank, process] for process in range(count)) < 1.5 * complete / count
        assert means[rank].tobytes() == means[0].tobytes()
    return [means[0, turn].tobytes() for turn in range(ROUNDS)]


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_replicas_of_one_two_and_four_processes_have_the_bits_of_single_ones(codec: str) -> None:
    assert run([1, 2, 4], codec) == run([1, 1, 1], codec)


def test_what_one_process_cannot_send_is_an_error_of_all_before_anything_is_uploaded() -> None:
    store, errors = MemoryStore(), []

    def go(team: ThreadTeam) -> None:
        with ObjectStoreAllReduce(
            ObjectStore(store, "m"), 0, 2, codec="int8", team=team
        ) as replica:
            layout = replica.describe([np.empty(SIZE, "f4")])
            row = take(replica, layout, value(0, 0))
            if team.process:
                row[7] = np.nan
            with pytest.raises(ValidationError, match=r"tensors\[0\]: nan") as caught:
                reduce_row(replica, layout, row)
            errors.append(caught.value)

    run_threads(*(lambda team=team: go(team) for team in thread_team(2)))
    assert len(errors) == 2
    assert not ObjectStore(store, "m").list("run/up")


def killed_run(seed: int, rounds: int) -> int:
    """Replicas of 1, 2 and 3 processes; the processes of all but the first die at random.

    Returns the number of kills. Every mean that a process has must be the one the others have.
    """
    chance = random.Random(seed)
    store = MemoryStore()
    known: dict[int, Any] = {}
    lock, kills, over = threading.Lock(), [0], threading.Event()

    def note(number: int, share: Share, row: Any) -> None:
        with lock:
            vector = known.setdefault(number, np.full(SIZE // 40, np.nan, "f4"))
            at = 0
            for start, stop in share.intervals:
                part = vector[start:stop]
                fresh = np.isnan(part)
                part[fresh] = row[at : at + stop - start][fresh]
                assert part.tobytes() == row[at : at + stop - start].tobytes(), number
                at += stop - start

    def go(rank: int, team: ThreadTeam, blobs: ObjectStore) -> None:
        try:
            replica = ObjectStoreAllReduce(
                blobs, rank, 3, grace_s=0.3, timeout_s=60, min_replicas=1, team=team
            )
            layout = replica.describe([np.empty(SIZE // 40, "f4")])
            while not over.is_set() or rank:
                turn = replica.round or 0
                row = take(replica, layout, value(rank, turn)[: SIZE // 40])
                mean = reduce_row(replica, layout, row)
                assert replica.last_round is not None
                note(replica.last_round.round, replica.share_of(layout), mean)
                if rank == 0 and replica.last_round.round >= rounds:
                    over.set()
                if over.is_set() and rank:
                    replica.close()
                    return
            replica.close()
        except (Killed, threading.BrokenBarrierError):
            team.die()

    def lives(rank: int, count: int) -> None:
        while not over.is_set():
            teams = thread_team(count)
            victim = chance.randrange(count)
            point = chance.randrange(4, 60)
            with lock:
                kills[0] += 1
            faults = [
                kill_at(point, bool(point % 2)) if p == victim else None for p in range(count)
            ]
            run_threads(
                *(
                    partial(go, rank, team, FaultyStore(store, fault))
                    for team, fault in zip(teams, faults, strict=True)
                )
            )

    run_threads(
        lambda: go(0, thread_team(1)[0], FaultyStore(store)),
        lambda: lives(1, 2),
        lambda: lives(2, 3),
    )
    return kills[0]


def test_a_process_that_dies_takes_its_replica_out_of_the_round_and_never_half_of_it() -> None:
    assert killed_run(1, 6) >= 2
