"""Manifests that were folded: nothing is lost, and nobody who slept decides their rounds again."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import pytest
from obstore.store import MemoryStore
from tests.allreduce.world import FaultyStore, Killed, World, kill_at, run_threads, seed, stall

from atoll.core.errors import Gone
from atoll.diloco.allreduce import ObjectStoreAllReduce, catchup, keys, past, wire
from atoll.diloco.allreduce.keys import Keys
from atoll.diloco.allreduce.manifest import Manifest, Member
from atoll.diloco.allreduce.sweep import StoreSweep
from atoll.objectstore import ObjectStore

ONES = np.ones(4, np.float32)
KEYS = Keys("run")


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "BLOCK", 4)


def manifest(number: int, attempt: int = 0) -> Manifest:
    members = [Member(rank, f"up/{number}/{rank}", 1.0 + rank, [7] * 9) for rank in range(2)]
    return Manifest("run", number, attempt, b"layout", members, [0, 1], [], [2], "me", 0.5)


def write(blobs: ObjectStore, *manifests: Manifest) -> None:
    for each in manifests:
        key = KEYS.manifest(each.round, each.attempt)
        blobs.put(key, wire.seal(wire.MANIFEST, wire.fence(key), msgspec.json.encode(each)))


def filled(rounds: int) -> Any:
    store: Any = MemoryStore()
    blobs = ObjectStore(store, "memory")
    write(blobs, *(manifest(number) for number in range(rounds)), manifest(2, 1))
    return store


def is_reported(store: Any, first: int = 0) -> list[tuple[int, int, dict[int, float]]]:
    manifests = past.read_manifests(ObjectStore(store, "memory"), KEYS, first)
    return [(r.round, r.attempt, r.weights) for r in manifests]


def live(store: Any) -> list[str]:
    return [blob.key for blob in ObjectStore(store, "memory").list(KEYS.manifests())]


def test_folded_rosters_are_read_as_before_in_few_objects() -> None:
    store = filled(30)
    before, blobs = is_reported(store), ObjectStore(store, "memory")
    assert len(before) == 31
    while not past.fold(blobs, KEYS, 22):
        assert is_reported(store) == before
    assert is_reported(store) == before
    assert is_reported(store, 17) == before[18:]
    assert live(store) == [KEYS.manifest(number, 0) for number in range(20, 30)]
    assert len(blobs.list(KEYS.pasts())) == 5
    assert [r.attempt for r in past.read_round(blobs, KEYS, 2)] == [0, 1]
    assert past.read_round(blobs, KEYS, 2)[0].missing == [2]
    assert past.is_past(blobs, KEYS, 19)
    assert not past.is_past(blobs, KEYS, 20)


def test_what_a_later_version_adds_to_a_roster_is_kept_in_the_fold() -> None:
    store = filled(8)
    blobs, key = ObjectStore(store, "memory"), KEYS.manifest(1, 0)
    facts = msgspec.to_builtins(manifest(1)) | {"later": {"took": [1, 2]}}
    blobs.put(key, wire.seal(wire.MANIFEST, wire.fence(key), msgspec.json.encode(facts)))
    past.fold(blobs, KEYS, 8)
    block = blobs.get(KEYS.past(1))
    assert b'"took":[1,2]' in past.zlib.decompress(
        wire.unseal(wire.PAST, wire.fence(KEYS.past(1)), block)
    )


@pytest.mark.parametrize("is_after", [False, True])
def test_whoever_folds_may_be_killed_at_any_request(is_after: bool) -> None:
    for point in range(12):
        store = filled(9)
        before = is_reported(store)
        killed = FaultyStore(store, kill_at(point, is_after))
        try:
            past.fold(killed, KEYS, 8)
        except Killed:
            assert is_reported(store) == before
        blobs = ObjectStore(store, "memory")
        while not past.fold(blobs, KEYS, 8):
            pass
        assert is_reported(store) == before
        assert live(store) == [KEYS.manifest(8, 0)]


def test_many_may_fold_at_once() -> None:
    for number in range(10):
        store = filled(14)
        before = is_reported(store)

        def work(who: int, number: int = number, store: Any = store) -> None:
            fault = stall(random.Random(seed(number, who)), 0.3, 0.01)
            blobs = FaultyStore(store, fault)
            while not past.fold(blobs, KEYS, 12):
                pass

        run_threads(*(lambda who=who: work(who) for who in range(4)))
        assert is_reported(store) == before
        assert len(live(store)) == 2


def test_a_block_that_is_damaged_is_made_again_while_its_rosters_are_there() -> None:
    store = filled(9)
    before, blobs = is_reported(store), ObjectStore(store, "memory")
    blobs.put(KEYS.past(0), b"rubbish")
    assert not past.fold(blobs, KEYS, 8)
    assert is_reported(store) == before
    blobs.put(KEYS.past(0), b"rubbish")
    assert is_reported(store) == before[5:], "what is lost is left out"
    assert past.is_past(blobs, KEYS, 1), "and still not decided again"


def test_a_roster_that_cannot_be_read_stays_where_it_is() -> None:
    store = filled(9)
    blobs = ObjectStore(store, "memory")
    blobs.put(KEYS.manifest(1, 0), b"rubbish")
    assert not past.fold(blobs, KEYS, 8)
    assert len(live(store)) == 10


def replica(blobs: ObjectStore, rank: int = 0, size: int = 1, **more: Any) -> ObjectStoreAllReduce:
    options: dict[str, Any] = {"min_replicas": 1, "grace_s": 0.1, "keep_rounds": 1, "timeout_s": 60}
    return ObjectStoreAllReduce(blobs, rank, size, **{**options, **more})


def go_on(reduce: ObjectStoreAllReduce, rounds: int) -> None:
    for _ in range(rounds):
        reduce.allreduce([ONES])
        reduce._sweep.wait()


def test_a_long_run_keeps_few_objects_and_all_of_its_history() -> None:
    store: Any = MemoryStore()
    with replica(ObjectStore(store, "memory")) as reduce:
        go_on(reduce, 40)
    assert [number for number, _, _ in is_reported(store)] == list(range(40))
    assert len(live(store)) <= 2 * keys.BLOCK + 3
    # A run without a checkpoint cannot be joined, folded or not.
    with replica(ObjectStore(store, "memory")) as late, pytest.raises(Gone):
        late.join()


def test_rounds_that_a_joiner_needs_are_not_folded() -> None:
    store: Any = MemoryStore()
    with replica(ObjectStore(store, "memory")) as reduce:
        go_on(reduce, 3)
        reduce.save_checkpoint(b"after 3")
        go_on(reduce, 20)
        assert not reduce.blobs.list(KEYS.pasts())
        with replica(ObjectStore(store, "memory")) as late:
            state = late.join()
            assert (state.round, len(state.means)) == (23, 20)
        go_on(reduce, 1)
        reduce.save_checkpoint(b"after 24")
        reduce.save_checkpoint(b"after 23", 22)
        go_on(reduce, 4)
        assert past.is_past(reduce.blobs, KEYS, 15)
        with replica(ObjectStore(store, "memory")) as late:
            assert late.join().round == 28


class PausedStore(ObjectStore):
    """Sleeps before it creates a key that ends with `at`, until it is woken."""

    def __init__(self, store: Any, at: str) -> None:
        super().__init__(store, "paused")
        self.at = at
        self.sleeps, self.wakes = threading.Event(), threading.Event()

    def create(self, key: str, data: Any) -> bool:
        if key.endswith(self.at) and not self.sleeps.is_set():
            self.sleeps.set()
            assert self.wakes.wait(60)
        return super().create(key, data)


def asleep(blobs: PausedStore, job: Callable[[], Any]) -> Iterator[Any]:
    """Starts the job; yields when it sleeps, then what came of it."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(job)
        assert blobs.sleeps.wait(60)
        yield None
        blobs.wakes.set()
        yield answer.result(60)


