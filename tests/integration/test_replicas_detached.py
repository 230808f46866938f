"""Handles that outlive the script: detached replicas, with real processes, from other processes."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.integration.test_replicas import KEYS, marked, script, until

import atoll
from atoll import LocalProcessExecutor, NotFound, ReplicaHandle
from atoll.backends.local import processes
from atoll.backends.local.adoption import read_record

SOURCE = str(Path(atoll.__file__).parents[1])
RANKS = f"""
import os, sys, time
from pathlib import Path
sys.path.append({SOURCE!r})
import atoll
rank = os.environ["RANK"]
print("hello from", rank, flush=True)
while not Path(sys.argv[2], "go").exists():
    time.sleep(0.01)
atoll.set_result({{"rank": int(rank)}})
sys.exit(int(rank) * 3)
"""
LAUNCH = """
import sys, time
from atoll import LocalProcessExecutor
executor = LocalProcessExecutor(detach=True)
handles = executor.launch_replicas(2, sys.argv[1], {"place": sys.argv[2]})
while {executor.poll(handle) for handle in handles} != {"running"}:
    time.sleep(0.01)
for handle in handles:
    print(handle.to_json(), flush=True)
"""


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ATOLL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TEST_MARK", str(tmp_path))
    yield tmp_path / "state" / "replicas"
    (tmp_path / "go").touch()
    until(lambda: not marked(str(tmp_path)))


def launch(tmp_path: Path, ending: str = "time.sleep(600)") -> list[ReplicaHandle]:
    """Launched by a script that was killed, or has ended, since."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH + ending, script(tmp_path, RANKS), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdout=subprocess.PIPE,
        text=True,
    )
    with launcher:
        assert launcher.stdout is not None
        handles = [ReplicaHandle.from_json(launcher.stdout.readline()) for _ in range(2)]
        if ending:
            os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(60)
    return handles


def test_another_process_polls_reads_and_collects_after_a_kill(tmp_path: Path, state: Path) -> None:
    handles = launch(tmp_path)
    metadata = handles[1].metadata
    assert metadata["rank"] == 1
    assert metadata["directory"] == str(state)
    assert {"job_name", "namespace", "uid"} <= set(metadata)
    other = LocalProcessExecutor()
    assert [other.poll(handle) for handle in handles] == ["running", "running"]
    until(lambda: other.stream_logs(handles[1]) == "hello from 1")
    assert other.attach(metadata["job_name"]) == handles
    (early, _) = other.collect(handles, timeout=0)
    assert early["status"] == "running"
    other.close()  # ends nothing that it has not launched
    third = LocalProcessExecutor(detach=True)
    handles = [pickle.loads(pickle.dumps(handle)) for handle in handles]
    assert {third.poll(handle) for handle in handles} == {"running"}
    (tmp_path / "go").touch()
    reports = third.collect(handles, timeout=60)
    assert [set(report) for report in reports] == [KEYS, KEYS]
    assert [report["exit_code"] for report in reports] == [0, 3]
    assert [report["status"] for report in reports] == ["succeeded", "failed"]
    assert [report["result"] for report in reports] == [{"rank": 0}, {"rank": 1}]
    assert reports[1]["error"] == "exited with code 3: hello from 1"
    assert {report["job_name"] for report in reports} == {metadata["job_name"]}
    third.close()
    assert [r["exit_code"] for r in LocalProcessExecutor().collect(handles)] == [0, 3]


def test_another_process_cancels(tmp_path: Path) -> None:
    handles = launch(tmp_path, ending="")
    assert len(marked(str(tmp_path))) >= 2
    other = LocalProcessExecutor()
    watching = LocalProcessExecutor()
    assert watching.poll(handles[0]) == "running"
    other.cancel(handles[1])
    assert [other.poll(handle) for handle in handles] == ["cancelled", "cancelled"]
    for executor in (watching, LocalProcessExecutor()):  # who watched, and who comes later
        reports = executor.collect(handles, timeout=60)
        assert [report["status"] for report in reports] == ["cancelled", "cancelled"]
        assert [report["exit_code"] for report in reports] == [143, 143]
        executor.cancel(handles[0])


