"""`atoll weights`: the list, and a follower for programs that read a folder."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from atoll.cli import weights as cli
from atoll.cli.main import app
from atoll.core.errors import ValidationError
from atoll.weights import Follower, Publisher, api, channel
from atoll.weights.state import Tensors
from tests.support.stores import FaultyStore

ATOLL = [sys.executable, "-m", "atoll.cli"]


def publish(folder: Path, versions: int) -> None:
    with Publisher(folder, full_every=2) as publisher:
        for step in range(versions):
            publisher.publish({"w": np.arange(100, dtype=np.float32) + step}, step=step * 10)


def test_the_list_has_versions_and_followers(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    follower = Follower(tmp_path, name="rollout-7")
    follower.next(number=3)
    done = CliRunner().invoke(app, ["weights", str(tmp_path), "--json"])
    assert done.exit_code == 0, done.output
    channel = json.loads(done.output)
    assert [(row["number"], row["step"]) for row in channel["versions"]] == [
        (4, 20),
        (3, 10),
        (2, 0),
    ]
    (row,) = channel["followers"]
    assert row["name"].startswith("rollout-7.")
    assert (row["number"], row["behind"], row["isFresh"]) == (3, 1, True)
    text = CliRunner().invoke(app, ["weights", str(tmp_path)]).output
    assert "VERSION  STEP" in text
    assert "rollout-7." in text


def test_versions_that_are_deleted_while_they_are_listed_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, 4)

    def fault(what: str, key: str, is_done: bool) -> None:
        if what == "list" and is_done:
            (tmp_path / "log" / "0000000002").unlink(missing_ok=True)

    monkeypatch.setattr(channel, "ObjectStore", FaultyStore)
    monkeypatch.setattr(FaultyStore, "fault", staticmethod(fault))
    assert [each.number for each in channel.read_channel(tmp_path).versions] == [5, 4, 3]


def test_a_follower_on_its_way_in_serves_no_version(tmp_path: Path) -> None:
    publish(tmp_path, 3)
    lease = tmp_path / "lease" / "rollout-8.0123" / "0000000002.joining"
    lease.parent.mkdir(parents=True)
    lease.touch()
    done = CliRunner().invoke(app, ["weights", str(tmp_path), "--json"])
    (row,) = json.loads(done.output)["followers"]
    assert (row["name"], row["number"], row["behind"]) == ("rollout-8.0123", 0, 3)
    assert row["lagS"] is None
    assert "joining" in CliRunner().invoke(app, ["weights", str(tmp_path)]).output


def test_a_channel_without_versions_says_so(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["weights", str(tmp_path)])
    assert done.exit_code == 0
    assert "no version yet" in done.output


def test_a_folder_that_is_not_there_is_refused_and_not_made(tmp_path: Path) -> None:
    for uri in (str(tmp_path / "typo"), (tmp_path / "typo").as_uri()):
        error = CliRunner().invoke(app, ["weights", uri]).exception
        assert isinstance(error, ValidationError)
        assert error.field == "uri"
    assert not (tmp_path / "typo").exists()


def test_follow_writes_a_folder_and_runs_the_command(tmp_path: Path) -> None:
    publish(tmp_path / "channel", 2)
    note = tmp_path / "note"
    command = f'echo "$ATOLL_WEIGHTS_NUMBER $ATOLL_WEIGHTS_STEP $ATOLL_WEIGHTS_PATH" > {note}'
    arguments = ["weights", "follow", str(tmp_path / "channel"), str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments, "--then", command, "--once", "--json"])
    assert done.exit_code == 0, done.output
    path = tmp_path / "out" / "v3"
    assert json.loads(done.output) == {"number": 3, "step": 10, "path": str(path)}
    assert note.read_text() == f"3 10 {path}\n"
    assert (path / "model.safetensors").exists()
    assert CliRunner().invoke(app, [*arguments, "--then", "exit 3", "--once"]).exit_code == 1


def test_follow_with_json_has_nothing_else_on_stdout(tmp_path: Path) -> None:
    publish(tmp_path / "channel", 1)
    done = subprocess.run(
        [
            *ATOLL,
            "weights",
            "follow",
            "./channel",
            "out",
            "--once",
            "--json",
            "--then",
            "echo hello",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["path"] == f"{tmp_path}/out/v2"
    assert done.stderr == "hello\n"


def test_follow_refuses_folders_that_are_not_its_own_before_it_follows(tmp_path: Path) -> None:
    publish(tmp_path / "channel", 1)
    (tmp_path / "mine" / "v1").mkdir(parents=True)
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    for folder in ("mine", "channel", "file/below"):
        done = CliRunner().invoke(
            app, ["weights", "follow", str(tmp_path / "channel"), str(tmp_path / folder)]
        )
        assert isinstance(done.exception, ValidationError), folder
        assert done.exception.field == "folder"
    assert sorted(tmp_path.rglob("*")) == before


def test_follow_refuses_a_channel_that_is_not_there(tmp_path: Path) -> None:
    arguments = ["weights", "follow", str(tmp_path / "typo"), str(tmp_path / "out")]
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, ValidationError)
    assert error.field == "uri"
    assert not [*tmp_path.iterdir()]


def test_follow_says_that_it_waits_and_ctrl_c_drops_its_lease(tmp_path: Path) -> None:
    (tmp_path / "channel").mkdir()
    with subprocess.Popen(
        [*ATOLL, "weights", "follow", "./channel", "out"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "waiting for the first" in process.stderr.readline()
        publish(tmp_path / "channel", 1)
        assert process.stdout.readline() == f"version 2: {tmp_path}/out/v2\n"
        assert [*(tmp_path / "channel" / "lease").rglob("*")]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert "Traceback" not in process.stderr.read()
    assert not [each for each in (tmp_path / "channel").rglob("lease/*/*") if each.is_file()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_with_all_that_it_started(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    publish(tmp_path / "channel", 1)
    command = "trap '' INT; echo started; sleep 1000; echo not reached"
    with subprocess.Popen(
        [*ATOLL, "weights", "follow", "./channel", "out", "--then", command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        while process.stdout.readline() != "started\n":
            pass
        process.send_signal(number)
        assert process.stdout.read() == ""  # to the end: nobody has it open any more
        assert process.wait(timeout=60) == code
    assert not [each for each in (tmp_path / "channel").rglob("lease/*/*") if each.is_file()]


def test_a_version_that_does_not_fit_on_the_disk_is_written_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path / "channel", 1)
    write, full = api._write_version, [True, True]

    def write_or_fail(copy: Tensors, target: Path) -> None:
        if full:
            full.pop()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(copy, target)

    monkeypatch.setattr(api, "_write_version", write_or_fail)
    monkeypatch.setattr(cli, "RETRY_S", 0.0)
    arguments = ["weights", "follow", str(tmp_path / "channel"), str(tmp_path / "out"), "--once"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.stderr.count("version 2 is not in") == 2
    assert "No space left on device" in done.stderr
    assert done.stdout == f"version 2: {tmp_path}/out/v2\n"
