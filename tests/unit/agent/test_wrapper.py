"""The wrapper: one file, real processes, a real folder."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from atoll.agent.process import CLAIMED, OutputTimes
from atoll.agent.records import is_unwanted
from atoll.agent.wrapper import Folder, RankAttempt, open_record_store, read, write
from atoll.backends.base import TIMES_FILE, wrapper_file
from atoll.core.status import LogLine
from atoll.logs.files import read_lines
from atoll.logs.segments import PAIR, segment_path, times_path

LAUNCH: dict[str, Any] = {
    "command": ["sh", "-c", "echo $RANK $WORLD_SIZE $NODE_NAME $ATOLL_ATTEMPT > $OUT"],
    "env": {},
    "rank_variables": ["RANK"],
    "size_variables": ["WORLD_SIZE"],
    "node_variables": ["NODE_NAME"],
    "unset": ["SECRET"],
    "meeting": {},
    "together": "",
    "folder": "",
    "stop_grace_s": 5.0,
    "eviction_s": 5.0,
    "results": "/nowhere",
    "gated": False,
}


def until(holds: Callable[[], Any], timeout: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := holds()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)
    return value


class Gang:
    def __init__(self, folder: Path) -> None:
        self.folder = folder / "gang"
        self.folder.mkdir()
        self.record_store = Folder(str(self.folder))
        self.file = folder / "atoll.pyz"
        self.file.write_bytes(wrapper_file())
        self.out = folder / "out"
        self.started: list[subprocess.Popen[bytes]] = []
        self.desired(size=3)

    def desired(self, size: int, **more: Any) -> None:
        desired = {
            "t": "desired",
            "version": 1,
            "size": size,
            "discarded": {},
            "stops": {},
            "at": 0.0,
            **more,
        }
        self.record_store.put("desired", write(desired))

    def launch(self, script: str | None = None, **more: Any) -> None:
        command = LAUNCH["command"] if script is None else ["sh", "-c", script]
        self.record_store.put("launch", write({**LAUNCH, "command": command, **more}))

    def start(
        self, rank: int = 1, attempt: int = 0, stdout: Any = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-S", "-I", str(self.file), str(self.folder), str(rank), str(attempt)]
            + ["--host", "node7"],
            env={**os.environ, "OUT": str(self.out), "SECRET": "s"},
            stderr=subprocess.PIPE,
            stdout=stdout,
        )
        self.started.append(process)
        return process

    def record(self, rank: int = 1, attempt: int = 0, kind: str = "exit") -> dict[str, Any] | None:
        return read(self.record_store, f"{rank}.{attempt}.{kind}")


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Gang]:
    gang = Gang(tmp_path)
    yield gang
    for process in gang.started:
        process.kill()
        process.communicate()


def test_it_claims_runs_and_tells(gang: Gang) -> None:
    gang.launch()
    process = gang.start()
    assert process.wait(60) == 0
    assert gang.out.read_text() == "1 3 node7 0\n"
    record = gang.record()
    assert record is not None
    assert (record["code"], record["reason"], record["host"]) == (0, "Completed", "node7")
    assert record["stopped"] is False
    start, claim = gang.record(kind="start"), gang.record(kind="claim")
    assert start is not None
    assert claim is not None
    assert claim["at"] <= start["at"] <= record["at"]


def test_nothing_of_a_rank_stays_in_the_folder_for_temporary_files(
    gang: Gang, tmp_path: Path
) -> None:
    """Its result is in the store when it ends, where results do not lie in a folder."""
    temporary, store = tmp_path / "tmp", tmp_path / "store"
    temporary.mkdir()
    store.mkdir()
    result = '{"encoding": "json", "bytes": 2}\n42'
    script = f"printf '{result}' > $ATOLL_RESULT; ls {temporary} > $OUT"
    gang.launch(script, results=f"file://{store}")
    command = [sys.executable, str(gang.file), str(gang.folder), "1", "0", "--host", "node7"]
    env = {**os.environ, "OUT": str(gang.out), "TMPDIR": str(temporary)}
    done = subprocess.run(command, env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "atoll-result-" in gang.out.read_text()
    assert "42" in "".join(path.read_text() for path in store.iterdir() if path.is_file())
    assert [*temporary.iterdir()] == []


def test_an_attempt_that_is_started_twice_runs_once_and_its_record_stays(gang: Gang) -> None:
    gang.launch("echo ran >> $OUT; while [ ! -e $OUT.go ]; do sleep 0.02; done; exit 4")
    first = gang.start()
    until(gang.out.exists)
    second = gang.start()
    assert second.wait(60) == CLAIMED
    assert first.poll() is None
    Path(f"{gang.out}.go").touch()
    assert first.wait(60) == 4
    assert gang.start().wait(60) == CLAIMED
    assert gang.out.read_text() == "ran\n"
    assert (gang.record() or {})["code"] == 4


def test_only_one_of_many_takes_a_claim(tmp_path: Path) -> None:
    pids, results = [], []
    for number in range(16):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                won = RankAttempt(Folder(str(tmp_path)), 0, 0, f"h{number}").claim()
                os.write(write_end, b"1" if won else b"0")
            finally:
                os._exit(0)
        os.close(write_end)
        pids.append(pid)
        results.append(read_end)
    assert sum(int(os.read(end, 1)) for end in results) == 1
    for pid in pids:
        os.waitpid(pid, 0)
    assert list(tmp_path.iterdir()) == [tmp_path / "0.0.claim"]


def test_a_smaller_wish_stops_it_politely_and_the_record_says_so(gang: Gang) -> None:
    gang.launch("trap 'exit 9' TERM; touch $OUT; while :; do sleep 0.02; done")
    process = gang.start()
    until(gang.out.exists)
    gang.desired(size=1)
    assert process.wait(60) == 9
    record = gang.record() or {}
    assert (record["code"], record["stopped"], record["reason"]) == (9, True, "Stopped")


def test_one_that_had_failed_before_it_was_told_to_stop_is_not_called_stopped(gang: Gang) -> None:
    error = '{"message": {"message": "ValueError: oops", "extraInfo": {"timestamp": "%s"}}}'
    gang.launch(
        f"trap 'exit 1' TERM; printf '{error}' $(date +%s.%N) > $TORCHELASTIC_ERROR_FILE; "
        "touch $OUT; while :; do sleep 0.02; done"
    )
    process = gang.start()
    until(gang.out.exists)
    gang.desired(size=1)
    assert process.wait(20) == 1
    record = gang.record() or {}
    assert (record["stopped"], record["reason"]) == (False, "Error")
    assert record["message"] == "ValueError: oops"


def test_one_that_ignores_it_is_killed_after_the_grace_with_all_it_started(gang: Gang) -> None:
    gang.launch("trap '' TERM; sleep 300 & echo $! > $OUT; wait; sleep 300", stop_grace_s=0.2)
    process = gang.start()
    child = int(until(lambda: gang.out.exists() and gang.out.read_text()))
    gang.desired(size=3, stops={"1": [0]})
    assert process.wait(60) == -signal.SIGKILL
    record = gang.record() or {}
    assert (record["code"], record["stopped"]) == (137, True)
    until(lambda: not os.path.exists(f"/proc/{child}") or "Z" in _state(child))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_what_runs_goes_on_when_the_wish_is_lost(gang: Gang) -> None:
    gang.launch("touch $OUT; while [ ! -e $OUT.go ]; do sleep 0.02; done")
    process = gang.start()
    until(gang.out.exists)
    gang.record_store.delete(["desired"])
    before = until(lambda: gang.record_store.entries().get("1.0.heartbeat"))
    until(lambda: gang.record_store.entries()["1.0.heartbeat"] != before)
    assert process.poll() is None
    Path(f"{gang.out}.go").touch()
    assert process.wait(60) == 0


def test_nothing_runs_for_an_attempt_that_is_not_wanted(gang: Gang) -> None:
    gang.launch()
    gang.desired(size=1)
    assert gang.start().wait(60) == 0
    assert not gang.out.exists()
    assert gang.record(kind="claim") is None


def test_one_whose_wrapper_lost_its_parent_ends(gang: Gang, tmp_path: Path) -> None:
    gang.launch("trap '' TERM; echo $$ > $OUT; while :; do sleep 0.02; done")
    command = [sys.executable, "-S", "-I", str(gang.file), str(gang.folder), "1", "0"]
    parent = subprocess.Popen(
        [sys.executable, "-c", f"import subprocess; subprocess.run({command!r})"],
        env={**os.environ, "OUT": str(gang.out)},
    )
    rank = int(until(lambda: gang.out.exists() and gang.out.read_text().strip()))
    parent.kill()
    parent.wait()
    until(lambda: not os.path.exists(f"/proc/{rank}"))
    record = until(gang.record)
    assert (record["code"], record["reason"]) == (137, "SupervisorLost")


def test_a_killed_wrapper_takes_its_rank_along(gang: Gang) -> None:
    gang.launch("echo $$ > $OUT; while :; do sleep 0.02; done")
    process = gang.start()
    rank = int(until(lambda: gang.out.exists() and gang.out.read_text().strip()))
    process.kill()
    until(lambda: not os.path.exists(f"/proc/{rank}"))
    assert gang.record() is None


def test_a_frozen_rank_is_killed(gang: Gang) -> None:
    gang.launch("echo $$ > $OUT; while :; do sleep 0.02; done")
    process = gang.start()
    rank = int(until(lambda: gang.out.exists() and gang.out.read_text().strip()))
    os.kill(rank, signal.SIGSTOP)
    process.wait(60)
    record = gang.record() or {}
    assert (record["code"], record["reason"], record["stopped"]) == (137, "Frozen", False)


def test_one_that_was_given_up_while_frozen_does_not_run_on(gang: Gang) -> None:
    gang.launch("echo $$ > $OUT; while :; do sleep 0.02; done")
    process = gang.start()
    rank = int(until(lambda: gang.out.exists() and gang.out.read_text().strip()))
    until(lambda: gang.record_store.entries().get("1.0.heartbeat"))
    os.kill(process.pid, signal.SIGSTOP)
    concluded = write({"atollExit": 1, "by": "backend", "code": None})
    assert gang.record_store.create("1.0.exit", concluded)
    stamp = gang.record_store.entries()["1.0.heartbeat"]
    until(lambda: time.time_ns() - stamp > 4e9)  # more beats than it may miss
    os.kill(process.pid, signal.SIGCONT)
    process.wait(60)
    assert not os.path.exists(f"/proc/{rank}")
    assert gang.record_store.get("1.0.exit") == concluded


def test_the_backends_own_signal_is_passed_on_and_told(gang: Gang) -> None:
    gang.launch("touch $OUT; while :; do sleep 0.02; done")
    process = gang.start()
    until(gang.out.exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGTERM
    record = gang.record() or {}
    assert (record["signal"], record["signalled"], record["stopped"]) == (
        "SIGTERM",
        "SIGTERM",
        False,
    )


def test_a_deaf_one_is_killed_before_the_backend_kills_its_wrapper(gang: Gang) -> None:
    gang.launch("trap '' TERM; touch $OUT; while :; do sleep 0.02; done", eviction_s=1.5)
    process = gang.start()
    until(gang.out.exists)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == -signal.SIGKILL
    assert (gang.record() or {})["signalled"] == "SIGTERM"


def test_ranks_wait_at_the_gate_and_meet_at_rank_0(gang: Gang) -> None:
    meeting = {"MASTER_ADDR": "host", "PET_RDZV_ENDPOINT": "endpoint"}
    script = "echo $TOGETHER $MASTER_ADDR $PET_RDZV_ENDPOINT >> $OUT"
    gang.launch(script, gated=True, together="TOGETHER", meeting=meeting)
    ranks = [gang.start(0), gang.start(1)]
    until(lambda: gang.record(1, kind="claim") and gang.record(0, kind="claim"))
    until(lambda: "1.0.heartbeat" in gang.record_store.entries())
    assert not gang.out.exists()
    gang.record_store.create("gate", write({"at": 1.0, "together": 2}))
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    port = (read(gang.record_store, "rendezvous") or {})["port"]
    assert gang.out.read_text().splitlines() == [f"2 node7 node7:{port}"] * 2


def test_one_that_is_told_to_go_at_the_gate_never_ran(gang: Gang) -> None:
    gang.launch(gated=True)
    process = gang.start()
    until(lambda: gang.record(kind="claim"))
    gang.desired(size=0)
    assert process.wait(60) == 0
    record = gang.record() or {}
    assert (record["ran"], record["stopped"], record["code"]) == (False, True, None)
    assert not gang.out.exists()


@pytest.mark.parametrize(
    ("command", "folder", "code", "reason"),
    [
        (["/nonesuch/command"], "", 127, "CommandNotFound"),
        (["true"], "/nonesuch/folder", 126, "CannotRun"),
    ],
)
def test_what_cannot_be_run(
    gang: Gang, command: list[str], folder: str, code: int, reason: str
) -> None:
    gang.record_store.put("launch", write({**LAUNCH, "command": command, "folder": folder}))
    assert gang.start().wait(60) == code
    record = gang.record() or {}
    assert (record["code"], record["reason"]) == (code, reason)
    assert record["message"].startswith("its working directory" if folder else command[0])


def test_the_wrapper_is_one_file_of_the_standard_library(gang: Gang) -> None:
    gang.launch()
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: pass\n"
        "import os; os.write(1, str([m for m in sys.modules if 'atoll' in m]).encode())"
    )
    command = [sys.executable, "-S", "-I", "-c", code, str(gang.file), str(gang.folder), "9", "0"]
    done = subprocess.run(command, capture_output=True, check=True)
    assert done.stdout == b"[]"


@pytest.mark.parametrize("words", [[], ["/tmp", "x", "0"], ["/tmp", "1"]])
def test_bad_words_are_usage(words: list[str], gang: Gang) -> None:
    done = subprocess.run([sys.executable, str(gang.file), *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        2,
        "usage: atoll.pyz RECORDS RANK ATTEMPT [--host NAME]\n",
    )


def test_who_is_wanted() -> None:
    desired = {"size": 2, "stops": {"1": [0, 3]}}
    wanted = [(0, 0), (1, 4), (0, 7)]
    unwanted = [(2, 0), (1, 0), (1, 2), (1, 3)]
    assert [is_unwanted(desired, *key) for key in wanted] == [False] * 3
    assert [is_unwanted(desired, *key) for key in unwanted] == [True] * 4


def test_a_place_by_path_and_by_uri(tmp_path: Path) -> None:
    for uri in (str(tmp_path), f"file://{tmp_path}"):
        record_store = open_record_store(uri)
        assert isinstance(record_store, Folder)
        assert record_store.path == str(tmp_path)


def test_a_folder_is_read_in_one_listing(tmp_path: Path) -> None:
    record_store = Folder(str(tmp_path))
    assert record_store.create("a", b"1")
    assert not record_store.create("a", b"2")
    assert record_store.get("a") == b"1"
    record_store.put("a", b"3")
    record_store.heartbeat("0.0.heartbeat")
    assert sorted(record_store.entries()) == ["0.0.heartbeat", "a"]
    record_store.delete(["a", "a"])
    assert record_store.get("a") is None
    assert json.loads(write({"b": 1, "a": 2})) == {"a": 2, "b": 1}


def test_lines_of_a_log_that_is_the_wrappers_output_have_times_and_come_in_order(
    gang: Gang, tmp_path: Path
) -> None:
    """As on Slurm, where the script of a task sends its output to the log."""
    logs = tmp_path / "logs {0}"
    braced = str(logs).replace("{", "{{").replace("}", "}}")
    # Each line is written when the one before it, of the other rank, has been copied; and at
    # another time, as times have milliseconds.
    script = """
