"""Output that goes nowhere: readers that leave, streams that are closed, disks that are full."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from tests.e2e.conftest import ATOLL, PATIENCE_S

SLOW = "echo a; sleep 0.3; echo b"


def test_followed_logs_end_with_their_reader(atoll: Any) -> None:
    script = "while :; do echo tick; sleep 0.05; done"
    assert atoll("run", "-d", "--name", "ticking", "--", "sh", "-c", script).returncode == 0
    with atoll.start("logs", "-f", "ticking") as it:
        assert it.stdout.readline() == "[0] tick\n"
        it.stdout.close()
        assert it.wait(PATIENCE_S) != 0
        assert it.stderr.read() == ""
    assert atoll.json("status", "ticking")["phase"] == "ready"
    assert atoll("rm", "-f", "ticking").returncode == 0


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_run_goes_on_when_nobody_reads_either_stream(atoll: Any, options: Any) -> None:
    name = f"unread-{len(options)}"
    read, write = os.pipe()
    it = subprocess.Popen(
        [*ATOLL, "run", *options, "--name", name, "--", "sh", "-c", SLOW],
        env=atoll.env,
        cwd=atoll.cwd,
        stdout=write,
        stderr=write,
    )
    os.close(write)
    assert os.read(read, 1)
    os.close(read)
    assert it.wait(PATIENCE_S) == 0
    assert atoll.json("status", name)["phase"] == "succeeded"


@pytest.mark.parametrize("words", [("ps",), ("logs", "said"), ("run", "--", "echo", "a")])
def test_streams_may_be_closed(atoll: Any, said: str, words: tuple[str, ...]) -> None:
    assert _in_shell(atoll, "exec 0<&- 1>&-", *words) == (0, "", words[0] == "run")
    assert _in_shell(atoll, "exec 0<&- 1>&- 2>&-", *words) == (0, "", False)


@pytest.mark.parametrize("words", [("ps",), ("logs", "said"), ("ps", "--json")])
def test_a_full_disk_under_the_output_is_one_line(
    atoll: Any, said: str, words: tuple[str, ...]
) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" > /dev/full', "sh", *ATOLL, *words],
        env=atoll.env,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (
        1,
        "atoll: error: No space left on device\n",
    )


def test_letters_that_the_terminal_lacks_are_spelt_out(atoll: Any, said: str) -> None:
    done = atoll("logs", "said", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert (done.returncode, done.stdout) == (0, "[0] \\xe9\\u2028\n")


@pytest.fixture
def said(atoll: Any) -> Any:
    assert atoll("run", "--name", "said", "--", "printf", "é\u2028\n").returncode == 0
    yield "said"
    assert atoll("rm", "-f", "said").returncode == 0


def _in_shell(atoll: Any, first: str, *words: str) -> tuple[int, str, bool]:
    """The exit code, what was printed, and whether anything was said beside it."""
    done = subprocess.run(
        ["sh", "-c", f'{first}; exec "$@"', "sh", *ATOLL, *words],
        env=atoll.env,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, bool(done.stderr)
