"""The wrapper of a rank as a real process, by a Python that has nothing but its own library."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from atoll.agent import process
from atoll.agent.process import read_record, record_line

WRAPPER = [sys.executable, "-S", "-I", process.__file__]
PR_SET_CHILD_SUBREAPER = 36


def start(tmp_path: Path, *words: str, options: tuple[str, ...] = (), **rest: Any) -> Any:
    return subprocess.Popen(
        [*WRAPPER, "--record", str(tmp_path / "record"), *options, "--", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        **rest,
    )


def run(tmp_path: Path, *words: str, options: tuple[str, ...] = (), **rest: Any) -> Any:
    """How the wrapper ended: return code, stdout, stderr, record."""
    process = start(tmp_path, *words, options=options, **rest)
    out, err = process.communicate()
    return process.returncode, out, err, record_of(tmp_path)


def record_of(tmp_path: Path) -> dict[str, Any] | None:
    path = tmp_path / "record"
    return read_record(path.read_text()) if path.exists() else None


def test_code_output_and_record_are_the_commands(tmp_path: Path) -> None:
    before = time.time()
    code, out, err, record = run(tmp_path, "sh", "-c", "echo out; echo err >&2; exit 3")
    assert (code, out, err) == (3, b"out\nerr\n", b"")
    assert (record["code"], record["reason"]) == (3, "Error")
    assert record["tail"] == ["out", "err"]
    assert record["signal"] is None
    assert before <= record["at"] <= time.time()
    assert record["host"] == os.uname().nodename


def test_a_progress_bar_is_one_last_line_with_its_last_state(tmp_path: Path) -> None:
    bar = r"loading\n\r 0%%\r 50%%\r     \r{loss: 6}\n\r 51%%\r\nwindows\r\n\n\r 52%%\r 53%%"
    *_, record = run(tmp_path, "sh", "-c", f"printf '{bar}'; exit 3")
    assert record["tail"] == ["loading", "{loss: 6}", " 51%", "windows", "", " 53%"]


def test_success_has_no_last_lines(tmp_path: Path) -> None:
    code, out, _, record = run(tmp_path, "echo", "fine")
    assert (code, out) == (0, b"fine\n")
    assert (record["code"], record["reason"], record["tail"]) == (0, "Completed", [])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, 40])
def test_a_command_killed_by_a_signal_takes_the_wrapper_along(tmp_path: Path, number: int) -> None:
    code, _, err, record = run(tmp_path, "sh", "-c", f"kill -{int(number)} $$")
    assert (code, err) == (-number, b"")
    name = "SIGRTMIN+6" if number == 40 else signal.Signals(number).name
    assert (record["code"], record["signal"]) == (128 + number, name)
    assert record["reason"] == "Signal"


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [("nonesuch-command", 127, "CommandNotFound"), ("/etc/passwd", 126, "CannotRun")],
)
def test_a_command_that_cannot_be_run_is_told_as_shells_do(
    tmp_path: Path, command: str, code: int, reason: str
) -> None:
    seen, out, err, record = run(tmp_path, command)
    assert (seen, out) == (code, b"")
    assert err.decode() == f"atoll: {record['message']}\n"
    assert (record["code"], record["reason"]) == (code, reason)
    assert command in record["message"]


def test_a_signal_reaches_the_command_and_not_what_it_started(tmp_path: Path) -> None:
    """A data loader that goes first would take the rank along before it has saved."""
    script = f"""
