"""A replica dies at every request of a round, and at random ones; the others never notice more
than a short wait, and agree bit for bit. Replicas are threads here, real processes elsewhere."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.allreduce.world import World, kill_at, run_threads, seed, stall

ROUNDS = 3
REQUESTS = 16  # what a rank of three makes in the first two rounds, about


def one_kill(victim: int, point: int, is_after: bool, size: int = 3) -> None:
    """The victim dies at that request and is started again at once under the same rank."""
    world = World(size)
    is_back = threading.Event()  # the survivors go on until the restarted one was in a round

    def survive(rank: int) -> None:
        world.take_part(rank, lambda number: number >= ROUNDS and is_back.is_set())

    def fall_and_rise() -> None:
        world.take_part(victim, lambda number: number >= ROUNDS, kill_at(point, is_after))
        with world.replica(victim) as again:
            late: list[int] = []
            for turn in range(100, 200):
                number = world.call(again, turn, late)
                if again.last_round is not None and again.last_round.is_member:
                    break
            else:
                raise AssertionError("the restarted rank was never let in")
            is_back.set()
            while number < ROUNDS + 1:
                turn += 1
                number = world.call(again, turn, late)

    survivors = [r for r in range(size) if r != victim]
    run_threads(fall_and_rise, *(lambda r=r: survive(r) for r in survivors))
    world.judge()


SCRIPTED = [
    (victim, point, is_after)
    for victim in range(3)
    for point in range(1, REQUESTS)
    for is_after in (False, True)
]


@pytest.mark.parametrize("batch", range(6))
def test_killed_at_every_request(batch: int) -> None:
    points = SCRIPTED[batch::6]
    with ThreadPoolExecutor(len(points)) as pool:
        for done in [pool.submit(one_kill, *point) for point in points]:
            done.result()


def random_kills(number: int, kills: int, size: int = 4, codec: str = "fp32") -> int:
    """Every rank dies at a random request again and again; then all do a few rounds in peace."""
    world = World(size, codec=codec)
    left = threading.Semaphore(kills)
    in_peace = threading.Barrier(size, timeout=90)
    died = []

    def live(rank: int) -> None:
        chance = random.Random(seed(number, rank))
        turn = 0
        while left.acquire(blocking=False):
            turn += 1000
            fault = kill_at(chance.randrange(1, 30), chance.random() < 0.5)
            world.take_part(rank, lambda _: False, fault, first_turn=turn)
            died.append(rank)
        in_peace.wait()
        world.take_part(rank, lambda _: len(world.rounds) > 3, first_turn=turn + 1000)

    run_threads(*(lambda r=r: live(r) for r in range(size)))
    world.judge()
    assert len(world.rounds) > 3
    return len(died)


@pytest.mark.parametrize("codec", ["fp32", "e3m0"])
@pytest.mark.parametrize("batch", range(2))
def test_killed_at_random_requests_again_and_again(batch: int, codec: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        worlds = [pool.submit(random_kills, 10 * batch + i, 15, codec=codec) for i in range(4)]
        assert sum(world.result() for world in worlds) == 60


def random_stalls(number: int, rounds: int, size: int = 3, codec: str = "fp32") -> None:
    """Replicas that sleep through the grace at any request: given up on, yet still there."""
    world = World(size, codec=codec)

    def live(rank: int) -> None:
        fault = stall(random.Random(seed(number, rank)), 0.08, 0.25)
        world.take_part(rank, lambda done: done >= rounds, fault, grace_s=0.05)

    run_threads(*(lambda r=r: live(r) for r in range(size)))
    world.judge()


def test_replicas_that_hang_for_longer_than_the_grace_stay_in_agreement() -> None:
    cases = [(world, codec) for world in range(8) for codec in ("fp32", "sparse")]
    with ThreadPoolExecutor(len(cases)) as pool:
        for done in [pool.submit(random_stalls, world, 25, codec=codec) for world, codec in cases]:
            done.result()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_thousands_of_kills(size: int) -> None:
    died = 0
    for number in range(10):
        with ThreadPoolExecutor(4) as pool:
            first = 1000 + 4 * number
            worlds = [pool.submit(random_kills, first + i, 30, size) for i in range(4)]
            died += sum(world.result() for world in worlds)
    assert died == 1200