def test_a_replica_that_slept_before_it_decided_a_round_does_not_decide_it_again() -> None:
    store: Any = MemoryStore()
    blobs = PausedStore(store, KEYS.manifest(0, 0))
    sleeper = replica(blobs, 0, 2, grace_s=0.01)

    def work() -> Any:
        sleeper.allreduce([7 * ONES])
        return sleeper.last_round

    with sleeper, replica(ObjectStore(store, "memory"), 1, 2, grace_s=0.05) as other:
        story = asleep(blobs, work)
        next(story)
        go_on(other, 20)
        assert past.is_past(other.blobs, KEYS, 0)
        assert KEYS.manifest(0, 0) not in live(store)
        before = is_reported(store)
        report = next(story)
        assert report.round == 20
        assert report.skipped == list(range(20))
        # What it wrote is no manifest of the run, and goes with the next fold.
        assert is_reported(store)[: len(before)] == before
        StoreSweep(other.blobs, KEYS, ThreadPoolExecutor(1), 1).run(20)
        assert KEYS.manifest(0, 0) not in live(store)


def test_a_replica_whose_round_is_past_when_it_looks_goes_on_where_the_run_is() -> None:
    store: Any = MemoryStore()
    with (
        replica(ObjectStore(store, "memory"), 0, 2) as slow,
        replica(ObjectStore(store, "m"), 1, 2) as other,
    ):
        run_threads(lambda: go_on(slow, 1), lambda: go_on(other, 1))
        go_on(other, 20)
        slow.allreduce([ONES])
        assert slow.last_round is not None
        assert slow.last_round.round == 21
        assert slow.last_round.skipped == list(range(1, 21))


