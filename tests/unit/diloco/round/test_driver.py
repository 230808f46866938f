"""The machine over real threads and stores: replicas of one process and of several."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import BelowMinimumWorld, DistributedError, StoreDenied, Temporary
from atoll.diloco.codecs import get_codec
from atoll.diloco.packing import TensorSpec
from atoll.diloco.round import driver as drivers
from atoll.diloco.round.cells import Cut, RunLayout, Share
from atoll.diloco.round.driver import RoundDriver
from atoll.diloco.round.effects import DROPPED, LATE, LEFT, MEMBER, Offer, RoundConfig
from atoll.diloco.round.objects import ZERO
from atoll.diloco.round.pace import Pace
from atoll.diloco.round.reduce import Fragment, ReplicaValues
from atoll.objectstore import ObjectStore
from tests.unit.diloco.round.test_reduce import Sum

SIZE = 40_000


class ThreadGroup:
    """The processes of one replica, as threads."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._barrier = threading.Barrier(processes)
        self._words: list[Any] = [None] * processes

    def of(self, process: int) -> _ThreadProcess:
        return _ThreadProcess(self, process)

    def share(self, process: int, word: Any) -> list[Any]:
        self._words[process] = word
        self._barrier.wait(30)
        words = list(self._words)
        self._barrier.wait(30)
        return words


class _ThreadProcess:
    def __init__(self, group: ThreadGroup, process: int) -> None:
        self._group, self.process, self.processes = group, process, group.processes

    def broadcast_from_leader(self, word: Any) -> Any:
        return self._group.share(self.process, word)[0]

    def gather(self, reply: Any) -> list[Any]:
        return self._group.share(self.process, reply)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


