"""`stop`, `doctor` and `--slots`: the control plane that nobody started by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.conftest import is_alive, until


def test_stop_leaves_the_ranks_and_stop_all_does_not(lone_atoll: Any) -> None:
    assert lone_atoll("stop").stdout == "no control plane runs\n"
    assert (
        lone_atoll("run", "-d", "--name", "a", "--", "sh", "-c", "echo $$; sleep 600").returncode
        == 0
    )
    until(lambda: lone_atoll("logs", "a").stdout)
    rank, server = int(lone_atoll("logs", "a").stdout.split()[-1]), lone_atoll.server_pid()
    done = lone_atoll("stop")
    assert done.returncode == 0
    assert f"stopped the control plane (pid {server}); its ranks keep running" in done.stdout
    assert not is_alive(server)
    assert is_alive(rank)
    assert lone_atoll.json("stop", "--all")["cancelled"] == ["a"]
    assert not is_alive(rank)
    assert lone_atoll.json("stop") == {"pid": None, "cancelled": []}
    # What has ended leaves its logs, and no reason to start a control plane in order to stop it.
    assert lone_atoll("stop", "--all").stdout == "no control plane runs\n"
    assert lone_atoll.json("ps")[0]["phase"] == "cancelled"


def test_stop_is_for_ones_own(lone_atoll: Any) -> None:
    done = lone_atoll("stop", ATOLL_URL="http://127.0.0.1:9")
    assert done.returncode == 1
    assert "ATOLL_URL names a control plane" in done.stderr


def test_slots_are_of_the_control_plane_that_is_started(lone_atoll: Any) -> None:
    words = ("run", "-n", "2", "--slots", "1", "--deadline", "1", "--", "true")
    done = lone_atoll(*words)
    assert done.returncode == 124
    assert "0 of 1 slots of" in done.stderr
    assert lone_atoll("run", "--slots", "1", "--", "true").returncode == 0
    done = lone_atoll("run", "--slots", "2", "--", "true")
    assert done.returncode == 2
    assert "--slots: 2 is not valid: the control plane runs with 1: 'atoll stop'" in done.stderr
    assert lone_atoll("stop").returncode == 0
    assert lone_atoll("run", "-n", "2", "--slots", "2", "--", "true").returncode == 0


def test_doctor_tells_what_is_there_and_starts_nothing(lone_atoll: Any) -> None:
    findings = {each["what"]: each for each in lone_atoll.json("doctor")}
    assert set(findings) >= {
        *(
            "python",
            "store",
            "extra torch",
            "extra kubernetes",
            "gpus",
            "state",
            "disk",
            "capacity",
        ),
        *("files", "shm", "clock", "control plane", "local"),
    }
    assert not lone_atoll.state.exists()
    for each in findings.values():
        assert each["todo"] or each["state"] == "ok", each


def test_doctor_tries_the_store(lone_atoll: Any, tmp_path: Path) -> None:
    done = lone_atoll("doctor", "--uri", f"file://{tmp_path}/store")
    assert done.returncode == 0, done.stdout
    assert "answers" in done.stdout
    assert "supports conditional writes" in done.stdout
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    words = ("doctor", "--uri", "s3://bucket/run")
    bad = lone_atoll(*words, **keys, AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert bad.returncode == 1
    (line,) = [line for line in bad.stdout.splitlines() if line.startswith("bad")]
    assert "store" in line
    assert "Connection refused" in line
    assert "endpoint" in line


def test_a_store_may_be_a_folder_named_from_here(atoll: Any) -> None:
    show = ("--", "sh", "-c", "echo at $ATOLL_RENDEZVOUS_URI")
    done = atoll("run", "--uri", "./my run", *show)
    assert f"at file://{atoll.cwd}/my%20run" in done.stdout, done.stderr
