"""A machine that is short of something for a while: it is told, waited for, and gone on from."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.support.control_plane import journal_records
from tests.support.in_process import Plane, plane

from atoll.backends.local import supervisor_client
from atoll.backends.local.liveness import pair_of
from atoll.core.phase import Phase
from atoll.core.spec import WorldSize
from atoll.core.status import Training

SHORT_STARTS = 7  # more than a supervisor that keeps dying is given


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are as many as they are, and short."""
    monkeypatch.setattr(supervisor_client, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervisor_client, "MAX_PAUSE_S", 0.2)


def waits_for(text: str) -> Any:
    return lambda training: any(text in rank.message for rank in training.status.ranks)


async def ended_well(control: Plane, made: Training) -> None:
    over = await control.until(made, lambda t: t.status.phase.is_terminal)
    assert over.status.phase is Phase.SUCCEEDED, over.status.message
    assert (await control.logs(over)).count("ran") == over.spec.world_size.target


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE])
def test_supervisor_that_cannot_be_forked_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real, starts = subprocess.Popen, []
    is_told = asyncio.Event()

    def popen(*words: Any, **options: Any) -> Any:
        starts.append(words)
        if len(starts) <= SHORT_STARTS or not is_told.is_set():
            raise OSError(number, os.strerror(number))
        return real(*words, **options)

    monkeypatch.setattr(supervisor_client.subprocess, "Popen", popen)

    async def check() -> None:
        async with plane(tmp_path) as control:
            world = WorldSize(min=2, target=2, max=2)
            made = await control.create(name="a", command=["echo", "ran"], world_size=world)
            await control.until(made, waits_for(os.strerror(number)))
            is_told.set()
            await ended_well(control, made)

    asyncio.run(check())


@pytest.mark.parametrize(
    "death",
    [
        f"raise OSError({errno.EAGAIN}, {os.strerror(errno.EAGAIN)!r})",
        "os.kill(os.getpid(), 9)",
    ],
    ids=["no process", "killed"],
)
def test_supervisor_that_dies_of_a_shortage_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: str
) -> None:
    short = (
        f"import os; path = {str(tmp_path / 'starts')!r}; open(path, 'a').write('x')\n"
        f"is_told = os.path.exists({str(tmp_path / 'told')!r})\n"
        f"if os.path.getsize(path) <= {SHORT_STARTS} or not is_told: {death}\n"
    )
    monkeypatch.setattr(
        supervisor_client, "SUPERVISOR_CODE", short + supervisor_client.SUPERVISOR_CODE
    )

    async def check() -> None:
        async with plane(tmp_path) as control:
            world = WorldSize(min=1, target=1, max=1)
            made = await control.create(name="a", command=["echo", "ran"], world_size=world)
            await control.until(made, waits_for("waiting for the machine"))
            (tmp_path / "told").touch()
            await ended_well(control, made)

    asyncio.run(check())


def test_ranks_that_cannot_be_forked_for_a_while(tmp_path: Path) -> None:
    async def check() -> None:
        async with plane(tmp_path) as control:
            end = tmp_path / "end"
            script = f"echo ran; while [ ! -e {end} ]; do sleep 0.02; done"
            world = WorldSize(min=1, target=1, max=8)
            made = await control.create(name="a", command=["sh", "-c", script], world_size=world)
            await control.until(made, lambda t: t.status.world.ready == 1)
            supervisor = pair_of(control.root / made.uid).supervisor
            assert supervisor is not None
            used = len(os.listdir(f"/proc/{supervisor.pid}/fd"))
            limits = resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE)
            few = (used + 4, limits[1])
            resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, few)
            await control.scale(made, 5)
            told = await control.until(made, waits_for("cannot start 4 ranks"))
            assert [r.phase for r in told.status.ranks] == ["Running", *["Pending"] * 4]
            assert "Too many open files" in told.status.ranks[4].message
            resource.prlimit(supervisor.pid, resource.RLIMIT_NOFILE, limits)
            await control.until(made, lambda t: t.status.world.ready == 5)
            records = journal_records(control.root / made.uid / "journal")
            end.touch()
            over = await control.until(made, lambda t: t.status.phase.is_terminal)
            assert (await control.logs(over)).count("ran") == 5
            starts = [record["rank"] for record in records if record["t"] == "start"]
            assert sorted(starts) == [0, 1, 2, 3, 4]

    asyncio.run(check())


def test_training_that_waits_for_the_machine_can_be_cancelled_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def popen(*words: Any, **options: Any) -> Any:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(supervisor_client.subprocess, "Popen", popen)

    async def check() -> None:
        async with plane(tmp_path) as control:
            world = WorldSize(min=2, target=2, max=2)
            made = await control.create(name="a", command=["echo", "ran"], world_size=world)
            await control.until(made, waits_for("Resource temporarily unavailable"))
            await control.delete(made)

    asyncio.run(check())