def test_handles_work_without_uid_and_directory(tmp_path: Path) -> None:
    handles = launch(tmp_path, ending="")
    plain = ReplicaHandle(0, "local", {"job_name": handles[0].metadata["job_name"]})
    other = LocalProcessExecutor()
    assert other.poll(plain) == "running"
    stranger = ReplicaHandle(0, "local", {**handles[0].metadata, "uid": "another"})
    assert other.poll(stranger) == "cancelled"
    other.cancel(stranger)
    assert other.poll(plain) == "running"
    with pytest.raises(ValueError, match="so many were launched"):
        other.poll(ReplicaHandle(2, "local", handles[0].metadata))


def test_many_may_follow_and_cancel_at_once(tmp_path: Path) -> None:
    handles = launch(tmp_path, ending="")
    executors = [LocalProcessExecutor() for _ in range(4)]
    barrier = threading.Barrier(4)

    def use(executor: LocalProcessExecutor) -> list[dict[str, Any]]:
        assert executor.poll(handles[0]) == "running"
        barrier.wait(60)
        executor.cancel(handles[0])
        return executor.collect(handles, timeout=60)

    with ThreadPoolExecutor(4) as pool:
        reports = list(pool.map(use, executors))
    for report in reports:
        assert [(r["status"], r["exit_code"]) for r in report] == [("cancelled", 143)] * 2
    for executor in executors:
        executor.close()


def test_one_that_follows_leaves_it_to_the_others(tmp_path: Path) -> None:
    """Neither polling, nor collecting, nor closing takes anything from the rest."""
    with LocalProcessExecutor(detach=True) as launcher:
        handles = launcher.launch_replicas(2, script(tmp_path, RANKS), {"place": str(tmp_path)})
        until(lambda: {launcher.poll(handle) for handle in handles} == {"running"})
        with LocalProcessExecutor() as other:
            assert {other.poll(handle) for handle in handles} == {"running"}
        (tmp_path / "go").touch()
        with LocalProcessExecutor() as other:
            assert [r["exit_code"] for r in other.collect(handles, timeout=60)] == [0, 3]
        assert [r["exit_code"] for r in launcher.collect(handles, timeout=60)] == [0, 3]
        assert launcher.stream_logs(handles[0]) == "hello from 0"
        other = LocalProcessExecutor()
        assert other.poll(handles[0]) == "succeeded"
    # The launcher has closed: what it launched is gone, and what was known before stays known.
    assert other.poll(handles[0]) == "succeeded"
    assert LocalProcessExecutor().poll(handles[0]) == "cancelled"
    with pytest.raises(NotFound):
        LocalProcessExecutor().attach(handles[0].metadata["job_name"])


def test_a_launch_whose_files_are_deleted_is_cancelled_and_says_so(tmp_path: Path) -> None:
    launcher = LocalProcessExecutor(detach=True)
    handles = launcher.launch_replicas(2, script(tmp_path, RANKS), {"place": str(tmp_path)})
    until(lambda: {launcher.poll(handle) for handle in handles} == {"running"})
    other = LocalProcessExecutor()
    assert other.poll(handles[0]) == "running"
    launcher.close()
    reports = other.collect(handles, timeout=60)
    assert [report["status"] for report in reports] == ["cancelled", "cancelled"]
    name = handles[0].metadata["job_name"]
    # Whoever follows has seen how it ended, or that its files went, or comes too late for both.
    told = (
        f"the launch {name} no longer exists",
        "cancelled: it was killed by SIGTERM",
        "cancelled: it ended with an exit code that could not be learned: it was deleted by",
    )
    assert all(report["error"].startswith(told) for report in reports), reports
    assert other.poll(handles[1]) == "cancelled"