class Fleet:
    """Replicas of several processes, all as threads of this process."""

    def __init__(
        self,
        store: ObjectStore,
        processes: list[int],
        codec: str,
        pool: Any,
        *,
        timeout_s: float = 30,
        **more: Any,
    ) -> None:
        codecs = (get_codec(codec),) * 2
        world = len(processes)
        cuts = [Cut.of(size, world, codecs) for size in (SIZE, SIZE // 3)]
        specs = tuple((TensorSpec("float32", (cut.size,)),) for cut in cuts)
        self.layout = RunLayout(specs, world, codec, codec, "sum")
        self.drivers: list[list[RoundDriver]] = []
        for rank, count in enumerate(processes):
            group, nonce = ThreadGroup(count), uuid.uuid4().hex[:16]
            replica = []
            for process in range(count):
                shares = [Share(cut, process, count) for cut in cuts]
                fragments = [Fragment(share, Sum(share.size)) for share in shares]
                values = ReplicaValues(store, "run/", rank, nonce, fragments, *codecs, pool)
                cells = tuple(cut.cells for cut in cuts)
                config = RoundConfig(
                    *(rank, world, nonce, self.layout.digest, world, cells),
                    **{"processes": count, "quorum": world, "timeout_s": timeout_s, **more},
                )
                pace = Pace(30, is_folder=True)
                member = group.of(process) if count > 1 else None
                replica.append(RoundDriver(values, self.layout, config, pace, group=member))
            self.drivers.append(replica)

    def each(self, work: Callable[[RoundDriver], Any]) -> list[list[Any]]:
        """What the work gives in every process, all at once; an error in its place."""
        with ThreadPoolExecutor(16) as pool:
            jobs = [[pool.submit(work, each) for each in replica] for replica in self.drivers]
            return [[job.exception() or job.result() for job in replica] for replica in jobs]

    def values(self, rank: int, fragment: int) -> np.ndarray:
        parts = [
            each.values.fragments[fragment].outer.rows["values"] for each in self.drivers[rank]
        ]
        return np.concatenate(parts)


def brought(rank: int, round: int, size: int) -> np.ndarray:
    return np.random.default_rng([rank, round]).standard_normal(size).astype(np.float32)


def do_round(driver: RoundDriver) -> Any:
    driver.prepare()
    fragment = driver.values.fragment(driver.round)
    share = fragment.share
    row = brought(driver.config.rank, driver.round, share.cut.size)
    fragment.add(0, row[share.start : share.stop])
    return driver.run(Offer(1.0, 1))


@pytest.mark.parametrize("processes", [[1, 1], [1, 1, 1], [2, 1, 3]])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_replicas_end_rounds_with_the_same_bits(
    pool: ThreadPoolExecutor, processes: list[int], codec: str
) -> None:
    fleet = Fleet(ObjectStore.open(f"memory:///{uuid.uuid4()}"), processes, codec, pool)
    fleet.each(RoundDriver.open)
    chains = set()
    for _ in range(6):
        results = fleet.each(do_round)
        assert {result.fate for replica in results for result in replica} == {MEMBER}
        chains |= {result.chain for replica in results for result in replica}
    assert len(chains) == 6
    for fragment in range(2):
        size = fleet.values(0, fragment).size
        for rank in range(1, len(processes)):
            assert np.array_equal(fleet.values(rank, fragment), fleet.values(0, fragment))
        if codec == "fp32":
            total = np.zeros(size, np.float32)
            for round in range(fragment, 6, 2):
                rows = [brought(rank, round, size) for rank in range(len(processes))]
                total += (sum(row.astype(np.float64) for row in rows) / len(rows)).astype("f4")
            assert np.array_equal(fleet.values(0, fragment), total)


def test_a_restarted_replica_of_another_size_goes_on_from_the_store(
    pool: ThreadPoolExecutor,
) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    fleet = Fleet(store, [2, 1, 1], "fp32", pool)
    fleet.each(RoundDriver.open)
    for _ in range(7):
        fleet.each(do_round)
    again = Fleet(store, [3, 1, 2], "fp32", pool)
    again.each(RoundDriver.open)
    assert {driver.round for replica in again.drivers for driver in replica} == {7}
    for fragment in range(2):
        assert np.array_equal(again.values(0, fragment), fleet.values(1, fragment))
    results = again.each(do_round)
    assert {result.fate for replica in results for result in replica} == {MEMBER}
    assert np.array_equal(again.values(0, 1), again.values(2, 1))


@pytest.mark.parametrize("processes", [[1, 2], [1, 1, 2], [3], [1] * 5])
@pytest.mark.parametrize("codecs", [("fp32", "fp32"), ("int8", "bf16"), ("sparse", "fp32")])
def test_a_run_goes_on_in_another_world_with_rounds_that_no_checkpoint_covers(
    pool: ThreadPoolExecutor, processes: list[int], codecs: tuple[str, str]
) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    fleet = Fleet(store, [2, 1, 1, 3], codecs[0], pool, checkpoint_every=50)
    fleet.each(RoundDriver.open)
    for _ in range(5):
        fleet.each(do_round)
    # The means of the last round were not made when all were killed.
    doomed = [key for key in keys(store) if key.startswith("run/mean/00000004")]
    assert doomed
    store.delete(doomed)
    again = Fleet(store, processes, codecs[1], pool)
    again.each(RoundDriver.open)
    assert {driver.round for replica in again.drivers for driver in replica} == {5}
    assert {driver.state.chain for replica in again.drivers for driver in replica} != {ZERO}
    for fragment in range(2):
        for rank in range(len(processes)):
            assert np.array_equal(again.values(rank, fragment), fleet.values(0, fragment))
    results = again.each(do_round)
    assert {result.fate for replica in results for result in replica} == {MEMBER}


def test_two_that_read_each_other_are_caught_up_with_by_a_larger_world(
    pool: ThreadPoolExecutor,
) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    fleet = Fleet(store, [1, 2], "fp32", pool, checkpoint_every=50)
    fleet.each(RoundDriver.open)
    for _ in range(3):
        fleet.each(do_round)
    assert not any("mean/" in key for key in keys(store))
    again = Fleet(store, [1, 3, 1], "int8", pool)
    again.each(RoundDriver.open)
    for fragment in range(2):
        for rank in range(3):
            assert np.array_equal(again.values(rank, fragment), fleet.values(0, fragment))


def keys(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list("run")]


def test_one_that_leaves_hands_in_all_fragments_and_the_next_rounds_have_them(
    pool: ThreadPoolExecutor,
) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    fleet = Fleet(store, [1, 2, 1], "fp32", pool, quorum=2)
    fleet.each(RoundDriver.open)
    fleet.each(do_round)
    fleet.each(do_round)
    before = [fleet.values(0, fragment).copy() for fragment in range(2)]

    def act(driver: RoundDriver) -> Any:
        if driver.config.rank != 1:
            return do_round(driver)
        for at, fragment in enumerate(driver.values.fragments):
            row = brought(1, 2 + at, fragment.share.cut.size)
            fragment.add(0, row[fragment.share.start : fragment.share.stop])
        return driver.drain(Offer(1.0, 1), (1.0, 1.0))

    results = fleet.each(act)
    assert [replica[0].fate for replica in results] == [MEMBER, LEFT, MEMBER]
    del fleet.drivers[1]
    fleet.each(do_round)
    for fragment in range(2):
        rows = [brought(rank, 2 + fragment, before[fragment].size) for rank in range(3)]
        mean = (sum(row.astype(np.float64) for row in rows) / 3).astype("f4")
        for rank in range(2):
            assert np.array_equal(fleet.values(rank, fragment), before[fragment] + mean)


def test_what_one_drained_counts_in_another_world_with_another_codec(
    pool: ThreadPoolExecutor,
) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    fleet = Fleet(store, [1, 2, 1], "fp32", pool, quorum=2, checkpoint_every=1)
    fleet.each(RoundDriver.open)

    def act(driver: RoundDriver) -> Any:
        if driver.config.rank != 1:
            return do_round(driver)
        for fragment in driver.values.fragments:
            fragment.add(0, brought(1, 9, fragment.share.cut.size)[share_of(fragment)])
        return driver.drain(Offer(1.0, 1), (1.0, 1.0))

    results = fleet.each(act)
    assert [replica[0].fate for replica in results] == [MEMBER, LEFT, MEMBER]
    before = fleet.values(0, 1).copy()
    again = Fleet(store, [1, 2], "int8", pool)
    again.each(RoundDriver.open)
    # Values of two cuts are in no mean together: its row is the round, and theirs are late.
    assert {each.fate for replica in again.each(do_round) for each in replica} == {LATE}
    for rank in range(2):
        assert np.array_equal(again.values(rank, 1), before + brought(1, 9, before.size))
    for _ in range(2):
        assert {each.fate for replica in again.each(do_round) for each in replica} == {MEMBER}


@pytest.mark.parametrize(("world", "folder"), [(2, "receipt"), (2, "upload"), (3, "mean")])
def test_what_a_round_was_decided_with_is_named_when_it_is_missing_and_not_made_again(
    pool: ThreadPoolExecutor, world: int, folder: str
) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    fleet = Fleet(store, [1] * world, "fp32", pool, checkpoint_every=50)
    fleet.each(RoundDriver.open)
    for _ in range(3):
        fleet.each(do_round)
    prefix = f"run/{folder}/00000001"
    doomed = [key for key in keys(store) if key.startswith(prefix)]
    assert doomed
    store.delete(doomed)
    again = Fleet(store, [1] * world, "fp32", pool, timeout_s=0.5)
    for replica in again.each(RoundDriver.open):
        assert isinstance(replica[0], DistributedError)
        assert f"{folder}/00000001" in str(replica[0])
    assert not [key for key in keys(store) if key.startswith(prefix)]


def share_of(fragment: Fragment) -> slice:
    return slice(fragment.share.start, fragment.share.stop)


def test_what_all_drained_is_in_the_run_when_it_goes_on(pool: ThreadPoolExecutor) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    fleet = Fleet(store, [1, 1, 1], "fp32", pool)
    fleet.each(RoundDriver.open)

    def drain(driver: RoundDriver) -> Any:
        for fragment in driver.values.fragments:
            fragment.add(0, np.full(fragment.share.size, driver.config.rank, np.float32))
        return driver.drain(Offer(1.0, 1), (1.0, 1.0))

    assert {each.fate for replica in fleet.each(drain) for each in replica} == {LEFT}
    again = Fleet(store, [1, 1, 1], "fp32", pool)
    again.each(RoundDriver.open)
    assert {replica[0].round for replica in again.drivers} == {2}
    for rank in range(3):
        assert (again.values(rank, 0) == 1).all()
        assert (again.values(rank, 1) == 1).all()


def test_replicas_with_other_settings_name_them_at_once(pool: ThreadPoolExecutor) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    fleet, other = (Fleet(store, [1, 1], codec, pool) for codec in ("fp32", "int8"))
    fleet.drivers[1] = other.drivers[1]
    fleet.each(RoundDriver.open)
    sums = ({"codec": "fp32"}, {"codec": "int8"})
    results = fleet.each(lambda driver: driver.run(Offer(1.0, 1, sums=sums[driver.config.rank])))
    texts = [str(replica[0]) for replica in results]
    assert "codec is 'int8' there and 'fp32' here" in texts[0]
    assert "codec is 'fp32' there and 'int8' here" in texts[1]


def test_a_run_goes_on_with_other_settings_beside_uploads_of_its_earlier_life(
    pool: ThreadPoolExecutor,
) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    fleet = Fleet(store, [1, 1], "fp32", pool, timeout_s=0.2)
    fleet.each(RoundDriver.open)
    for rank, replica in enumerate(fleet.drivers):  # each uploads, and dies alone
        store.delete([key for key in keys(store) if "upload/" in key and rank == 1])
        with pytest.raises(BelowMinimumWorld, match="1 of at least 2 ranks"):
            replica[0].run(Offer(1.0, 1, sums={"codec": "fp32"}))
    assert any("upload/00000000/00001" in key for key in keys(store))
    again = Fleet(store, [1, 1], "int8", pool)
    again.each(RoundDriver.open)
    results = again.each(lambda driver: driver.run(Offer(1.0, 1, sums={"codec": "int8"})))
    assert [replica[0].fate for replica in results] == [MEMBER, MEMBER]


def test_one_that_is_dropped_by_prepare_has_taken_a_round_of_nothing(
    pool: ThreadPoolExecutor,
) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    fleet = Fleet(store, [1, 1, 1], "fp32", pool, quorum=2, checkpoint_every=1, keep=1)
    fleet.each(RoundDriver.open)
    fleet.each(do_round)
    slow = fleet.drivers.pop()[0]
    slow.machine._is_current = False  # as after a call that failed
    for replica in fleet.drivers:
        replica[0].machine.pace = Pace(30, grace_s=0.01, is_folder=True)
    for _ in range(4):
        fleet.each(do_round)
    slow.values.fragment(1).add(0, np.ones(SIZE // 3, np.float32))
    with ThreadPoolExecutor(1) as aside:
        prepared = aside.submit(slow.prepare)
        while not prepared.done():  # it needs others to take a round with
            fleet.each(do_round)
    assert prepared.result().fate == DROPPED
    assert slow.values.has_dropped
    assert slow.round > 5, "it took no round after the one that it joined at"


def test_an_error_of_one_process_is_raised_by_all_and_settled_by_the_next_call(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(ObjectStore.open(f"memory:///{uuid.uuid4()}"), [1, 3], "fp32", pool)
    fleet.each(RoundDriver.open)
    fleet.each(do_round)
    values = fleet.drivers[1][2].values
    apply = values.apply_means
    monkeypatch.setattr(values, "apply_direct", _fail_once(values.apply_direct))
    monkeypatch.setattr(values, "apply_means", _fail_once(apply))
    results = fleet.each(do_round)
    assert results[0][0].fate == MEMBER
    assert [str(each) for each in results[1]] == ["no answer"] * 3
    assert {type(each) for each in results[1]} == {Temporary}
    found = [each[0] for each in fleet.each(lambda driver: driver.prepare())]
    assert found[1].fate == MEMBER
    assert {each.round for each in fleet.drivers[1]} == {2}
    assert np.array_equal(fleet.values(0, 1), fleet.values(1, 1))


def _fail_once(work: Callable[..., Any]) -> Callable[..., Any]:
    fails = iter([True])

    def run(*args: Any, **options: Any) -> Any:
        if next(fails, False):
            raise Temporary("no answer")
        return work(*args, **options)

    return run


def test_a_wish_to_leave_of_any_process_ends_the_wait_of_all(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drivers, "EMPTY_WORD_S", 0.05)
    fleet = Fleet(ObjectStore.open(f"memory:///{uuid.uuid4()}"), [3, 1], "fp32", pool)
    fleet.each(RoundDriver.open)
    first = Fleet.__new__(Fleet)
    first.drivers = fleet.drivers[:1]  # the other replica does not come
    timer = threading.Timer(0.3, fleet.drivers[0][2].request_leave)
    timer.start()
    began = time.monotonic()
    (results,) = first.each(do_round)
    assert {result.fate for result in results} == {LEFT}
    assert time.monotonic() - began < 20


def test_what_the_store_refuses_is_raised_as_it_is(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ObjectStore.open(f"memory:///{uuid.uuid4()}")
    fleet = Fleet(store, [1], "fp32", pool)

    def refuse(*_: Any, **__: Any) -> bool:
        raise StoreDenied("no key")

    monkeypatch.setattr(store, "create", refuse)
    ((error,),) = fleet.each(RoundDriver.open)
    assert isinstance(error, StoreDenied)