trap 'echo saved; kill -KILL $worker; wait $worker; echo worker $?; exit 5' TERM
sh -c "trap 'exit 1' TERM; touch {tmp_path}/set; while :; do sleep 0.05; done" & worker=$!
until [ -e {tmp_path}/set ]; do sleep 0.01; done; echo ready
wait; wait
"""
    rank = start(tmp_path, "sh", "-c", script)
    assert rank.stdout.readline() == b"ready\n"
    rank.send_signal(signal.SIGTERM)
    out, _ = rank.communicate()
    assert rank.returncode == 5
    assert out.startswith(b"saved\n")
    assert out.endswith(b"worker 137\n")  # and not 1, which is its own answer to SIGTERM
    assert record_of(tmp_path)["code"] == 5  # type: ignore[index]


def test_output_without_a_newline_passes_at_once(tmp_path: Path) -> None:
    rank = start(tmp_path, "sh", "-c", "printf ' 10%%\\r'; read word", stdin=subprocess.PIPE)
    assert os.read(rank.stdout.fileno(), 100) == b" 10%\r"
    rank.communicate(b"go\n")


def test_every_byte_passes_in_order(tmp_path: Path) -> None:
    code = "import os\nfor i in range(64): os.write(1 + i % 2, bytes(range(256)) * 512)"
    _, out, _, record = run(tmp_path, sys.executable, "-c", code)
    assert out == bytes(range(256)) * 512 * 64
    assert record["code"] == 0


def test_the_command_outlives_a_reader_that_went_away(tmp_path: Path) -> None:
    rank = start(tmp_path, "sh", "-c", "read go; echo nobody reads; exit 4", stdin=subprocess.PIPE)
    rank.stdout.close()
    rank.stdin.close()
    assert rank.wait() == 4
    assert record_of(tmp_path)["tail"] == ["nobody reads"]  # type: ignore[index]
    rank.stderr.close()


def test_what_the_command_left_behind_is_not_waited_for(tmp_path: Path) -> None:
    rank = start(tmp_path, "sh", "-c", "sleep 1000 & echo $!; exit 6")
    left = int(rank.stdout.readline())
    assert rank.wait() == 6
    os.kill(left, signal.SIGKILL)
    rank.communicate()


def test_orphans_that_come_to_the_wrapper_are_reaped(tmp_path: Path) -> None:
    """It is process 1 of a container; here a subreaper, which is the same to orphans."""
    script = """
