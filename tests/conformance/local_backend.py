"""The table's faults on ranks that are processes of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tests.conformance.table import RANKS, Row
from tests.support.control_plane import (
    ControlPlane,
    PlaneDied,
    journal_records,
    make_spec,
    wait_for,
)
from tests.support.memory_group import MemoryGroup

from atoll.backends.local import processes
from atoll.core.status import Training

# Runs until a file says with which code to exit, or that it shall run out of memory.
SCRIPT = """[ -e {folder}/deaf ] && trap '' TERM
echo $RANK $ATOLL_ATTEMPT >> {folder}/ran
while :; do
    for file in {folder}/all {folder}/$RANK.$ATOLL_ATTEMPT; do
        [ -e $file ] && word=$(cat $file) || continue
        [ $word = oom ] && exec tail /dev/zero
        exit $word
    done
    sleep 0.02
done"""
BAD_COMMAND = {"command not found": ["/nonesuch/command"]}
WHY_NOT = {
    "control daemon killed before it told": "'supervisor killed' is this row: one process starts "
    "ranks and tells of their ends",
    "control daemon killed after it took a start": "'controller killed after apply' is this row",
    "step daemon killed": "'supervisor killed' is this row: no other process is above a rank",
    "records lost": "their supervisor writes them again: see test_local_damage.py",
    "listing that fails halfway": "nobody lists ranks: each training has a journal of its own",
    "attempt started twice": "no backend is there to do it: the supervisor that holds the "
    "journal's lock forks each attempt itself",
}
BAD_FOLDER = {"working dir missing": "/nonesuch/folder"}


class LocalBackend:
    name = "local"

    def __init__(self, plane: ControlPlane, scratch: Path) -> None:
        self._plane = plane
        self._scratch = scratch
        self._memory = MemoryGroup()
        self._faults: dict[str, Callable[[Row, str], None]] = {
            "none": lambda row, name: None,
            "exit": self._exit,
            "signal": lambda row, name: self._signal(name, row.at, row.detail),
            "out of memory": self._run_out_of_memory,
            "command not found": lambda row, name: None,
            "working dir missing": lambda row, name: None,
            "host lost": self._lose_host,
            "deadline": lambda row, name: None,
            "cancel": lambda row, name: self._cancel(name),
            "cancel of ranks that ignore SIGTERM": lambda row, name: self._cancel(name),
            "rank frozen": lambda row, name: self._signal(name, row.at, "SIGSTOP"),
            "supervisor killed": lambda row, name: self._hit_supervisor(name, signal.SIGKILL),
            "supervisor frozen": lambda row, name: self._hit_supervisor(name, signal.SIGSTOP),
            "exit while the controller is down": self._exit_unseen,
            "controller killed": lambda row, name: self._revive(),
            "exit, then controller killed": self._exit_and_crash,
        }

    def cannot(self, row: Row) -> str:
        if row.fault == "image error":
            return "local ranks are processes: no image is pulled"
        if row.fault.startswith("preempted"):
            return "nobody takes a local machine's processes away to give others their room"
        if row.fault in WHY_NOT:
            return WHY_NOT[row.fault]
        if row.fault == "out of memory":
            return self._memory.cannot()
        return ""

    def options_for(self, row: Row) -> dict[str, Any]:
        """What a row needs of a training here beside its own options."""
        return {}

    def deploy(self, row: Row) -> str:
        folder = self._scratch / str(len(list(self._scratch.iterdir())))
        folder.mkdir()
        if "ignore SIGTERM" in row.fault:
            (folder / "deaf").touch()
        spec = make_spec(
            BAD_COMMAND.get(row.fault, ["sh", "-c", SCRIPT.format(folder=folder)]),
            RANKS,
            min=row.min,
            working_dir=BAD_FOLDER.get(row.fault),
            **{"stop_grace_s": 20.0, **row.options, **self.options_for(row)},
        )
        (self._scratch / spec.name).symlink_to(folder)
        if row.fault == "controller killed":
            when, call, nth = row.detail.split()
            self._plane.call("arm", call=call, when=when, nth=int(nth))
        with contextlib.suppress(PlaneDied):
            self._plane.call("create", spec=msgspec.to_builtins(spec), key=spec.name)
        self._spec = spec
        return spec.name

    def until_running(self, name: str) -> None:
        self._plane.until_ready(name, RANKS)
        wait_for(lambda: len(self.attempts(name)) == RANKS)

    def strike(self, row: Row, name: str) -> None:
        self._faults[row.fault](row, name)
        if row.options.get("max_restarts"):  # the fault, then the rank back in its place
            wait_for(lambda: len(self.attempts(name)) == RANKS + 1)

    def end(self, name: str) -> None:
        self._tell(name, "all", "0")

    def until_over(self, name: str) -> Training:
        return self._plane.until_over(name)

    def attempts(self, name: str) -> list[tuple[int, int]]:
        with contextlib.suppress(FileNotFoundError):
            lines = (self._scratch / name / "ran").read_text().splitlines()
            return [(int(a), int(b)) for a, b in (line.split() for line in lines)]
        return []

    def left(self, name: str) -> list[str]:
        try:
            training = self._plane.until_released(name)
        except PlaneDied:  # armed for a step that comes only now
            self._revive()
            training = self._plane.until_released(name)
        uid = training.uid
        with contextlib.suppress(AssertionError):
            wait_for(lambda: not self._plane.left_of(uid), timeout=10)
        return self._plane.left_of(uid)

    def close(self) -> None:
        self._memory.close()

    def _tell(self, name: str, file: str, word: str) -> None:
        draft = self._scratch / name / f"{file}.new"
        draft.write_text(word)
        draft.rename(self._scratch / name / file)

    def _pid(self, name: str, rank: int | None) -> int:
        for record in self._journal(name):
            if record["t"] == "start" and record["rank"] == rank:
                return int(record["pid"])
        raise LookupError(f"rank {rank} of {name} has not been started")

    def _journal(self, name: str) -> list[dict[str, Any]]:
        return journal_records(self._plane.directory(self._plane.get(name)) / "journal")

    def _signal(self, name: str, rank: int | None, signal_name: str) -> None:
        os.kill(self._pid(name, rank), signal.Signals[signal_name])

    def _run_out_of_memory(self, row: Row, name: str) -> None:
        self._memory.limit(self._pid(name, row.at))
        self._tell(name, f"{row.at}.0", "oom")

    def _lose_host(self, row: Row, name: str) -> None:
        """Everything of the training ends at once, with nobody left to write it down."""
        supervision = self._plane.supervision_pids(self._plane.get(name))
        pids = [*supervision, *(self._pid(name, rank) for rank in range(RANKS))]
        for pid in supervision:
            os.kill(pid, signal.SIGSTOP)
        for pid in pids:
            processes.kill(pid)

    def _cancel(self, name: str) -> None:
        self._plane.ask(name, cancel=True)

    def _hit_supervisor(self, name: str, number: int) -> None:
        os.kill(self._plane.supervision_pids(self._plane.get(name))[1], number)

    def _exit(self, row: Row, name: str) -> None:
        path = self._plane.directory(self._plane.get(name)) / "journal"
        self._tell(name, f"{row.at}.0", str(row.detail))
        wait_for(lambda: _has_exit(path))

    def _exit_unseen(self, row: Row, name: str) -> None:
        path = self._plane.directory(self._plane.get(name)) / "journal"
        self._plane.kill()
        self._tell(name, f"{row.at}.0", str(row.detail))
        wait_for(lambda: _has_exit(path))
        self._plane.start()

    def _exit_and_crash(self, row: Row, name: str) -> None:
        when, call, nth = row.detail.split()
        self._plane.call("arm", call=call, when=when, nth=int(nth))
        self._tell(name, f"{row.at}.0", "3")
        self._revive()

    def _revive(self) -> None:
        """The control plane has killed itself as it was armed to; another one takes over."""
        self._plane.reap()
        self._plane.start()
        spec = self._spec
        self._plane.call("create", spec=msgspec.to_builtins(spec), key=spec.name)


def _has_exit(journal: Path) -> bool:
    """An exit was written down; the journal may even be gone again."""
    try:
        return '"exit"' in journal.read_text()
    except FileNotFoundError:
        return True
