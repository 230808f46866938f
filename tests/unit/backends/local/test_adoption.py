"""The tombstone of a removed training, whatever instant a crash chooses."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from atoll.backends.local import adoption, executor
from atoll.backends.local.executor import LocalBackend
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Training
from atoll.store.sqlite import MemoryStore

TRAINING = Training(
    namespace="default",
    uid="abc",
    spec=TrainingSpec(name="tide", command=["true"], world_size=WorldSize(min=1, target=1, max=1)),
)


def test_purge_that_is_killed_before_it_deletes_is_finished_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / TRAINING.uid
    adoption.write_record(directory, TRAINING)
    (directory / "logs").mkdir()
    monkeypatch.setattr(executor, "delete", lambda directory: None)
    asyncio.run(LocalBackend(tmp_path).purge(TRAINING))
    assert (directory / "logs").exists()
    monkeypatch.undo()
    store = MemoryStore()
    local = LocalBackend(tmp_path)
    asyncio.run(local.start(store))
    assert not directory.exists()
    assert asyncio.run(store.list()) == []
    assert local.notes() == []


def test_tombstone_is_deleted_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / TRAINING.uid
    adoption.write_record(directory, TRAINING)
    adoption.mark_deleted(directory)
    monkeypatch.setattr(adoption.shutil, "rmtree", lambda *args, **options: None)
    adoption.delete(directory)
    assert [path.name for path in directory.iterdir()] == ["removed"]


def test_purge_of_a_training_without_a_directory_leaves_none(tmp_path: Path) -> None:
    asyncio.run(LocalBackend(tmp_path).purge(TRAINING))
    assert list(tmp_path.iterdir()) == []


def test_record_is_private(tmp_path: Path) -> None:
    adoption.write_record(tmp_path / TRAINING.uid, TRAINING)
    assert (tmp_path / TRAINING.uid).stat().st_mode & 0o077 == 0
    assert (tmp_path / TRAINING.uid / "training.json").stat().st_mode & 0o077 == 0
    assert adoption.read_record(tmp_path / TRAINING.uid) == TRAINING
