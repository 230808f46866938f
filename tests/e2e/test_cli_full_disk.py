"""A disk that is full, or mounted read-only, when the control plane starts: it says so and exits,
and ranks run on. One that runs when the disk fills up goes on reading, and stops ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.core.errors import AtollError
from atoll.core.spec import WorldSize
from atoll.sdk import endpoint
from atoll.sdk.client import Client
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
        client.get("runs").delete()
    stop(where, signal.SIGTERM)


@contextlib.contextmanager
def mounted_read_only(path: Path) -> Iterator[None]:
    subprocess.run(["mount", "--bind", str(path), str(path)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def rank_pids(where: Path, uid: str) -> dict[int, int]:
    records = journal_records(where / "ranks" / uid / "journal")
    starts = [r for r in records if r["t"] == "start"]
    return {r["rank"]: r["pid"] for r in starts if is_alive(r["pid"])}


def stop(where: Path, number: int) -> None:
    pid = int(json.loads((where / "endpoint.json").read_bytes())["pid"])
    os.kill(pid, number)
    until(lambda: not is_alive(pid))


def check_start(shell: Shell, state: Path, reason: str) -> None:
    """No control plane starts, whatever is asked; the reason is one line with what to do."""
    for command in (("ps",), ("scale", "runs", "3"), ("cancel", "runs")):
        refused = shell(*command)
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"atoll: error: cannot write to {state}: {reason}")
        assert refused.stderr.count("\n") == 1
    assert endpoint.running(state) is None


def check_after(state: Path, before: dict[int, int]) -> None:
    """The next command starts a control plane that adopts the ranks."""
    with Client() as client:
        runs = client.get("runs")
        runs.scale(3)
        runs.wait_until_target_world()
        after = rank_pids(state, runs.uid)
    assert len(after) == 3
    assert {rank: after[rank] for rank in before} == before


def test_a_start_on_a_full_disk_is_refused_and_ranks_run_on(
    state: Path, disk: Path, tmp_path: Path
) -> None:
    with Client() as client:
        before = rank_pids(state, client.get("runs").uid)
    stop(state, signal.SIGKILL)
    fill(disk)
    files = {path: path.read_bytes() for path in state.glob("atoll.db*") if path.suffix != ".lock"}
    check_start(Shell(state, tmp_path), state, "No space left on device: free some space")
    assert {path: path.read_bytes() for path in files} == files
    assert all(map(is_alive, before.values()))
    (disk / "filler").unlink()
    check_after(state, before)


def test_a_start_on_a_read_only_file_system_is_refused(state: Path, tmp_path: Path) -> None:
    with Client() as client:
        before = rank_pids(state, client.get("runs").uid)
    stop(state, signal.SIGTERM)
    with mounted_read_only(state):
        reason = "Read-only file system: mount it writable"
        check_start(Shell(state, tmp_path), state, reason)
    check_after(state, before)


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
        assert filled("rm", "-f", "fills").returncode == 0
        until(lambda: [each.name for each in client.list()] == ["other"])
        assert filled("rm", "-f", "other").returncode == 0  # the disk is full to this moment
        until(lambda: client.list() == [])
        (disk / "filler").unlink()
        until(lambda: filled("run", "--name", "more", "--", "true").returncode == 0)