(sleep 0.05 & echo $! >orphan) &
wait
until ! kill -0 $(cat orphan) 2>/dev/null; do sleep 0.01; done
exit 8
"""
    libc = ctypes.CDLL(None)
    code, _, _, record = run(
        tmp_path,
        *("sh", "-c", script),
        cwd=tmp_path,
        preexec_fn=lambda: libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0),
    )
    assert (code, record["code"]) == (8, 8)


def test_a_record_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [*WRAPPER, "--record=/nonesuch/folder/record", "--", "sh", "-c", "echo x; exit 3"],
        capture_output=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (3, b"x\n", b"")


def test_the_record_can_be_asked_for_by_a_variable_that_the_command_does_not_see(
    tmp_path: Path,
) -> None:
    path = tmp_path / "record"
    done = subprocess.run(
        [*WRAPPER, "--", "env"],
        env={"ATOLL_EXIT_RECORD": str(path), "A.B": "dots", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert seen.pop("TORCHELASTIC_ERROR_FILE")
    assert seen == {"A.B": "dots", "PATH": os.environ["PATH"]}
    assert record_of(tmp_path)["code"] == 0  # type: ignore[index]


def test_the_error_that_the_program_left_is_in_the_record(tmp_path: Path) -> None:
    error = {"message": {"message": "Boom: why", "extraInfo": {"timestamp": "1700000000.25"}}}
    script = f"echo '{json.dumps(error)}' >$TORCHELASTIC_ERROR_FILE; exit 1"
    _, _, _, record = run(tmp_path, "sh", "-c", script, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert (record["failedAt"], record["message"]) == (1700000000.25, "Boom: why")
    assert os.listdir(tmp_path) == ["record"]  # the wrapper clears its own file away


def test_an_attempt_is_run_by_one_process(tmp_path: Path) -> None:
    claim = ("--claim", str(tmp_path / "0.1"))
    assert run(tmp_path, "true", options=claim)[0] == 0
    (tmp_path / "record").unlink()
    code, out, err, record = run(tmp_path, "echo", "twice", options=claim)
    assert (code, out, record) == (75, b"", None)
    assert b"another process" in err


def test_a_bound_rank_ends_with_whoever_started_it(tmp_path: Path) -> None:
    wrapper = [*WRAPPER, "--record", str(tmp_path / "record"), "--bound", "--"]
    code = (
        "import subprocess, sys\n"
        "rank = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)\n"
        "print(rank.stdout.readline().decode(), end='', flush=True)\n"
        "sys.stdin.read()"
    )
    script = "trap '' TERM; echo $$; while :; do sleep 0.05; done"
    parent = subprocess.Popen(
        [sys.executable, "-c", code, *wrapper, "sh", "-c", script],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout
    rank = os.pidfd_open(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    assert select.select([rank], [], [], 30)[0]
    os.close(rank)
    while record_of(tmp_path) is None:
        time.sleep(0.01)
    assert record_of(tmp_path)["signal"] == "SIGKILL"  # type: ignore[index]


def test_signals_that_python_ignores_are_the_commands_again(tmp_path: Path) -> None:
    show = "grep -E 'SigIgn|SigBlk' /proc/self/status"
    _, out, _, _ = run(tmp_path, "sh", "-c", show)
    plain = subprocess.run(["sh", "-c", show], capture_output=True, check=True).stdout
    assert out == plain


def test_no_core_is_left_by_the_wrapper(tmp_path: Path) -> None:
    run(tmp_path, "sh", "-c", "ulimit -c 0; kill -ABRT $$", cwd=tmp_path)
    assert os.listdir(tmp_path) == ["record"]


@pytest.mark.parametrize("words", [[], ["--"], ["--nonesuch", "--", "x"], ["--limit=x", "--", "x"]])
def test_bad_words_are_a_usage_error(words: list[str]) -> None:
    done = subprocess.run([*WRAPPER, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage:")


def test_a_record_fits_its_place_by_losing_old_lines() -> None:
    record = {"code": 1, "at": 1.5, "tail": [f"{n}" + "é" * 100 for n in range(40)], "message": "m"}
    line = record_line(record, 4096)
    assert len(line) <= 4096
    short = read_record(line.decode())
    assert short is not None
    assert short["message"] == "m"
    assert short["tail"] == record["tail"][-len(short["tail"]) :]
    assert len(short["tail"]) > 10
    long = read_record(record_line({"code": 1, "tail": ["x" * 9000 + "end"]}, 500).decode())
    assert long is not None
    assert long["tail"][0].endswith("end")


def test_a_record_cut_short_loses_only_its_lines() -> None:
    line = record_line({"code": 9, "at": 1.5, "tail": ["one", "two"], "message": "m"}, 4096)
    short = read_record(line.decode()[:-8])
    assert short == {"atollExit": 1, "code": 9, "at": 1.5, "message": "m"}


@pytest.mark.parametrize(
    "text", ["", "Traceback", "{}", '{"atollExit"', '{"atollExit": 1, "code": "x"}', "[1]"]
)
def test_anything_else_is_no_record(text: str) -> None:
    assert read_record(text) is None


def test_what_the_program_wrote_in_that_place_are_its_last_words(tmp_path: Path) -> None:
    """A termination log is there before the rank, and programs may use it."""
    (tmp_path / "record").touch()
    _, _, _, record = run(tmp_path, "sh", "-c", f"echo own words >{tmp_path}/record; exit 1")
    assert record["tail"] == ["own words"]
    _, _, _, record = run(tmp_path, "sh", "-c", "echo log; exit 1")
    assert record["tail"] == ["log"]  # an older record is no word of the program's


def test_a_failure_is_written_for_whoever_runs_the_program_unless_torch_has_done_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "errors" / "0.json"
    monkeypatch.setenv(process.ERROR_VARIABLE, str(path))
    process.write_error_file("no such command", reason="CommandNotFound")
    told = process.own_record(str(path))
    assert (told["message"], told["reason"]) == ("no such command", "CommandNotFound")
    path.write_text(
        TORCHS := '{"message": {"message": "by torch", "extraInfo": {"timestamp": "1"}}}'
    )
    process.write_error_file("by atoll")
    assert path.read_text() == TORCHS
    monkeypatch.setenv(process.ERROR_VARIABLE, str(tmp_path / "errors" / "0.json" / "nowhere"))
    process.write_error_file("there is no place for it, and that is no error")
    monkeypatch.delenv(process.ERROR_VARIABLE)
    process.write_error_file("nobody asks")


def test_one_function_writes_the_file_of_torch() -> None:
    """Whoever fails before or after the user's code calls it, so that one rule holds."""
    sources = Path(process.__file__).parents[1]
    naming = {
        path.name
        for path in sources.rglob("*.py")
        if '"TORCHELASTIC_ERROR_FILE"' in path.read_text()
    }
    assert naming == {"process.py"}