until_other() { until grep -q $1 "$LOGS/$((1 - RANK))/$WRAPPER"; do sleep 0.01; done; sleep 0.01; }
if [ $RANK = 0 ]; then echo ping; until_other pong; echo end; else until_other ping; echo pong; fi
"""
    env = {"LOGS": str(logs), "WRAPPER": segment_path(logs, 0).name}
    gang.launch(script, times=f"{braced}/{{rank}}/{TIMES_FILE}", env=env)
    before = time.time()
    for rank in (0, 1):
        (logs / str(rank)).mkdir(parents=True)
        with segment_path(logs / str(rank), 0).open("ab") as log:
            log.write(b"of a prologue\n")
            log.flush()
            gang.start(rank, stdout=log)
    assert [process.wait(60) for process in gang.started] == [0, 0]

    async def read_all() -> list[LogLine]:
        return [line async for line in read_lines(logs, {}, ranks=None, follow=None)]

    lines = asyncio.run(read_all())
    assert [line.time for line in lines[:2]] == [None, None], "nobody has copied these"
    assert [line.text for line in lines[2:]] == ["ping", "pong", "end"]
    times = [line.time or 0.0 for line in lines[2:]]
    assert times == sorted(times)
    assert before - 1 <= times[0] <= times[-1] <= time.time()


def test_times_are_noted_as_they_are_read(tmp_path: Path) -> None:
    assert OutputTimes.PAIR.format == PAIR.format
    assert times_path(tmp_path, 0).name == TIMES_FILE


DEAF = "trap '' TERM; : > $OUT.up; while :; do sleep 0.1; done"
SLOW_STORE = """
import os, sys, threading
from atoll.agent import wrapper