def test_the_deadline_is_kept_when_no_script_is_left(tmp_path: Path, state: Path) -> None:
    launch = LAUNCH.replace("sys.argv[2]}", "sys.argv[2]}, timeout=2")
    done = subprocess.run(
        [sys.executable, "-c", launch, script(tmp_path, RANKS), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    handles = [ReplicaHandle.from_json(line) for line in done.stdout.splitlines()]
    until(lambda: not marked(str(tmp_path)))  # the watchdog has ended as well
    record = read_record(state / handles[0].metadata["uid"])
    assert record is not None
    assert record.status.phase == "failed"
    reports = LocalProcessExecutor().collect(handles, timeout=10)
    assert [report["status"] for report in reports] == ["failed", "failed"]
    assert all("2 s" in report["error"] for report in reports)


def test_functions_and_concurrent_scripts(tmp_path: Path, state: Path) -> None:
    first, second = LocalProcessExecutor(detach=True), LocalProcessExecutor(detach=True)
    one = first.launch_replicas(1, lambda tag: (tag, b"x"), {"tag": "first"})
    two = second.launch_replicas(1, lambda tag: (tag, b"x"), {"tag": "second"})
    assert [r["result"] for r in second.collect([*one, *two], timeout=60)] == [
        ("first", b"x"),
        ("second", b"x"),
    ]
    first.close()
    assert second.collect(two)[0]["status"] == "succeeded"
    assert LocalProcessExecutor().poll(two[0]) == "succeeded"
    assert [path.name for path in state.iterdir()] == [two[0].metadata["uid"]]
    # Long after the end, the next launch forgets it.
    record = state / two[0].metadata["uid"] / "training.json"
    second._wait_until_recorded(two[0].metadata["job_name"])
    document = json.loads(record.read_bytes())
    document["status"]["endedAt"] = time.time() - 8 * 86_400
    record.write_text(json.dumps(document))
    third = LocalProcessExecutor(detach=True)
    three = third.launch_replicas(1, os.getpid)
    assert [path.name for path in state.iterdir()] == [three[0].metadata["uid"]]
    third.close()


@pytest.mark.parametrize(
    "options", [{"detach": "yes"}, {"state_dir": "a\0b"}, {"state_dir": 5}, {"allow_pickle": 1}]
)
def test_bad_options_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        LocalProcessExecutor(**options)


def test_replicas_that_are_not_detached_can_be_followed_while_the_script_lives(
    tmp_path: Path,
) -> None:
    with LocalProcessExecutor() as launcher:
        handles = launcher.launch_replicas(2, script(tmp_path, RANKS), {"place": str(tmp_path)})
        until(lambda: {launcher.poll(handle) for handle in handles} == {"running"})
        other = LocalProcessExecutor()
        assert other.poll(handles[0]) == "running"
    assert [r["status"] for r in other.collect(handles, timeout=60)] == ["cancelled"] * 2


def test_the_supervisor_of_detached_replicas_is_not_the_launchers(tmp_path: Path) -> None:
    """A supervisor that dies after the script is replaced once, by whoever follows."""
    handles = launch(tmp_path)
    executors = [LocalProcessExecutor() for _ in range(3)]
    assert {executor.poll(handles[0]) for executor in executors} == {"running"}
    directory = Path(handles[0].metadata["directory"], handles[0].metadata["uid"])
    watchdog, start_ticks = map(int, (directory / "watchdog").read_text().split())
    for pid in (*processes.children(watchdog), watchdog):
        if processes.is_running(pid, processes.start_ticks(pid)):
            os.kill(pid, signal.SIGKILL)
    assert start_ticks
    for executor in executors:
        reports = executor.collect(handles, timeout=60)
        assert {report["status"] for report in reports} == {"failed"}


def test_the_directory_may_be_in_the_home_directory() -> None:
    executor = LocalProcessExecutor(state_dir="~/launches")
    assert executor.state_dir == Path.home() / "launches"
