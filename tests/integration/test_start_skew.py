"""Replicas that were started together and come apart: none of them begins a run of its own."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from obstore.store import MemoryStore
from tests.allreduce.world import run_threads

from atoll import LocalProcessExecutor, ObjectStoreAllReduce
from atoll.core.errors import BelowMinimumWorld, ValidationError
from atoll.diloco.replica_config import find_min_replicas, read_start
from atoll.diloco.round import objects, pace, protocol
from atoll.objectstore import ObjectStore

GRACE_S = 0.15
WORLD = 4


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "FIRST_GRACE_S", GRACE_S)
    monkeypatch.setattr(protocol, "STAGGER_S", 0.02)


def launched(monkeypatch: pytest.MonkeyPatch, count: int = WORLD) -> None:
    """The variables of a launch of `count` replicas."""
    monkeypatch.setenv("ATOLL_STARTED_TOGETHER", str(count))
    monkeypatch.setenv("ATOLL_QUORUM", str(count // 2 + 1))
    monkeypatch.setenv("ATOLL_WORLD_MIN", "1")
    monkeypatch.setenv("ATOLL_UID", "abc")


class Run:
    """Replicas as threads; `manifests[rank]` is what each saw, in order."""

    def __init__(self, world: int = WORLD, timeout: float = 20) -> None:
        self.store, self.world, self.timeout = MemoryStore(), world, timeout
        self.manifests: dict[int, list[tuple[int, list[int]]]] = {}
        self.missing: set[int] = set()
        self.errors: dict[int, BaseException] = {}

    def open(self, rank: int, **options: float) -> ObjectStoreAllReduce:
        blobs = ObjectStore(self.store, "memory")
        return ObjectStoreAllReduce(
            blobs, rank, self.world, **({"timeout_s": self.timeout} | options)
        )  # type: ignore[arg-type]

    def replica(
        self, rank: int, late_s: float = 0.0, rounds: int = 2, **options: float
    ) -> Callable[[], None]:
        def run() -> None:
            threading.Event().wait(late_s)
            known = self.manifests.setdefault(rank, [])
            try:
                with self.open(rank, **options) as replica:
                    for _ in range(rounds):
                        replica.allreduce([np.full(8, rank, np.float32)])
                        report = replica.last_round
                        assert report is not None
                        known.append((report.round, sorted(report.members)))
                        self.missing |= set(report.missing)
            except BelowMinimumWorld as error:
                self.errors[rank] = error

        return run


@pytest.mark.parametrize("seed", range(5))
def test_replicas_that_start_apart_are_one_run(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch)
    chance, run = random.Random(seed), Run()
    late = [chance.uniform(0, GRACE_S / 2) for _ in range(WORLD)]
    for rank in chance.sample(range(WORLD), 1 + seed % 3):
        late[rank] = chance.uniform(1.7, 2) * GRACE_S  # later than any first grace
    run_threads(*(run.replica(rank, late_s) for rank, late_s in enumerate(late)))
    assert not run.errors
    assert [known[0] for known in run.manifests.values()] == [(0, [0, 1, 2, 3])] * WORLD


@pytest.mark.parametrize("seed", range(3))
def test_with_a_grace_of_the_caller_no_run_is_split_in_silence(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched(monkeypatch)
    chance, run = random.Random(seed), Run(timeout=2)
    late = [chance.uniform(0, 4 * GRACE_S) for _ in range(WORLD)]
    run_threads(*(run.replica(rank, late_s, grace_s=GRACE_S) for rank, late_s in enumerate(late)))
    key = objects.manifest_key(0)
    body = ObjectStore(run.store, "memory").get(f"abc/{key}")
    manifest = objects.read_manifest(key, bytes(body))
    members = {member.rank for member in manifest.members}
    assert len(members) > WORLD / 2
    assert {*members, *manifest.missing} == set(range(WORLD))


def test_it_says_whom_it_waits_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched(monkeypatch)
    monkeypatch.setattr(protocol, "WAITING_S", 0.0)
    run, message = Run(), "waiting for ranks 1, 3 of 4 before the first round"
    header = threading.Event()

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage() == message:
                header.set()

    ear = Ear()
    logging.getLogger("atoll.round").addHandler(ear)

    def come_then(rank: int) -> Callable[[], None]:
        def come() -> None:
            assert header.wait(30)
            run.replica(rank)()

        return come

    try:
        run_threads(run.replica(0), run.replica(2), come_then(1), come_then(3))
    finally:
        logging.getLogger("atoll.round").removeHandler(ear)
    assert run.manifests[0][0] == (0, [0, 1, 2, 3])
    # Each of the two has said it once, and not at every look.
    assert sum(message == record.getMessage() for record in caplog.records) <= 2


def test_after_the_timeout_more_than_half_go_on_and_say_who_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched(monkeypatch)
    run = Run(timeout=0.6)
    run_threads(*(run.replica(rank) for rank in (0, 1, 3)))
    assert not run.errors
    assert run.manifests[0][0] == (0, [0, 1, 3])
    assert run.missing == {2}
    assert "round 0 continues without ranks [2]" in caplog.text


def test_half_of_a_launch_never_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch)
    run = Run(timeout=0.4)
    run_threads(run.replica(0), run.replica(2))
    assert set(run.errors) == {0, 2}
    assert "2 of at least 3 ranks" in str(run.errors[0])
    assert "missing: ranks [1, 3]" in str(run.errors[0])


def test_one_of_two_goes_on_once_the_run_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 2)
    monkeypatch.setattr(pace, "MIN_GRACE_S", GRACE_S)
    run = Run(2)
    departed = run.open(1)
    run_threads(run.replica(0, rounds=3), lambda: departed.allreduce([np.full(8, 1, np.float32)]))
    assert [ranks for _, ranks in run.manifests[0]] == [[0, 1], [0], [0]]


@pytest.mark.parametrize("how", ["done", "failed"])
def test_a_rank_that_has_ended_is_not_waited_for(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch)
    run = Run(timeout=3600)
    ended = run.open(1)
    ended.leave(None if how == "done" else ValueError("of its own"))
    run_threads(*(run.replica(rank, rounds=1) for rank in (0, 2, 3)))
    assert run.manifests[0] == [(0, [0, 2, 3])]
    assert not run.missing


def test_a_rank_that_comes_back_is_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 3)
    run = Run(3)
    run.open(1).close()
    run.open(1)
    run_threads(*(run.replica(rank, GRACE_S if rank == 1 else 0) for rank in range(3)))
    assert run.manifests[0][0] == (0, [0, 1, 2])


def test_marks_of_another_launch_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(3)
    launched(monkeypatch, 3)
    monkeypatch.setenv("ATOLL_RUN_ID", "both")
    run.open(1).close()
    monkeypatch.setenv("ATOLL_UID", "def")
    run_threads(*(run.replica(rank, GRACE_S if rank == 1 else 0) for rank in range(3)))
    assert run.manifests[0][0] == (0, [0, 1, 2])


def test_the_last_ranks_of_a_run_finish_without_those_that_are_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched(monkeypatch)
    run = Run(timeout=60)
    run_threads(*(run.replica(rank, rounds=3 if rank == 2 else 1) for rank in range(WORLD)))
    assert run.manifests[2] == [(0, [0, 1, 2, 3]), (1, [2]), (2, [2])]
    assert not run.missing


def test_a_late_joiner_and_a_restarted_rank_wait_for_no_first_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launched(monkeypatch, 2)
    run = Run(3, timeout=60)
    run_threads(run.replica(0, rounds=1), run.replica(1, rounds=1))
    assert run.manifests[0] == [(0, [0, 1])], "rank 2 was not started with them"
    run_threads(run.replica(2, rounds=1))  # the others have long ended
    assert run.manifests[2] == [(1, [2])]
    run.manifests.clear()
    run_threads(run.replica(0, rounds=1))
    assert run.manifests[0] == [(2, [0])]


def test_a_training_that_began_with_fewer_waits_for_no_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATOLL_STARTED_TOGETHER", "2")
    monkeypatch.setenv("ATOLL_WORLD_MIN", "2")
    monkeypatch.setattr(pace, "FIRST_GRACE_S", 50)
    run = Run(8, timeout=100)
    run_threads(run.replica(0, rounds=1), run.replica(5, rounds=1))  # whichever found room
    assert run.manifests[0] == [(0, [0, 5])]
    assert not run.missing


def test_what_the_caller_says_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch)
    run = Run()
    run_threads(run.replica(0, min_replicas=1, grace_s=GRACE_S))
    assert [ranks for _, ranks in run.manifests[0]] == [[0], [0]]
    again = Run()
    run_threads(again.replica(0, min_replicas=1, rounds=1))
    assert again.manifests[0] == [(0, [0])]
    assert read_start(4, None, None).together == 4
    assert read_start(4, None, 1.0).together is None
    assert find_min_replicas(1, 4) == 1


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_STARTED_TOGETHER", "all")
    with pytest.raises(ValidationError, match="ATOLL_STARTED_TOGETHER"):
        Run().open(0)


SCRIPT = """
import os, time
import numpy as np
from atoll import ObjectStoreAllReduce
from atoll.diloco.round import pace
from atoll.agent.result import set_result
pace.FIRST_GRACE_S = 0.1
rank = int(os.environ["RANK"])
uri = os.environ["ATOLL_RENDEZVOUS_URI"]
if rank:
    time.sleep(0.5)
manifests = []
with ObjectStoreAllReduce(uri, rank, int(os.environ["WORLD_SIZE"])) as replica:
    for _ in range(2):
        replica.allreduce([np.ones(4, np.float32)])
        manifests.append(sorted(replica.last_round.members))
set_result(manifests)
"""


def test_a_launch_whose_replicas_start_apart_is_one_run(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with LocalProcessExecutor() as executor:
        args = {"rendezvous_uri": f"file://{tmp_path}/store"}
        handles = executor.launch_replicas(3, str(tmp_path / "train.py"), args, timeout=60)
        reports = executor.collect(handles)
    assert [report["exit_code"] for report in reports] == [0, 0, 0]
    assert [report["result"][0] for report in reports] == [[0, 1, 2]] * 3
