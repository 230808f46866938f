"""`atoll run` as a user sees it: lines, verdicts, exit codes, and the shell around it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ATOLL, SOURCE, until
from tests.support.finish import finish

SEGFAULT = (
    'echo before $RANK; [ $RANK = 1 ] && echo "index out of range" && kill -SEGV $$; sleep 60'
)


def test_lines_of_all_ranks_are_on_stdout_with_their_rank(atoll: Any) -> None:
    done = atoll("run", "-n", "3", "--", "sh", "-c", "echo hello from $RANK of $WORLD_SIZE")
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == [f"[{r}] hello from {r} of 3" for r in range(3)]
    assert "succeeded: 3 of 3 ranks exited 0" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("-n", "2", "--", "true"), 0, "succeeded"),
        (("-n", "2", "--", "false"), 1, "exited with code 1"),
        (
            ("-n", "1", "--", "sh", "-c", "exit 77"),
            1,
            "rank 0 failed first: it exited with code 77",
        ),
        (("-n", "1", "--", "no-such-program"), 1, "no such command"),
        (("-n", "1", "--", "/etc/passwd"), 2, "this file is not executable"),
        (("-n", "1", "--", "sh", "-c", "exec /etc/passwd"), 1, "exited with code 126"),
        (("-n", "1", "--deadline", "4s", "--", "sleep", "60"), 124, "still running 4 s"),
        (("-n", "2", "--", "sh", "-c", "kill -ABRT $$"), 1, "killed by SIGABRT (aborted)"),
        (("-n", "1", "sh", "-c", "exit 0"), 0, "succeeded"),
    ],
)
def test_exit_code_and_verdict(atoll: Any, words: tuple[str, ...], code: int, told: str) -> None:
    done = atoll("run", *words)
    assert done.returncode == code, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


def test_a_python_script_runs_with_the_callers_python(atoll: Any) -> None:
    (atoll.cwd / "train.py").write_text("import sys; print(sys.executable, sys.argv[1:])")
    done = atoll("run", "-n", "2", "train.py", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    told = f"{sys.executable} ['--lr', '0.1']"
    assert sorted(done.stdout.splitlines()) == [f"[0] {told}", f"[1] {told}"]
    assert re.search(r"train-\w{5} succeeded", done.stderr)


def test_a_failure_names_the_first_failing_rank_and_shows_its_last_lines(atoll: Any) -> None:
    done = atoll("run", "-n", "3", "--", "sh", "-c", SEGFAULT)
    assert done.returncode == 1
    report = done.stderr[done.stderr.index(" failed: ") :]
    assert "rank 1 failed first: it was killed by SIGSEGV (segmentation fault), exit code 139" in (
        report
    )
    assert "ranks 0, 2 were stopped by atoll" in report
    assert "last lines of rank 1:\n  | before 1\n  | index out of range\n" in report


def test_json_lines_tell_the_whole_run(atoll: Any) -> None:
    done = atoll("run", "-n", "2", "--json", "--name", "json-run", "--", "sh", "-c", "echo $RANK")
    assert done.returncode == 0
    told = [json.loads(line) for line in done.stdout.splitlines()]
    logs = [(line["rank"], line["text"]) for line in told if line["type"] == "log"]
    assert sorted(logs) == [(0, "0"), (1, "1")]
    worlds = [line for line in told if line["type"] == "world"]
    assert worlds[-1]["phase"] == "succeeded"
    assert worlds[-1]["ready"] == worlds[-1]["target"] == 2
    result = told[-1]
    assert result["type"] == "result"
    assert (result["name"], result["exitCode"], result["rootCause"]) == ("json-run", 0, None)
    assert [e["exitCode"] for e in result["rankExits"]] == [0, 0]


def test_ranks_run_as_the_shell_would_run_them(atoll: Any, tmp_path: Path) -> None:
    """Same directory, same programs, same environments, whatever shell started the server."""
    assert atoll("ps").returncode == 0  # the server runs, with another environment
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "say").write_text("#!/bin/sh\necho $(pwd) $VIRTUAL_ENV $PYTHONPATH $MINE $HOME2\n")
    (tools / "say").chmod(0o755)
    changed = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "VIRTUAL_ENV": "/some/venv",
        "PYTHONPATH": f"{tools}:{os.environ.get('PYTHONPATH', '')}",
        "HOME2": "passed",
    }
    done = atoll("run", "-e", "MINE=x=y", "-e", "HOME2", "--", "say", **changed)
    assert done.returncode == 0, done.stderr
    path = f"{SOURCE}/atoll/agent/hook:{changed['PYTHONPATH']}"  # the hook of `atoll stacks`
    assert done.stdout == f"[0] {tmp_path} /some/venv {path} x=y passed\n"


def test_the_users_own_env_wins_over_the_shells(atoll: Any) -> None:
    done = atoll("run", "-e", "VIRTUAL_ENV=/mine", "--", "sh", "-c", "echo $VIRTUAL_ENV")
    assert done.stdout == "[0] /mine\n"


def test_keys_of_the_store_reach_the_ranks_unmixed(lone_atoll: Any) -> None:
    """The control plane was started where there were others."""
    for name in [name for name in lone_atoll.env if name.startswith("AWS_")]:
        del lone_atoll.env[name]
    assert lone_atoll("ps", AWS_SESSION_TOKEN="old", AWS_ACCESS_KEY_ID="old").returncode == 0
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ENDPOINT_URL": "http://x"}
    show = ("sh", "-c", "env | grep ^AWS_")
    done = lone_atoll("run", "--uri", "s3://bucket/run", "--", *show, **keys)
    assert sorted(done.stdout.split()[1::2]) == sorted(f"{k}={v}" for k, v in keys.items())
    (lone_atoll.cwd / "keys").write_text("AWS_ACCESS_KEY_ID=f\n")
    words = ("run", "-e", "AWS_SECRET_*", "--env-file", "keys", "--", *show)
    done = lone_atoll(*words, AWS_SECRET_ACCESS_KEY="b")
    assert sorted(done.stdout.split()[1::2]) == ["AWS_ACCESS_KEY_ID=f", "AWS_SECRET_ACCESS_KEY=b"]


def test_what_waits_for_room_is_given_up_at_the_timeout(lone_atoll: Any) -> None:
    with lone_atoll.start("serve", "--port", "0", "--slots", "1") as server:
        assert server.stdout
        assert json.loads(server.stdout.readline())["url"].startswith("http://127.0.0.1:")
        done = lone_atoll("run", "-n", "2", "--deadline", "0.5", "--", "true")
        assert done.returncode == 124
        assert "not started within 0.5 s" in done.stderr
        assert "capacity for 1 of 2 ranks" in done.stderr
        lone_atoll.stop()
        assert server.wait() == 0


def test_rm_leaves_no_record(atoll: Any) -> None:
    assert atoll("run", "--rm", "--name", "short-lived", "--", "true").returncode == 0
    assert atoll("status", "short-lived").returncode == 1


def test_a_lost_rank_above_min_does_not_fail_the_run(atoll: Any) -> None:
    script = "[ $RANK = 2 ] && exit 9; sleep 0.5"
    done = atoll("run", "-n", "3", "--min", "2", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert "lost: rank 2" in done.stderr


def test_follows_on_over_a_killed_control_plane(lone_atoll: Any) -> None:
    """Its ranks outlive it; the client starts another one, and every line comes exactly once."""
    script = "import time\nfor i in range(30): print(i, flush=True); time.sleep(0.1)"
    with lone_atoll.start("run", "-n", "2", "--", sys.executable, "-c", script) as running:
        assert running.stdout
        first = [running.stdout.readline() for _ in range(4)]
        os.kill(lone_atoll.server_pid(), signal.SIGKILL)
        out, err = finish(running, 60)
    assert running.returncode == 0, err
    lines = [*first, *out.splitlines(keepends=True)]
    assert sorted(lines) == sorted(f"[{r}] {i}\n" for r in range(2) for i in range(30))


def test_a_reader_that_leaves_does_not_stop_the_training(atoll: Any) -> None:
    with atoll.start(
        "run", "--name", "unread", "--", "sh", "-c", "echo a; sleep 0.3; echo b"
    ) as it:
        assert it.stdout
        assert it.stderr
        assert it.stdout.readline() == "[0] a\n"
        it.stdout.close()
        assert it.wait() == 0
        err = it.stderr.read()
    assert "nobody reads the output any more" in err
    assert "Traceback" not in err


def test_sigterm_cancels(atoll: Any) -> None:
    with atoll.start("run", "--name", "terminated", "--", "sh", "-c", "echo up; sleep 60") as it:
        assert it.stdout
        assert it.stdout.readline() == "[0] up\n"
        it.send_signal(signal.SIGTERM)
        assert it.wait() == 143
    assert atoll.json("status", "terminated")["phase"] == "cancelled"


def test_more_ranks_than_the_machine_can_hold_are_refused_with_the_figures(
    lone_atoll: Any,
) -> None:
    """As under `ulimit -n 500`: the supervisor needs three files a rank."""
    limited = ["sh", "-c", 'ulimit -n 500; exec "$@"', "sh", *ATOLL]
    run = ("run", "--name", "many", "-n", "300", "--", "true")
    done = subprocess.run(
        [*limited, *run], env=lone_atoll.env, cwd=lone_atoll.cwd, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "300 is not valid" in done.stderr
    assert "can hold 145 ranks at most: RLIMIT_NOFILE (hard) is 500, 3 files a rank" in done.stderr
    assert lone_atoll.json("ps") == []
    words = ("run", "--name", "few", "-n", "2", "--max", "300", "--", "sleep", "1000")
    with lone_atoll.start(*words) as following:
        until(lambda: lone_atoll.json("ps"))
        done = lone_atoll("scale", "few", "300")
        assert done.returncode == 2
        assert "can hold 145 ranks at most" in done.stderr
        following.terminate()
