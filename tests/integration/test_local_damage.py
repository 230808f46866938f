"""Files of a local training that somebody deletes or damages while its ranks run.

Its supervisor knows all of them, and writes them again. So no rank is taken for dead, no end goes
unseen, and a training can always be removed. There is a training for each kind of damage, and one
control plane for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shlex
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from tests.support.control_plane import ControlPlane, wait_for

from atoll.agent.records import Facts
from atoll.backends.local.supervisor_client import SupervisorClient
from atoll.core.status import Training

RANKS = 2
SCRIPT = "echo up; read code < {folder}/$RANK; echo bye; exit $code"


def empty(path: Path) -> None:
    path.write_bytes(b"")


def truncate(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def spoil(path: Path) -> None:
    path.write_bytes(b"\xff garbage\n" * 100)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def replace_by_directory(path: Path) -> None:
    while not path.is_dir():  # it may be restored in between
        path.unlink(missing_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir()


def replace_by_other_file(path: Path, data: bytes = b"{}") -> None:
    draft = path.with_name("another")
    draft.write_bytes(data)
    draft.rename(path)


def go_back(path: Path) -> None:
    """As a backup of an earlier time, put in its place."""
    replace_by_other_file(path, path.read_bytes().splitlines(keepends=True)[0])


def delete(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def delete_content(path: Path) -> None:
    for each in path.iterdir():
        delete(each)


KINDS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "journal deleted": ("journal", delete),
    "journal emptied": ("journal", empty),
    "journal truncated": ("journal", truncate),
    "journal garbage": ("journal", spoil),
    "journal zeros": ("journal", zero),
    "journal a directory": ("journal", replace_by_directory),
    "journal of an earlier time": ("journal", go_back),
    "desired state deleted": ("desired.json", delete),
    "desired state emptied": ("desired.json", empty),
    "desired state truncated": ("desired.json", truncate),
    "desired state another document": ("desired.json", replace_by_other_file),
    "desired state a directory": ("desired.json", replace_by_directory),
    "record deleted": ("training.json", delete),
    "record garbage": ("training.json", spoil),
    "record a directory": ("training.json", replace_by_directory),
    "lock deleted": ("lock", delete),
    "lock another file": ("lock", replace_by_other_file),
    "socket deleted": ("control", delete),
    "socket another file": ("control", replace_by_other_file),
    "mark deleted": ("watchdog", delete),
    "mark garbage": ("watchdog", spoil),
    "log of the supervisor deleted": ("supervisor.log", delete),
    "logs deleted": ("logs", delete),
    "errors deleted": ("errors", delete),
    "all files deleted": ("", delete_content),
    "directory deleted": ("", delete),
}


def begin(
    plane: ControlPlane, folder: Path, kinds: Iterable[str] = KINDS, **options: object
) -> dict[str, Training]:
    """All ranks run, and wait to be told their exit code."""
    names = {}
    for kind in kinds:
        (folder / kind).mkdir()
        for rank in range(RANKS + 1):
            os.mkfifo(folder / kind / str(rank))
        names[kind] = plane.create(script(folder / kind), RANKS, **options)
    for name in names.values():
        plane.until_ready(name, RANKS)
        wait_for(lambda name=name: len(plane.log_lines(name)) == RANKS)
    return {kind: plane.get(name) for kind, name in names.items()}


def script(folder: Path) -> str:
    return SCRIPT.format(folder=shlex.quote(str(folder)))


def tell(folder: Path, rank: int, code: int) -> None:
    """The rank exits with this code, as soon as it listens."""

    def is_told() -> bool:
        try:
            pipe = os.open(folder / str(rank), os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return False
        os.write(pipe, f"{code}\n".encode())
        os.close(pipe)
        return True

    wait_for(is_told)


def damage(plane: ControlPlane, trainings: dict[str, Training]) -> None:
    for kind, training in trainings.items():
        name, act = KINDS[kind]
        act(plane.directory(training) / name)


def nothing_is_left(plane: ControlPlane, trainings: Iterable[Training]) -> None:
    uids = [training.uid for training in trainings]
    wait_for(lambda: not plane.left_of(*uids))


def test_an_end_is_seen_and_told_as_it_was(plane: ControlPlane, tmp_path: Path) -> None:
    trainings = begin(plane, tmp_path)
    damage(plane, trainings)
    for kind in trainings:
        tell(tmp_path / kind, 1, 7)
    told = {}
    for kind, training in trainings.items():
        status = plane.until_over(training.name).status
        root = status.root_cause and status.root_cause.rank
        said = [line.text for line in plane.log_lines(training.name) if line.rank == 1]
        told[kind] = (root, [e.exit_code for e in status.rank_exits], said[-1:])
    assert told == dict.fromkeys(KINDS, (1, [143, 7], ["bye"]))
    for training in trainings.values():
        plane.until_released(training.name)
    nothing_is_left(plane, trainings.values())


def test_ranks_that_run_are_found_by_a_control_plane_that_starts_later(
    plane: ControlPlane, tmp_path: Path
) -> None:
    trainings = begin(plane, tmp_path, min=1)
    plane.kill()
    damage(plane, trainings)
    plane.start()
    for training in trainings.values():
        plane.ask(training.name, target=RANKS + 1)  # so that its files are needed
    started = {}
    for kind, training in trainings.items():
        again = plane.until_ready(training.name, RANKS + 1)
        started[kind] = [rank.started_at for rank in again.status.ranks][:RANKS]
    before = {kind: [r.started_at for r in t.status.ranks] for kind, t in trainings.items()}
    assert started == before
    for kind in trainings:
        for rank in range(RANKS + 1):
            tell(tmp_path / kind, rank, 0)
    ended = {}
    for kind, training in trainings.items():
        status = plane.until_over(training.name).status
        ended[kind] = (status.phase, [e.restart_count for e in status.rank_exits])
    assert ended == dict.fromkeys(KINDS, ("succeeded", [0] * (RANKS + 1)))
    for training in trainings.values():
        plane.until_released(training.name)
    nothing_is_left(plane, trainings.values())


def test_all_that_ends_while_nobody_looks_is_known_later(
    plane: ControlPlane, tmp_path: Path
) -> None:
    trainings = begin(plane, tmp_path)
    plane.kill()
    damage(plane, trainings)
    for kind in trainings:
        for rank in range(RANKS):
            tell(tmp_path / kind, rank, 0)
    nothing_is_left(plane, trainings.values())
    plane.start()
    phases = {kind: plane.until_over(t.name).status.phase for kind, t in trainings.items()}
    assert phases == dict.fromkeys(KINDS, "succeeded")


def test_a_training_can_be_removed(plane: ControlPlane, tmp_path: Path) -> None:
    trainings = begin(plane, tmp_path)
    damage(plane, trainings)
    for training in trainings.values():
        plane.ask(training.name, delete=True)
    for training in trainings.values():
        plane.until_removed(training.name)
    nothing_is_left(plane, trainings.values())
    assert [kind for kind, t in trainings.items() if plane.directory(t).exists()] == []


@pytest.mark.parametrize("act", [delete, replace_by_other_file])
def test_a_socket_that_is_lost_before_its_supervisor_runs_is_made_again(
    plane: ControlPlane, tmp_path: Path, act: Callable[[Path], None]
) -> None:
    name = plane.create("exec sleep 1000", RANKS, min=1)
    path = plane.directory(plane.get(name)) / "control"
    wait_for(path.exists)
    act(path)
    plane.until_ready(name, RANKS)
    plane.restart()
    plane.ask(name, target=RANKS + 1)
    plane.until_ready(name, RANKS + 1)
    wait_for(path.is_socket)


def test_a_wish_reaches_a_supervisor_that_has_lost_its_socket(
    plane: ControlPlane, tmp_path: Path
) -> None:
    (training,) = begin(plane, tmp_path, ["one"]).values()
    plane.kill()
    directory = plane.directory(training)
    (directory / "control").unlink()

    async def desired() -> Facts:
        gang = SupervisorClient(directory, lambda: None)
        await gang.apply({**gang.document(), "version": 2, "size": 1})  # or else it does not answer
        gang.close()
        return gang.facts

    assert (asyncio.run(desired()).desired or {})["size"] == 1


def test_ranks_are_ended_without_a_place_for_any_file(plane: ControlPlane, tmp_path: Path) -> None:
    """Nor can its supervisor write one again: the folder of all trainings is a file."""
    (training,) = begin(plane, tmp_path, ["one"]).values()
    folder = plane.directory(training).parent
    shutil.rmtree(folder)
    folder.touch()
    plane.ask(training.name, delete=True)
    plane.until_removed(training.name)
    nothing_is_left(plane, [training])


def test_a_damaged_journal_of_ranks_that_are_gone_ends_the_training_and_is_kept(
    plane: ControlPlane, tmp_path: Path
) -> None:
    (training,) = begin(plane, tmp_path, ["one"]).values()
    watchdog, supervisor = plane.supervision_pids(training)
    plane.kill()
    for pid in (watchdog, supervisor):
        os.kill(pid, signal.SIGKILL)
    journal = plane.directory(training) / "journal"
    with journal.open("ab") as file:
        file.write(b"garbage\n")
    damaged = journal.read_bytes()
    plane.start()
    ended = plane.until_over(training.name)
    assert {e.termination_reason for e in ended.status.rank_exits} == {"SupervisorLost"}
    nothing_is_left(plane, [training])
    assert (plane.directory(training) / "journal.damaged").read_bytes() == damaged
