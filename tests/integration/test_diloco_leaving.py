"""Replicas that are told to go: real processes and signals, and a training that is scaled down."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.test_diloco import net, train, world
from tests.support.forked import Forked

from atoll.diloco import DiLoCo, RoundReport
from atoll.diloco.data import ranges
from atoll.diloco.round import objects
from atoll.objectstore import ObjectStore

pytestmark = pytest.mark.timeout(240)
SCRIPT = Path(__file__).with_name("leaving_replica.py")


def start(
    uri: str, rank: int, rounds: int, step_s: float, how: str = "plain", **env: str
) -> Forked:
    config = {
        "ATOLL_RENDEZVOUS_URI": uri,
        "ATOLL_RANK": str(rank),
        "ATOLL_WORLD_MAX": "2",
        "ATOLL_WORLD_MIN": "1",
        "ATOLL_STARTED_TOGETHER": "2",
        "CODEC": "fp32",
        **env,
    }
    return Forked([str(SCRIPT), str(rounds), str(step_s), how], {**os.environ, **config})


def read_until(process: Forked, messages: str) -> list[str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if lines[-1].startswith(messages):
            return lines
    _, errors = process.communicate()
    raise AssertionError(f"{process.returncode}: {lines} {errors[-2000:]}")


@pytest.mark.parametrize(
    ("how", "code", "codec"), [("plain", 143, "fp32"), ("polite", 0, "int4")], ids=["143", "0"]
)
def test_a_replica_told_to_go_hands_in_its_steps_and_is_not_waited_for(
    tmp_path: Path, how: str, code: int, codec: str
) -> None:
    uri = tmp_path.as_uri()
    # The other one takes far longer for a round, so nobody is there when the first one goes.
    going = start(uri, 0, 50, 0.05, how, CODEC=codec)
    staying = start(uri, 1, 3, 0.1, CODEC=codec)
    try:
        read_until(going, "round 1")
        read_until(going, "step 13")
        going.send_signal(signal.SIGTERM)
        _, errors = going.communicate(timeout=100)
        assert going.returncode == code, errors
        assert "asked to leave by SIGTERM" in errors
        assert "not synchronised" not in errors
        assert "Traceback" not in errors
        out, errors = staying.communicate(timeout=100)
        assert staying.returncode == 0, errors
    finally:
        for process in (going, staying):
            process.close()
    manifests = [line.split()[2:] for line in out.splitlines() if line.startswith("round")]
    assert manifests == [["0", "1"], ["0", "1"], ["1"]]  # in the second by what it handed in
    for messages in ("continues without", "given up", "waiting for ranks"):
        assert messages not in errors
    marks = [info.key for info in ObjectStore.open(uri).list("run/upload/ended")]
    assert any(key.endswith("00000.left") for key in marks), marks


def test_a_replica_told_to_go_while_it_waits_for_the_others_leaves_at_once(tmp_path: Path) -> None:
    uri = tmp_path.as_uri()
    going = start(uri, 0, 50, 0.0)
    staying = start(uri, 1, 2, 0.25)
    try:
        read_until(staying, "round 1")
        read_until(going, "step 19")  # its twentieth step waits for the round
        read_until(staying, "step 13")
        going.send_signal(signal.SIGTERM)
        _, errors = going.communicate(timeout=100)
        assert going.returncode == 143, errors
        out, errors = staying.communicate(100)
        assert staying.returncode == 0, errors
    finally:
        for process in (going, staying):
            process.close()
    assert out.splitlines()[-2:] == ["round 2 0 1", "done 2"]
    assert "given up" not in errors


def test_a_notice_of_the_host_is_a_word_to_go(tmp_path: Path) -> None:
    notice = tmp_path / "notice"
    uri = (tmp_path / "store").as_uri()
    going = start(
        uri,
        0,
        500,
        0.05,
        "polite",
        ATOLL_SPOT_NOTICE=str(notice),
        ATOLL_WORLD_MAX="1",
        ATOLL_STARTED_TOGETHER="1",
    )
    try:
        read_until(going, "step 3")
        notice.touch()
        out, errors = going.communicate(100)
    finally:
        going.close()
    assert going.returncode == 0, errors
    assert out.splitlines()[-1] == "bye"


@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_what_is_drained_while_a_program_waits_in_sync_is_drained_once(
    tmp_path: Path, codec: str
) -> None:
    model = torch.nn.Linear(40, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    store = ObjectStore.open(tmp_path.as_uri())

    def uploads() -> list[objects.UploadKey]:
        names = [objects.parse_upload(info.key[4:]) for info in store.list("run/upload")]
        return [name for name in names if name is not None]

    with DiLoCo(
        model,
        inner,
        sync_every=10,
        uri=tmp_path.as_uri(),
        rank=0,
        world_size=2,
        min_replicas=2,
        timeout=60,
        codec=codec,
    ) as diloco:
        model(torch.ones(1, 40)).sum().backward()
        inner.step()

        def ask() -> None:
            while not uploads():
                pass
            diloco.leave()

        teller = threading.Thread(target=ask)
        teller.start()
        diloco.sync()  # nobody else comes
        teller.join()
        assert diloco.leaving
        diloco.sync()
    (upload,) = uploads()
    assert (upload.round, upload.rank) == (0, 0)
    marks = [info.key for info in store.list("run/upload/ended")]
    assert marks == ["run/upload/ended/launch/00000.left"]


def test_a_replica_that_raises_is_not_waited_for(tmp_path: Path) -> None:
    def replica(rank: int) -> list[RoundReport]:
        model = net(0)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        # Who waits for a straggler waits longer than this test may take.
        with DiLoCo(
            model,
            inner,
            sync_every=5,
            uri=tmp_path.as_uri(),
            rank=rank,
            world_size=2,
            min_replicas=1,
            timeout=4000,
            grace_s=2000,
        ) as diloco:
            train(model, inner, rank, 7)
            if rank == 1:
                raise KeyError("at step 7")
            while diloco.round < 4:
                train(model, inner, rank, 1)
        return list(diloco.reports)

    reports: list[RoundReport] = []

    def one(rank: int) -> None:
        if rank == 0:
            reports.extend(replica(rank))
        else:
            with pytest.raises(KeyError):
                replica(rank)

    world(2, one)
    assert [each.members for each in reports] == [(0, 1), (0,), (0,), (0,)]


def test_a_failure_of_a_launch_before_does_not_leave_a_rank_behind(tmp_path: Path) -> None:
    store = ObjectStore.open(tmp_path.as_uri())
    store.put("run/upload/ended/launch/00001.failed", b"failed")
    # Before this launch by more than one tick of the clock that dates files.
    os.utime(tmp_path / "run/upload/ended/launch/00001.failed", (time.time() - 60,) * 2)

    def replica(rank: int) -> Any:
        model = net(0)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        if rank == 1:  # it comes when the other one has looked for it
            while not store.list("run/upload/00000000"):
                pass
            store.list("run/upload")
        with DiLoCo(
            model,
            inner,
            sync_every=5,
            uri=tmp_path.as_uri(),
            rank=rank,
            world_size=2,
            min_replicas=1,
            timeout=4000,
            grace_s=2000,
        ) as diloco:
            train(model, inner, rank, 5)
        return diloco.reports[0].members

    assert world(2, replica) == [(0, 1), (0, 1)]


@pytest.mark.parametrize("fragments", [1, 2])
def test_a_replica_that_ends_its_last_period_gives_back_its_data_and_is_not_waited_for(
    tmp_path: Path, fragments: int
) -> None:
    used: dict[int, int] = {}

    def replica(rank: int) -> Any:
        model = torch.nn.Linear(1, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        with DiLoCo(
            model,
            inner,
            sync_every=4,
            fragments=fragments,
            uri=tmp_path.as_uri(),
            rank=rank,
            world_size=2,
            min_replicas=1,
            timeout=4000,
            grace_s=2000,
        ) as diloco:
            data = diloco.data(100, batch=2)
            for number, indices in enumerate(data, start=1):
                model(torch.tensor([[float(at)] for at in indices]) / 100).sum().backward()
                inner.step()
                inner.zero_grad()
                if rank == 1 and number == 6:  # in the middle of a period
                    diloco.end_period(is_last=True)
                    assert diloco.leaving
                    break
            report = diloco.data_report()
        used[rank] = report.used
        return [(use.rank, use.ranges) for use in report.rounds]

    uses, _ = world(2, replica)
    assert used[0] == 100
    positions = [at for _, part in uses for at in ranges.positions(part)]
    assert sorted(positions) == list(range(100))
    assert sum(len(ranges.positions(part)) for rank, part in uses if rank == 1) == 12
