"""A store that is lost, empty or older than the ranks destroys nothing of them."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest
from tests.support.control_plane import (
    ControlPlane,
    Refused,
    journal_records,
    make_spec,
    serving,
    wait_for,
)
from tests.support.small_disk import fill, small_disk

from atoll.backends.local import processes
from atoll.core.errors import Permanent
from atoll.core.spec import Source
from atoll.core.status import Training
from atoll.main import build
from atoll.sdk import endpoint

UNTIL_TOLD = "echo up; while [ ! -e {folder}/end ]; do sleep 0.02; done; echo bye; exit $RANK"


def started(plane: ControlPlane, folder: Path, ranks: int = 2, **options: object) -> Training:
    name = plane.create(UNTIL_TOLD.format(folder=folder), ranks, **{"min": 1, **options})
    wait_for(lambda: len(plane.log_lines(name)) == ranks)
    return plane.until_ready(name, ranks)


def lose_store(plane: ControlPlane) -> None:
    for file in plane.state.glob("atoll.db*"):
        file.unlink()


def copy_store(plane: ControlPlane, copy: Path) -> None:
    source, target = sqlite3.connect(plane.state / "atoll.db"), sqlite3.connect(copy)
    source.backup(target)
    source.close()
    target.close()


def pids(plane: ControlPlane, training: Training) -> list[int]:
    """The ranks that run, by the journal; each is the process that was started."""
    records = journal_records(plane.directory(training) / "journal")
    starts = [r for r in records if r["t"] == "start"]
    return [r["pid"] for r in starts if processes.is_running(r["pid"], r["startTicks"])]


def said(plane: ControlPlane) -> str:
    return (plane.state.parent / f"{plane.state.name}.log").read_text()


def ends_well(plane: ControlPlane, training: Training, folder: Path, ranks: int = 2) -> None:
    (folder / "end").touch()
    ended = plane.until_over(training.name)
    assert ended.uid == training.uid
    assert [(e.rank, e.exit_code) for e in ended.status.rank_exits] == [
        (rank, rank) for rank in range(ranks)
    ]
    lines = [(line.rank, line.text) for line in plane.log_lines(training.name)]
    assert sorted(lines) == [(rank, text) for rank in range(ranks) for text in ("bye", "up")]
    plane.until_released(training.name)
    wait_for(lambda: not plane.left())


@pytest.mark.parametrize("lost", ["all of it", "what was in it", "its newest writes"])
def test_running_training_is_adopted_when_the_store_is_lost(
    plane: ControlPlane, tmp_path: Path, lost: str
) -> None:
    training = started(plane, tmp_path, deadline_s=3600.0)
    before = pids(plane, training)
    plane.kill()
    if lost == "its newest writes":
        (plane.state / "atoll.db-wal").unlink()
    else:
        lose_store(plane)
    if lost == "what was in it":
        (plane.state / "atoll.db").touch()
    plane.start()
    adopted = plane.until_ready(training.name, 2)
    assert pids(plane, training) == before
    assert adopted.spec == training.spec
    assert adopted.created_at == training.created_at
    assert adopted.status.gate_opened_at == training.status.gate_opened_at
    assert [r.started_at for r in adopted.status.ranks] == [
        r.started_at for r in training.status.ranks
    ]
    assert "Adopted" in plane.reasons(training.name)
    ends_well(plane, training, tmp_path)


def test_adopted_training_can_be_scaled_and_cancelled(plane: ControlPlane, tmp_path: Path) -> None:
    training = started(plane, tmp_path, 3)
    plane.ask(training.name, target=2)
    plane.until(training.name, lambda t: sum(r.is_alive for r in t.status.ranks) == 2)
    plane.kill()
    lose_store(plane)
    plane.start()
    adopted = plane.until_ready(training.name, 2)
    assert adopted.spec.world_size.target == 2
    plane.ask(training.name, target=3)
    again = plane.until_ready(training.name, 3)
    assert [r.attempt for r in again.status.ranks] == [0, 0, 1]
    plane.ask(training.name, cancel=True)
    assert plane.until_over(training.name).status.phase == "cancelled"


def test_shipped_code_is_adopted_too(plane: ControlPlane, tmp_path: Path) -> None:
    code = UNTIL_TOLD.format(folder=tmp_path).encode()
    spec = msgspec.structs.replace(
        make_spec("true", 1),
        command=None,
        source=Source(kind="shell", content=code, filename="go.sh"),
        max_restarts=1,
    )
    plane.call("create", spec=msgspec.to_builtins(spec), key=spec.name)
    training = plane.until_ready(spec.name, 1)
    plane.kill()
    lose_store(plane)
    plane.start()
    plane.ask(training.name, target=2)
    wait_for(lambda: [line.text for line in plane.log_lines(training.name)] == ["up", "up"])
    assert plane.until_ready(training.name, 2).spec.source == training.spec.source


def test_exits_and_verdicts_outlive_the_store(plane: ControlPlane, tmp_path: Path) -> None:
    over = plane.until_released(plane.create("echo words; exit 3"))
    training = started(plane, tmp_path)
    plane.kill()
    (tmp_path / "end").touch()
    wait_for(lambda: not pids(plane, training))
    lose_store(plane)
    plane.start()
    assert plane.until_released(over.name).status == over.status
    assert [line.text for line in plane.log_lines(over.name)] == ["words"]
    ends_well(plane, training, tmp_path)


def test_older_copy_of_the_store_goes_on_from_the_files(
    plane: ControlPlane, tmp_path: Path
) -> None:
    """Since the copy, one training was scaled, one has ended, and one was created."""
    scaled = started(plane, tmp_path)
    folder = tmp_path / "other"
    folder.mkdir()
    over = started(plane, folder)
    copy_store(plane, tmp_path / "copy.db")
    plane.ask(scaled.name, target=3)
    plane.until_ready(scaled.name, 3)
    (folder / "end").touch()
    over = plane.until_released(over.name)
    new = started(plane, tmp_path)
    before = [*pids(plane, scaled), *pids(plane, new)]
    plane.kill()
    lose_store(plane)
    shutil.copy(tmp_path / "copy.db", plane.state / "atoll.db")
    plane.start()
    assert plane.until_ready(scaled.name, 3).spec.world_size.target == 3
    plane.until_ready(new.name, 2)
    assert [*pids(plane, scaled), *pids(plane, new)] == before
    assert plane.until_released(over.name).status == over.status
    plane.ask(scaled.name, target=2)
    plane.until(scaled.name, lambda t: sum(r.is_alive for r in t.status.ranks) == 2)
    plane.restart()  # the files are not taken for newer once more
    assert plane.get(scaled.name).spec.world_size.target == 2


def test_removed_training_is_not_resurrected(plane: ControlPlane) -> None:
    training = plane.until_released(plane.create("exit 0"))
    plane.ask(training.name, delete=True)
    plane.until_removed(training.name)
    plane.kill()
    lose_store(plane)
    plane.start()
    assert plane.call("names") == []
    assert not plane.directory(training).exists()


def test_removal_that_a_crash_interrupted_is_finished(plane: ControlPlane, tmp_path: Path) -> None:
    """The record is gone and the directory is still there, even with ranks that run."""
    training = started(plane, tmp_path)
    plane.kill()
    lose_store(plane)
    (plane.directory(training) / "removed").touch()
    plane.start()
    wait_for(lambda: not plane.left())
    assert plane.call("names") == []
    assert not plane.directory(training).exists()


@pytest.mark.parametrize("record", [None, b"", b'{"namespace": 7}'], ids=["none", "empty", "odd"])
def test_gang_without_a_sound_record_is_set_aside(
    plane: ControlPlane, tmp_path: Path, record: bytes | None
) -> None:
    training = started(plane, tmp_path)
    before, directory = pids(plane, training), plane.directory(training)
    plane.kill()
    lose_store(plane)
    (directory / "training.json").unlink()
    if record is not None:
        (directory / "training.json").write_bytes(record)
    plane.start()
    assert plane.call("names") == []
    assert pids(plane, training) == before
    assert f"{directory}/removed" in said(plane)
    assert [str(directory) in text for text in plane.call("quarantine")] == [True]
    (directory / "removed").touch()  # as that line says
    plane.restart()
    wait_for(lambda: not plane.left())
    assert not directory.exists()


def test_gang_whose_name_is_taken_is_set_aside(plane: ControlPlane, tmp_path: Path) -> None:
    first, second = started(plane, tmp_path), started(plane, tmp_path)
    before = [pids(plane, training) for training in (first, second)]
    plane.kill()
    lose_store(plane)
    record = plane.directory(second) / "training.json"
    record.write_text(record.read_text().replace(f'"{second.name}"', f'"{first.name}"'))
    plane.start()
    assert plane.call("names") == [first.name]
    assert "exists" in plane.call("quarantine")[0]
    assert [pids(plane, training) for training in (first, second)] == before


def test_training_that_may_have_run_is_not_started_again(
    plane: ControlPlane, tmp_path: Path
) -> None:
    training = plane.until_released(plane.create(f"echo ran >> {tmp_path}/ran"))
    plane.kill()
    lose_store(plane)
    record = plane.directory(training) / "training.json"
    values = json.loads(record.read_bytes())
    del values["status"]["phase"]
    record.write_text(json.dumps(values))
    plane.start()
    assert plane.call("names") == []
    assert "may have run already" in plane.call("quarantine")[0]
    assert (tmp_path / "ran").read_text().split() == ["ran"]


def test_gang_of_a_known_training_without_a_record_gets_one(
    plane: ControlPlane, tmp_path: Path
) -> None:
    """As one that a release without such records has started."""
    training = started(plane, tmp_path)
    plane.kill()
    (plane.directory(training) / "training.json").unlink()
    plane.start()
    plane.kill()
    lose_store(plane)
    plane.start()
    plane.until_ready(training.name, 2)
    ends_well(plane, training, tmp_path)


def test_state_directory_deleted_under_a_control_plane_leaves_ranks_alone(
    plane: ControlPlane, tmp_path: Path
) -> None:
    training = started(plane, tmp_path)
    before = pids(plane, training)
    shutil.rmtree(plane.state)
    try:
        with pytest.raises(Refused, match="is gone"):
            plane.create("exit 0")
        with pytest.raises(Refused, match="is gone"):
            plane.ask(training.name, cancel=True)
        wait_for(lambda: "is gone" in said(plane))
        assert not plane.state.exists()
        assert all(os.path.exists(f"/proc/{pid}") for pid in before)
    finally:
        for pid in before:
            processes.kill(pid)


def test_full_disk_without_a_token_or_any_state_is_refused_and_nothing_is_touched(
    tmp_path: Path,
) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, "size=2m"):
        with serving(disk / "state") as plane:
            training = plane.until_released(plane.create("echo words"))
        fill(disk)
        before = sorted(path.name for path in plane.state.iterdir())
        for where in (plane.state, disk / "new"):
            with pytest.raises(Permanent, match=f"cannot write to {where}: No space left"):
                build(where)
        with pytest.raises(Permanent, match=f"cannot write to {plane.state}: No space left"):
            endpoint.start(plane.state)
        assert sorted(path.name for path in plane.state.iterdir()) == before
        (disk / "filler").unlink()
        with serving(disk / "state") as plane:
            assert plane.get(training.name) == training