def test_two_that_are_as_late_do_not_make_a_past_round_between_them() -> None:
    store: Any = MemoryStore()
    slow = [replica(ObjectStore(store, "memory"), rank, 3) for rank in range(2)]
    with slow[0], slow[1], replica(ObjectStore(store, "memory"), 2, 3) as other:
        run_threads(*(lambda r=r: go_on(r, 1) for r in (*slow, other)))
        go_on(other, 20)
        assert past.is_past(other.blobs, KEYS, 1)
        run_threads(*(lambda r=r: r.allreduce([ONES]) for r in slow))
        assert all(r.last_round is not None and r.last_round.round > 20 for r in slow)


def test_an_attempt_that_was_given_up_cannot_be_completed_after_its_round_was_swept() -> None:
    store: Any = MemoryStore()
    blobs = PausedStore(store, "never")
    sleeper = replica(blobs, 0, 2, grace_s=0.3)

    def work() -> Any:
        sleeper.allreduce([7 * ONES])
        return sleeper.last_round

    with sleeper, replica(ObjectStore(store, "memory"), 1, 2, grace_s=0.3) as other:
        both = (sleeper, other)
        while not all(r.last_round and len(r.last_round.members) == 2 for r in both):
            run_threads(*(lambda r=r: r.allreduce([ONES]) for r in both))
        number = sleeper.round
        assert number is not None
        blobs.at = KEYS.shard(number, 0, 0)
        story = asleep(blobs, work)  # the only member of its round
        next(story)
        go_on(other, 6)
        assert other.last_round is not None
        last = other.last_round.round
        assert other.last_round.members == {1: 1.0}
        assert not other.blobs.list(KEYS.sums(number + 1, 0)), "the rounds are swept"
        report = next(story)
        assert report.round == last + 1
        assert report.skipped == list(range(number, last + 1))


