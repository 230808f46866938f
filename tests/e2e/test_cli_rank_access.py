"""`atoll exec` and `atoll kill`: into a rank from the shell."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ATOLL, Shell, is_alive, until

IDLE = "while :; do sleep 0.05; done"


@pytest.fixture
def reach(atoll: Shell) -> Iterator[Shell]:
    """A training of two ranks, in the directory of the test."""
    words = ("--name", "reach", "-n", "2", "--max-restarts", "2", "--env", "OWN=mine")
    atoll("run", "-d", *words, "--", "sh", "-c", IDLE)
    atoll.json("wait", "reach", "--for", "target", "--timeout", "30")
    yield atoll
    atoll("rm", "--force", "reach")


def test_a_command_runs_as_its_rank_does(reach: Any) -> None:
    code = 'echo "$OWN $ATOLL_RANK $PWD"; echo oh >&2; exit 7'
    done = reach("exec", "reach", "-r", "1", "--", "sh", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (7, f"mine 1 {reach.cwd}\n", "oh\n")
    done = reach("exec", "reach", "--json", "--", "sh", "-c", code)
    assert json.loads(done.stdout) == {
        "rank": 0, "exitCode": 7, "stdout": f"mine 0 {reach.cwd}\n", "stderr": "oh\n",
        "isCut": False,
    }  # fmt: skip
    killed = reach("exec", "reach", "--", "sh", "-c", "kill -9 $$")
    assert killed.returncode == 128 + signal.SIGKILL
    late = reach("exec", "reach", "--timeout", "0.3", "--", "sh", "-c", IDLE)
    said = "atoll: sh was killed after 0.3 s\n"
    assert (late.returncode, late.stderr) == (124, said)


def test_it_reads_input_when_it_is_asked_to(reach: Any) -> None:
    words = [*ATOLL, "exec", "reach"]
    for flags, read in ((["-i"], b"typed"), ([], b"")):
        done = subprocess.run(
            [*words, *flags, "--", "cat"], input=b"typed", stdout=-1, env=reach.env, check=True
        )
        assert done.stdout == read


def test_a_shell_in_a_rank_has_the_terminal(reach: Any) -> None:
    terminal = reach.in_terminal("exec", "reach", "-it", "-r", "1", "--", "sh", PS1="> ")
    # The child says that it is there: Ctrl-C before its start would end nothing.
    asleep = "sh -c 'echo asleep; exec sleep 600'"
    terminal.press(f"stty size; echo rank-$ATOLL_RANK; {asleep}\n")
    terminal.read_until("rank-1\r\n")
    terminal.read_until("asleep\r\n")
    assert "30 100" in terminal.text
    terminal.press("\x03")  # ends the sleep and not the shell
    terminal.press("exit 5\n")
    assert terminal.code() == 5


def test_a_command_ends_with_its_rank_and_with_its_caller(reach: Any) -> None:
    code = f"echo $$ > pid; {IDLE}"
    for end in (lambda _: reach("kill", "reach", "0"), lambda caller: caller.kill()):
        reach.json("wait", "reach", "--for", "target", "--timeout", "30")
        (reach.cwd / "pid").unlink(missing_ok=True)
        caller = reach.start("exec", "reach", "--", "sh", "-c", code)
        until(lambda: (reach.cwd / "pid").exists() and (reach.cwd / "pid").read_text())
        pid = int((reach.cwd / "pid").read_text())
        end(caller)
        until(lambda pid=pid: not is_alive(pid))
        _, errors = caller.communicate()
        assert caller.returncode == -signal.SIGKILL or errors == "atoll: rank 0 has ended\n"


def test_a_rank_is_killed_by_name_and_comes_back(reach: Any) -> None:
    before = reach.json("status", "reach")["ranks"][1]
    sent = reach.json("kill", "reach", "1")
    assert sent == {
        "name": "reach", "rank": 1, "signal": "SIGKILL", "host": before["node"],
        "pid": before["pid"],
    }  # fmt: skip
    until(lambda: reach.json("status", "reach")["ranks"][1]["restarts"] == 1)
    assert "PID" in reach("status", "reach").stdout
    shown = reach("kill", "reach", "0", "-s", "cont").stdout
    assert shown.startswith("reach: sent SIGCONT to rank 0, process ")


def test_misuse_is_named(reach: Any) -> None:
    refused = reach("kill", "reach", "0", "-s", "NONE")
    assert refused.returncode == 2
    assert "expected the name or number of a signal" in refused.stderr
    assert reach("exec", "reach").returncode == 2
    gone = reach("exec", "reach", "-r", "5", "--", "true")
    assert (gone.returncode, "expected at most 1" in gone.stderr) == (2, True)


def test_in_a_pod_kubectl_enters_with_the_rights_of_the_caller(tmp_path: Path) -> None:
    from atoll.cli.rank_access import _kubectl
    from atoll.core.rank_access import ExecTarget

    shown = tmp_path / "shown"
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {shown}\nexit 3\n")
    kubectl.chmod(0o755)
    place = ["-n", "ns", "pod-0", "-c", "rank"]
    (tmp_path / "kube.json").touch()
    here, elsewhere = (f"--kubeconfig={tmp_path / name}" for name in ("kube.json", "none"))
    for target, flags in (([], []), ([here], [here]), ([elsewhere], [])):
        entry = ExecTarget(rank=0, host="n", pid=None, kubectl=[*target, *place])
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", str(tmp_path), prepend=":")
            assert _kubectl(entry, ("ls", "-l"), has_stdin=True, has_tty=True) == 3
        words = ["exec", "-i", "-t", *flags, *place, "--", "ls", "-l"]
        assert shown.read_text().split() == words


def test_one_plain_rank_is_no_world_unless_it_is_asked_for(atoll: Any) -> None:
    shown = 'echo "${RANK-none} ${WORLD_SIZE-none} ${MASTER_PORT:+port} $REPLICA_RANK"'
    for words, printed in (
        ((), "none none  0"),
        (("--rendezvous", "c10d"), "0 1 port 0"),
        (("-n", "1", "--max", "2"), "0 1 port 0"),
        (("--replicas", "1"), "none none  0"),
    ):
        done = atoll("run", *words, "--", "sh", "-c", shown)
        assert done.stdout == f"[0] {printed}\n", (words, done.stderr)
    two = atoll("run", "--replicas", "2", "--", "sh", "-c", shown)
    assert sorted(two.stdout.splitlines()) == ["[0] none none  0", "[1] none none  1"]
    refused = atoll("run", "--replicas", "2", "-n", "2", "true")
    assert (refused.returncode, "--replicas: not with" in refused.stderr) == (2, True)


def test_a_traceback_is_printed_once(atoll: Any) -> None:
    (atoll.cwd / "bad.py").write_text("def f():\n    raise ValueError('oh')\nf()\n")
    done = atoll("run", "bad.py")
    assert (done.stdout + done.stderr).count("Traceback") == 1
    assert done.stderr.strip().endswith("rank 0: ValueError: oh") or "oh" in done.stderr
