"""Gangs that are large for the machine: refused, waited for, and stoppable while they start."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.support.control_plane import ControlPlane, journal_records, wait_for
from tests.support.in_process import plane as in_process

from atoll.backends.local import processes
from atoll.backends.local.capacity import Bound, Machine
from atoll.backends.local.executor import LocalBackend
from atoll.core.errors import ValidationError
from atoll.core.phase import Phase
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Training

MANY = 600


def begun(plane: ControlPlane, ranks: int, **options: object) -> Training:
    """A training of which some ranks have been forked."""
    name = plane.create(["sleep", "1000"], ranks, max=ranks, **options)
    training = plane.get(name)

    def is_begun() -> bool:
        try:
            _, supervisor = plane.supervision_pids(training)
        except StopIteration:
            return False
        return len(processes.children(supervisor)) > 10

    wait_for(is_begun)
    return training


def starts(plane: ControlPlane, training: Training) -> list[int]:
    records = journal_records(plane.directory(training) / "journal")
    return [r["rank"] for r in records if r["t"] == "start"]


def test_training_can_be_cancelled_while_its_ranks_are_being_forked(plane: ControlPlane) -> None:
    training = begun(plane, MANY)
    plane.ask(training.name, cancel=True)
    directory = plane.directory(training)
    assert plane.until_over(training.name).status.phase == Phase.CANCELLED
    assert not directory.joinpath("journal").exists() or starts(plane, training) == []
    wait_for(lambda: not plane.left())


def test_training_can_be_scaled_down_while_its_ranks_are_being_forked(
    plane: ControlPlane,
) -> None:
    training = begun(plane, MANY, min=2)
    plane.ask(training.name, target=2)
    plane.until_ready(training.name, 2)
    assert starts(plane, training) == [0, 1]


def test_more_ranks_than_the_machine_can_ever_hold_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Machine, "most", lambda self: Bound(100, "kernel.pid_max is 164"))
    backend = LocalBackend(tmp_path)
    spec = TrainingSpec(
        name="a", command=["true"], world_size=WorldSize(min=1, target=100, max=500)
    )
    backend.check(spec)
    with pytest.raises(ValidationError, match=r"can hold 100 ranks at most: kernel.pid_max is 164"):
        backend.check(replace(spec, world_size=replace(spec.world_size, target=101)))


def test_room_that_the_machine_lacks_now_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = [Bound(1, "100 of 165 processes are in use")]
    monkeypatch.setattr(Machine, "free", lambda self: room[0])

    async def check() -> None:
        async with in_process(tmp_path) as control:
            world = WorldSize(min=3, target=3, max=8)
            command = ["sh", "-c", f"while [ ! -e {tmp_path}/end ]; do sleep 0.02; done"]
            made = await control.create(name="a", command=command, world_size=world)
            words = (
                f"start gate: capacity for 1 of 3 ranks; {os.uname().nodename} has too little left"
            )
            told = await control.until(
                made, lambda t: bool(t.status.ranks) and words in t.status.ranks[0].message
            )
            assert told.status.ranks[0].message.endswith("100 of 165 processes are in use")
            room[0] = Bound(3, "")
            await control.until(made, lambda t: t.status.world.ready == 3)
            room[0] = Bound(0, "all processes are in use")
            await control.scale(made, 5)
            told = await control.until(made, lambda t: len(t.status.ranks) == 5)
            assert told.status.world.ready == 3  # what runs keeps its place
            assert told.status.ranks[4].message.startswith("no capacity: ")
            room[0] = Bound(2, "")
            await control.until(made, lambda t: t.status.world.ready == 5)
            (tmp_path / "end").touch()
            over = await control.until(made, lambda t: t.status.phase.is_terminal)
            assert over.status.phase is Phase.SUCCEEDED

    asyncio.run(check())