def test_a_joiner_that_slept_takes_no_round_for_void_because_it_was_folded() -> None:
    store: Any = MemoryStore()
    with replica(ObjectStore(store, "memory")) as reduce:
        go_on(reduce, 2)
        reduce.save_checkpoint(b"after 2")
        go_on(reduce, 1)
        joiner = replica(ObjectStore(store, "memory"))
        with joiner:
            matches = catchup.load(joiner.blobs, KEYS)
            assert matches is not None
            assert matches.round == 1
            go_on(reduce, 20)
            reduce.save_checkpoint(b"after 23")
            reduce.save_checkpoint(b"after 22", 21)
            go_on(reduce, 6)
            assert past.is_past(reduce.blobs, KEYS, 2)
            with pytest.raises(catchup.Outdated):
                list(joiner.read_since(matches.round + 1))
            assert KEYS.manifest(2, 0) not in live(store)
            assert joiner.join().round == 29


def test_a_joiner_that_sleeps_before_it_ends_a_round_takes_its_word_back() -> None:
    store: Any = MemoryStore()
    with replica(ObjectStore(store, "memory")) as reduce:
        go_on(reduce, 2)
        reduce.save_checkpoint(b"after 2")
        go_on(reduce, 1)
        write(reduce.blobs, manifest(4))  # nobody has decided round 3
        blobs = PausedStore(store, KEYS.manifest(3, 0))
        with replica(blobs) as joiner:
            read = lambda: list(joiner.read_since(3))  # noqa: E731
            story = asleep(blobs, lambda: pytest.raises(catchup.Outdated, read))
            next(story)
            reduce.go_on_at(3)
            reduce.blobs.delete([KEYS.manifest(4, 0)])
            go_on(reduce, 20)
            reduce.save_checkpoint(b"after 23")
            reduce.save_checkpoint(b"after 22", 21)
            go_on(reduce, 6)
            assert past.is_past(reduce.blobs, KEYS, 3)
            next(story)
            assert KEYS.manifest(3, 0) not in live(store)


def test_an_attempt_that_was_folded_is_known_to_have_been() -> None:
    store = filled(12)
    blobs = ObjectStore(store, "memory")
    with replica(blobs) as reduce:
        while not past.fold(blobs, KEYS, 8):
            pass
        assert catchup._was_decided(reduce.decider, 2, 1)
        assert not catchup._was_decided(reduce.decider, 3, 1)
        assert catchup._was_decided(reduce.decider, 9, 0)


def random_sleeps(number: int, rounds: int, size: int, chance: float, longest_s: float) -> int:
    """Replicas that sleep at any request, some for longer than it takes to fold their round."""
    world = World(size)

    def live_on(rank: int) -> None:
        fault = stall(random.Random(seed(number, rank)), chance, longest_s)
        more: dict[str, Any] = {"grace_s": 0.05, "keep_rounds": 1}
        world.take_part(rank, lambda done: done >= rounds, fault, **more)

    run_threads(*(lambda r=r: live_on(r) for r in range(size)))
    assert not world.errors
    for at, known in world.rounds.items():
        assert len({(s.mean, tuple(s.members.items())) for s in known}) == 1, (at, known)
        by_rank = [s.rank for s in known if s.is_member]
        assert len(by_rank) == len(set(by_rank))
    numbers = [number for number, _, _ in is_reported(world.store)]
    assert sorted(set(numbers)) == list(range(max(numbers) + 1)), "a round is missing"
    return len(ObjectStore(world.store, "memory").list(KEYS.pasts()))


def test_replicas_that_sleep_while_rounds_are_folded_stay_in_agreement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keys, "BLOCK", 2)
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(random_sleeps, i, 15, 3, 0.02, 0.6) for i in range(4)]
        assert sum(job.result() for job in jobs), "nothing was folded"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_hundreds_of_worlds_that_sleep_while_rounds_are_folded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(keys, "BLOCK", 2)
    with ThreadPoolExecutor(8) as pool:
        jobs = [pool.submit(random_sleeps, 100 + i, 40, 2 + i % 4, 0.02, 1.5) for i in range(300)]
        assert sum(job.result() for job in jobs) > 300
