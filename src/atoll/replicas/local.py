"""Replicas as processes of this machine, launched from a script. They end when the script does.

A small process for each script, its guard, ends them however the script ends. If the guard is
killed as well, the next script that launches replicas clears up.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

import atoll
from atoll.core.ports import Executor
from atoll.core.status import Training
from atoll.local import processes
from atoll.local.executor import LocalBackend
from atoll.replicas.entrypoints import Entry, FunctionCall, Module, Script
from atoll.replicas.surface import ReplicaSurface

PREFIX = "atoll-replicas-"
_ENTRY = (
    "import pathlib, sys; sys.path.append(sys.argv.pop(1)); "
    "from atoll.rank.replica_entry import main; main(pathlib.Path(sys.argv[1]).read_bytes())"
)
_GUARD = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from atoll.replicas.local import guard; guard(sys.argv[2])"
)


class LocalProcessExecutor(ReplicaSurface):
    """Replicas as processes of this machine. They end when the script that launched them does."""

    backend_name = "local"
    supports_inter_replica_network = True
    has_shared_folder = True

    def make_executor(self) -> Executor:
        return _ScriptProcesses(self._root / "gangs")

    @cached_property
    def _root(self) -> Path:
        """The directory of this script, with a guard from the first instant."""
        clear_abandoned()
        root = new_root()
        self._guard = start_guard(root)
        return root

    def what_runs(self, entry: Entry, uid: str) -> dict[str, Any]:
        source = str(Path(atoll.__file__).parents[1])
        match entry:
            case FunctionCall(payload):
                place = self._root / f"{uid}.pkl"
                place.write_bytes(payload)
                command = [sys.executable, "-c", _ENTRY, source, str(place)]
            case Module(name, argv):
                command = [sys.executable, "-m", name, *argv]
            case Script(path, argv):
                command = [sys.executable, str(path), *argv]
            case _:
                return super().what_runs(entry, uid)
        return {"command": command, "working_dir": os.getcwd()}

    def close(self) -> None:
        super().close()
        if "_guard" in self.__dict__ and self._guard.returncode is None and self._is_own():
            shutil.rmtree(self._root, ignore_errors=True)
            self._guard.kill()
            self._guard.wait()


class _ScriptProcesses(LocalBackend):
    async def purge(self, training: Training) -> None:
        """Logs go with the whole directory: a script that ends can start no thread for it."""
        await self.release(training)


def new_root() -> Path:
    """A new directory whose name holds the process that owns it."""
    pid = os.getpid()
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{pid}-{processes.born(pid)}-"))


def start_guard(root: Path) -> subprocess.Popen[bytes]:
    source = str(Path(atoll.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", _GUARD, source, str(root)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is meant for the script
        cwd="/",
    )


def guard(root: str) -> None:
    """Ends what the owner of `root` launched, once the owner is gone."""
    pid, born = owner_of(Path(root))
    with contextlib.suppress(ProcessLookupError):
        owner = os.pidfd_open(pid)
        if processes.is_running(pid, born):
            select.select([owner], [], [])
    clear(Path(root))


def clear(root: Path) -> None:
    """Ends all processes of the gangs under `root` and removes their files.

    Two may try at once, a guard and the next script: one waits for the other.
    """
    try:
        held = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        asyncio.run(LocalBackend(root / "gangs").clear_all())
        shutil.rmtree(root, ignore_errors=True)
    finally:
        os.close(held)


def clear_abandoned() -> None:
    """Clears up after scripts whose guard was killed too. May be called from any thread."""
    for root in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*-*"):
        try:
            is_ours = root.stat().st_uid == os.geteuid() and not root.is_symlink()
            is_alive = processes.is_running(*owner_of(root))
        except (OSError, ValueError):
            continue
        if is_ours and not is_alive:
            thread = threading.Thread(target=clear, args=[root])
            thread.start()
            thread.join()


def owner_of(root: Path) -> tuple[int, int]:
    pid, born, _ = root.name.removeprefix(PREFIX).split("-", 2)
    return int(pid), int(born)
