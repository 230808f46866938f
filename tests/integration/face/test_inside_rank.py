"""A rank that calls atoll while no control plane runs: it waits for one and starts none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import atoll
from atoll.backends.local import processes
from atoll.sdk.endpoint import running

from .conftest import PATIENCE_S, stop, told, until

LOOK = """
    import os, sys, time, atoll
    folder, number = sys.argv[1:]
    while not os.path.exists(f"{folder}/go"):
        time.sleep(0.02)
    sys.stderr = open(f"{folder}/told.{number}", "w")
    names = [training.name for training in atoll.Client().list()]
    with open(f"{folder}/draft.{number}", "w") as file:
        file.write(str(names))
    os.rename(f"{folder}/draft.{number}", f"{folder}/seen.{number}")
"""
# Rank 1 clears its environment, and rank 2 also leaves its session and its parent.
RANKS = """
    case $RANK in
    0) exec "$PYTHON" look.py . 0 ;;
    1) env -i ATOLL_STATE_DIR="$ATOLL_STATE_DIR" "$PYTHON" look.py . 1 ;;
    2) (env -i ATOLL_STATE_DIR="$ATOLL_STATE_DIR" setsid "$PYTHON" look.py . 2 &)
       until [ -e seen.2 ]; do sleep 0.05; done ;;
    esac
"""


def test_ranks_wait_for_the_control_plane_and_say_so(
    where: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "look.py").write_text(textwrap.dedent(LOOK))
    monkeypatch.chdir(tmp_path)
    with atoll.Client() as client:
        training = client.deploy_distributed(
            "nested",
            command=["sh", "-c", RANKS],
            env={"PYTHON": sys.executable},
            world_size=3,
        )
        training.wait_until_target_world(PATIENCE_S)
    stop(where, signal.SIGKILL)
    (tmp_path / "go").touch()
    until(lambda: all(_text(tmp_path / f"told.{rank}") for rank in range(3)))
    assert running(where) is None
    assert not _control_planes(where)
    words = f"waits for the control plane of {where} to run again: 'atoll ps' outside of ranks"
    told_by = [_text(tmp_path / f"told.{rank}") for rank in range(3)]
    assert [text.count("\n") for text in told_by] == [1, 1, 1]
    assert [words in text for text in told_by] == [True, True, True]
    assert [text.split(" waits")[0] for text in told_by] == [
        "atoll: rank 0 of nested",
        "atoll: rank 1 of nested",
        "atoll: rank ? of a local training",
    ]
    with atoll.Client() as client:
        training = client.get("nested")
        assert training.wait_until_complete(PATIENCE_S).ready == 3
    assert [_text(tmp_path / f"seen.{rank}") for rank in range(3)] == ["['nested']"] * 3
    assert _control_planes(where) == [told(where)["pid"]]


def test_a_rank_finds_the_control_plane_that_runs_it(where: Path) -> None:
    code = "import atoll; print([training.name for training in atoll.Client().list()])"
    with atoll.Client.local() as client:
        training = client.deploy_distributed("own", command=[sys.executable, "-c", code])
        training.wait_until_complete(PATIENCE_S)
        assert [line.text for line in training.logs()] == ["['own']"]
    assert not where.exists()  # though it is the one that ATOLL_STATE_DIR names here


@pytest.mark.parametrize("words", [("serve", "--port", "0"), ("serve", "--json")])
def test_a_rank_must_not_serve(where: Path, words: tuple[str, ...]) -> None:
    env = {**os.environ, "ATOLL_UID": "0" * 32, "ATOLL_NAME": "nested", "ATOLL_RANK": "3"}
    done = subprocess.run(
        [sys.executable, "-m", "atoll.cli", *words], env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "rank 3 of nested must not run a control plane" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not where.exists()


def test_a_control_plane_outlives_all_that_its_starter_is(where: Path) -> None:
    code = (
        "import atoll, time; atoll.Client().list(); print('started', flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    ) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"started\n"
        pid = int(str(told(where)["pid"]))
        os.killpg(starter.pid, signal.SIGKILL)
        starter.wait()
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert not [n for n in processes.environment_of(pid) if n in (b"ATOLL_UID", b"ATOLL_RANK")]
    with atoll.Client() as client:
        assert client.list() == []
    assert told(where)["pid"] == pid


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _control_planes(where: Path) -> list[int]:
    words = {pid: processes.command_line(pid) for pid in processes.all_pids()}
    return [pid for pid in words if b"serve" in words[pid] and bytes(where) in words[pid]]
