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


def test_an_empty_list_says_so(lone_atoll: Any) -> None:
    assert "no trainings: 'atoll run' starts one" in lone_atoll("ps").stderr
    assert "no training matches" in lone_atoll("ps", "--group", "none").stderr
    assert lone_atoll("ps", "--json").stderr == ""


def test_limits_are_set_on_a_control_plane_that_runs_and_kept(lone_atoll: Any) -> None:
    words = ("run", "-n", "2", "--slots", "1", "--deadline", "1", "--", "true")
    done = lone_atoll(*words)
    assert done.returncode == 124
    assert "0 of 1 slots of" in done.stderr
    assert "2 ranks need 2 slots" in done.stderr
    done = lone_atoll("run", "-n", "2", "--slots", "2", "--", "true")
    assert done.returncode == 0
    assert "slots" not in done.stderr  # it waited for nothing
    limits = {each["name"]: each for each in lone_atoll.json("limits", "--cpu", "1500m")}
    assert (limits["slots"]["total"], limits["cpu"]["total"]) == (2, 1.5)
    assert lone_atoll("stop").returncode == 0
    limits = {each["name"]: each for each in lone_atoll.json("limits")}
    assert (limits["slots"]["total"], limits["cpu"]["total"]) == (2, 1.5)
    hold = ("sh", "-c", "while [ ! -e go ]; do sleep 0.05; done")
    assert lone_atoll("run", "-d", "--name", "a", "--cpu", "1", "--", *hold).returncode == 0
    assert lone_atoll("wait", "--for", "target", "a").returncode == 0
    assert "1 of 1.5 cpu" in lone_atoll("top", "-c", "1").stdout
    assert lone_atoll("run", "-d", "--name", "b", "--cpu", "1", "--", "true").returncode == 0
    until(lambda: "1 of 1.5 CPUs of" in lone_atoll("status", "b").stdout)
    assert lone_atoll("run", "-d", "--name", "c", "--cpu", "1", "--", "true").returncode == 0
    until(lambda: "too little left of 1.5 CPUs: a rank takes 1" in lone_atoll("status", "c").stdout)
    assert lone_atoll("limits", "--cpu", "2").returncode == 0
    for name in "bc":  # they start as soon as the limit allows it
        assert lone_atoll("wait", name).returncode == 0
    (lone_atoll.cwd / "go").touch()
    assert lone_atoll("wait", "a").returncode == 0
    bad = lone_atoll("limits", "--cpu", "lots")
    assert bad.returncode == 2
    assert "cpu" in bad.stderr


def test_what_a_sweep_asks_of_a_control_plane_that_runs_is_not_ignored(lone_atoll: Any) -> None:
    assert lone_atoll("ps").returncode == 0
    done = lone_atoll("sweep", "--slots", "3", "--set", "a=1", "true")
    assert done.returncode == 0, done.stderr
    limits = {each["name"]: each["total"] for each in lone_atoll.json("limits")}
    assert limits["slots"] == 3
    own = lone_atoll.cwd / "own.toml"
    own.write_text("[executors.local]\nslots = 2\n")
    for words in (("run",), ("sweep", "--set", "a=1")):
        done = lone_atoll(*words, "--config", "own.toml", "true")
        assert done.returncode == 0
        assert (
            f"the control plane runs with no atoll.toml: of {own} only [defaults] are"
            in done.stderr
        )
    assert lone_atoll("stop").returncode == 0
    done = lone_atoll("run", "--config", "own.toml", "true")
    assert "the control plane runs with" not in done.stderr


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