ended = threading.Event()
put, end = wrapper.Folder.put, wrapper.RankAttempt.end

def slow_put(self, name, data):
    if name.endswith((".stacks", ".answer")):
        ended.wait(1.0)
    put(self, name, data)

def watched_end(self, record):
    with open(os.environ["OUT"], "w") as file:
        file.write(" ".join(os.listdir(os.environ["RESULTS"])))
    ended.set()
    return end(self, record)

wrapper.Folder.put, wrapper.RankAttempt.end = slow_put, watched_end
sys.exit(wrapper.main(sys.argv[1:]))
"""


def start_with_slow_store(gang: Gang, folder: Path) -> None:
    """Rank 1, deaf to SIGTERM. `gang.out` tells what `folder` holds as its exit is written."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW_STORE, str(gang.folder), "1", "0", "--host", "node7"],
        env={**os.environ, "OUT": str(gang.out), "RESULTS": str(folder)},
    )
    gang.started.append(process)
    until(Path(f"{gang.out}.up").exists)


def test_who_reads_that_a_rank_was_killed_finds_its_stacks(gang: Gang, tmp_path: Path) -> None:
    results = tmp_path / "results"
    results.mkdir()
    gang.launch(DEAF, stop_grace_s=0.1, results=str(results))
    start_with_slow_store(gang, results)
    gang.desired(size=0)
    until(gang.record)
    assert gang.out.read_text() == "1.0.stacks"


def test_who_sends_the_signal_that_ends_a_rank_has_an_answer(gang: Gang) -> None:
    gang.launch(DEAF)
    start_with_slow_store(gang, gang.folder)
    gang.desired(size=3, request={"id": "a", "ranks": [1], "signal": signal.SIGUSR1})
    until(gang.record)
    assert "1.0.answer" in gang.out.read_text().split()
