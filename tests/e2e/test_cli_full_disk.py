"""A disk that is full, or mounted read-only, when the control plane starts: it reads, refuses every
write in one line, leaves ranks alone, and goes on by itself."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.backends.local.spare import spare_directories
from atoll.core.errors import AtollError, Temporary
from atoll.core.spec import WorldSize
from atoll.sdk import embedded, flows
from atoll.sdk.client import Client
from atoll.sdk.training import DistributedTraining
from tests.e2e.conftest import Shell, is_alive, until
from tests.support.control_plane import journal_records
from tests.support.small_disk import fill, small_disk

FOREVER = ["sh", "-c", "echo up; while :; do sleep 0.05; done"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", "size=4m"):
        yield tmp_path / "disk"


@pytest.fixture
def state(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """With a training that is over, and one whose two ranks run."""
    for name in ("ATOLL_URL", "ATOLL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    where = disk / "state"
    monkeypatch.setenv("ATOLL_STATE_DIR", str(where))
    with Client() as client:
        command = ["sh", "-c", "echo words; exit 3"]
        over = client.deploy_distributed("over", command=command, world_size=1)
        with contextlib.suppress(AtollError):
            over.wait_until_complete()
        runs = client.deploy_distributed(
            "runs", command=FOREVER, world_size=WorldSize(min=1, target=2, max=3)
        )
        runs.wait_until_target_world()
        until(lambda: len(list(runs.logs())) == 2)
    yield where
    (disk / "filler").unlink(missing_ok=True)
    with Client() as client:
        client.list()  # there is a control plane
        until(lambda: is_whole(where))
        client.get("runs").delete()
    assert not announced_elsewhere(where)
    stop(where, signal.SIGTERM)


@contextlib.contextmanager
def mounted_read_only(path: Path) -> Iterator[None]:
    subprocess.run(["mount", "--bind", str(path), str(path)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def is_whole(where: Path) -> bool:
    try:
        with urllib.request.urlopen(f"{embedded.running(where)}/readyz") as answer:
            status = json.loads(answer.read())["status"]
    except OSError:  # a connection from before it went on
        return False
    assert status in ("ok", "read-only")
    return status == "ok"


def announced_elsewhere(where: Path) -> list[Path]:
    every = (directory / "endpoint.json" for directory in spare_directories(where))
    return [path for path in every if path.exists()]


def rank_pids(where: Path, uid: str) -> dict[int, int]:
    records = journal_records(where / "ranks" / uid / "journal")
    starts = [r for r in records if r["t"] == "start"]
    return {r["rank"]: r["pid"] for r in starts if is_alive(r["pid"])}


def stop(where: Path, number: int) -> None:
    pid = int(json.loads((where / "endpoint.json").read_bytes())["pid"])
    os.kill(pid, number)
    until(lambda: not is_alive(pid))


def check_reads(client: Client, where: Path, reason: str) -> None:
    assert {training.name: training.phase for training in client.list()} == {
        "over": "failed",
        "runs": "ready",
    }
    over, runs = client.get("over"), client.get("runs")
    assert [e.exit_code for e in over.rank_exits] == [3]
    assert [line.text for line in over.logs()] == ["words"]
    assert [line.text for line in runs.logs()] == ["up", "up"]
    assert over.events()
    assert not is_whole(where)
    assert reason in client.run(flows.executors()).message
    (endpoint,) = announced_elsewhere(where)
    assert reason in endpoint.with_name("server.log").read_text()


def check_no_write(client: Client, reason: str) -> None:
    runs = client.get("runs")
    for write in (
        lambda: runs.scale(3),
        runs.cancel,
        runs.delete,
        lambda: client.deploy_distributed("more", command=["true"], world_size=1),
    ):
        with pytest.raises(Temporary, match=reason):
            write()


def goes_on(client: Client, where: Path, before: dict[int, int]) -> None:
    until(lambda: is_whole(where))
    runs = client.get("runs")
    runs.scale(3)
    runs.wait_until_target_world()
    after = rank_pids(where, runs.uid)
    assert len(after) == 3
    assert {rank: after[rank] for rank in before} == before


def watched(training: DistributedTraining) -> tuple[threading.Thread, list[str]]:
    """Waits for its end, whatever the control plane does meanwhile."""
    phases: list[str] = []

    def wait() -> None:
        with contextlib.suppress(AtollError):
            training.wait_until_complete()
        phases.append(training.phase)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, phases


def test_full_disk_at_the_start(state: Path, disk: Path, tmp_path: Path) -> None:
    shell = Shell(state, tmp_path)
    with Client() as client:
        before = rank_pids(state, client.get("runs").uid)
    stop(state, signal.SIGKILL)
    fill(disk)
    files = {path: path.read_bytes() for path in state.glob("atoll.db*") if path.suffix != ".lock"}
    reason = f"cannot write to {state}: No space left on device: free some space"
    with Client() as client:
        check_reads(client, state, reason)
        check_no_write(client, reason)
        refused = shell("scale", "runs", "3")
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"atoll: error: {reason}")
        assert refused.stderr.count("\n") == 1
        assert "runs" in shell("ps").stdout
        assert {path: path.read_bytes() for path in files} == files
        assert rank_pids(state, client.get("runs").uid) == before
        thread, phases = watched(client.get("runs"))
        (disk / "filler").unlink()
        goes_on(client, state, before)
        client.get("runs").cancel()
        thread.join()
        assert phases == ["cancelled"]


def test_read_only_file_system_at_the_start(state: Path) -> None:
    with Client() as client:
        before = rank_pids(state, client.get("runs").uid)
    stop(state, signal.SIGTERM)  # nothing is left in a write-ahead log
    reason = f"cannot write to {state}: Read-only file system: mount it writable"
    with Client() as client:
        with mounted_read_only(state):
            check_reads(client, state, reason)
            check_no_write(client, reason)
        goes_on(client, state, before)


def test_new_directory_on_a_full_disk_is_refused(disk: Path, tmp_path: Path) -> None:
    fill(disk)
    refused = Shell(disk / "state", tmp_path)("ps")
    assert refused.returncode == 1
    assert f"cannot write to {disk}/state: No space left on device" in refused.stderr
    assert refused.stderr.count("\n") == 1


FILLS = """
import os, time
file = os.open("{path}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while True:
    try:
        os.write(file, bytes(65536))
    except OSError:
        try:
            os.write(file, bytes(64))
        except OSError:
            time.sleep(0.001)
"""


@pytest.fixture
def filled(disk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """A training whose rank takes every byte of the disk, and goes on taking those that are freed;
    another one that runs."""
    for name in ("ATOLL_URL", "ATOLL_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    where = disk / "state"
    monkeypatch.setenv("ATOLL_STATE_DIR", str(where))
    shell = Shell(where, disk.parent)
    with Client() as client:
        other = client.deploy_distributed("other", command=FOREVER, world_size=1)
        other.wait_until_target_world(60)
        program = FILLS.format(path=disk / "filler")
        fills = client.deploy_distributed(
            "fills", command=[sys.executable, "-c", program], world_size=1
        )
        fills.wait_until_target_world(60)
        until(lambda: shutil.disk_usage(disk).free == 0)
        pids = rank_pids(where, fills.uid)
    yield shell
    for pid in pids.values():  # else it would run on without a disk, if it could not be stopped
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    (disk / "filler").unlink(missing_ok=True)
    with Client() as client:
        for training in client.list():
            training.delete()
    stop(where, signal.SIGTERM)


def test_a_rank_that_fills_the_disk_can_be_cancelled_and_removed(filled: Shell, disk: Path) -> None:
    with Client() as client:
        pids = rank_pids(disk / "state", client.get("fills").uid)
        assert len(pids) == 1
        refused = filled("run", "--name", "more", "--", "true")
        assert refused.returncode == 1
        assert f"cannot write {disk}/state/atoll.db: the disk is full" in refused.stderr
        assert "condition StatusStale: this status may be out of date since" in (
            filled("status", "other").stdout
        )
        assert filled("cancel", "fills").returncode == 0
        until(lambda: not any(map(is_alive, pids.values())))
        assert filled("wait", "fills").returncode in (1, 130)
        assert client.get("fills").phase == "cancelled"
        assert filled("rm", "fills").returncode == 0
        until(lambda: [each.name for each in client.list()] == ["other"])
        assert filled("rm", "other").returncode == 0  # the disk is full to this moment
        until(lambda: client.list() == [])
        (disk / "filler").unlink()
        until(lambda: filled("run", "--name", "more", "--", "true").returncode == 0)
