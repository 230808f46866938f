"""Replicas as processes of this machine, launched from a script. They end when the script does.

A small process for each script, its reaper, ends them however the script ends. If the reaper is
killed as well, the next script that launches replicas clears up. Detached replicas have a follower
instead, which follows them to their end.
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
import time
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import atoll
from atoll.backends.local import processes
from atoll.backends.local.adoption import delete, mark_deleted, read_record
from atoll.backends.local.executor import LocalBackend
from atoll.backends.local.state import state_dir as default_state_dir
from atoll.core.checks import is_text
from atoll.core.errors import AtollError, NotFound, Permanent, ValidationError
from atoll.core.ports import Executor
from atoll.core.status import Training
from atoll.files.ownership import check_directory, make_private
from atoll.replicas.plane import ScriptPlane
from atoll.replicas.surface import ReplicaRendezvous, ReplicaSurface

CLEAR_S = 20.0  # ranks that ignore SIGTERM are killed after 5 s; many take longer
PREFIX = "atoll-replicas-"
# What a small process beside the script runs: a function of this file, by its name.
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from atoll.replicas import local; getattr(local, sys.argv[2])(*sys.argv[3:])"
)
RETENTION_S = 7 * 86_400.0  # how long the record of a detached launch is kept after its end


class LocalProcessExecutor(ReplicaSurface):
    """Replicas as processes of this machine. They end when the script that launched them does.

    With `detach=True` they keep running, and their handles stay valid: `close` and `with` still end
    them. Their records are in `state_dir`, by default `ATOLL_STATE_DIR/replicas`, else
    `~/.local/state/atoll/replicas`, and deleted a week after their end. With
    `rendezvous_backend="c10d"` the replicas of a launch meet in one world.
    """

    backend_name = "local"
    supports_inter_replica_network = True
    _has_shared_folder = True
    _python = sys.executable

    def __init__(
        self,
        *,
        detach: bool = False,
        state_dir: str | os.PathLike[str] | None = None,
        allow_pickle: bool = False,
        rendezvous_backend: ReplicaRendezvous = "none",
    ) -> None:
        self._take(allow_pickle=allow_pickle, rendezvous_backend=rendezvous_backend)
        if not isinstance(detach, bool):
            raise ValidationError("detach", detach, "expected True or False")
        if state_dir is not None:
            if not isinstance(state_dir, str | os.PathLike) or not is_text(os.fspath(state_dir)):
                raise ValidationError("state_dir", state_dir, "expected a path")
            state_dir = os.path.expanduser(state_dir)
        self.detach = detach
        self._ends_with_script = not detach
        self.state_dir = Path(state_dir or default_state_dir() / "replicas").absolute()

    def _make_backend(self) -> Executor:
        return LocalBackend(self._gangs_root)

    def _plane_for(self, metadata: Mapping[str, Any]) -> ScriptPlane:
        """A launch is in the directory that its handle names, else in the one of detached ones."""
        directory = Path(metadata.get("directory", self.state_dir))
        if self.detach and directory == self.state_dir:
            return self._plane
        return self._plane_in(directory, lambda: LocalBackend(directory))

    def _metadata(self, training: Training, executor: Executor) -> dict[str, Any]:
        root = executor.root if isinstance(executor, LocalBackend) else self._gangs_root
        return {**super()._metadata(training, executor), "directory": str(root)}

    def _note_launch(self, training: Training) -> None:
        if self.detach:  # it enforces the deadline when the script has ended
            follower = _start("follow_to_end", self.state_dir, training.name)
            threading.Thread(target=follower.wait, name="atoll-follower", daemon=True).start()

    def _wait_until_recorded(self, job_name: str) -> None:
        """Wait until the end of a launch is in its record, where other processes read it."""
        gang = self._gangs_by_name[job_name]
        if gang.plane is not None:
            done = gang.plane.wait([gang], lambda: gang.training.status.is_released, None)
            gang.plane.call(done)

    @cached_property
    def _gangs_root(self) -> Path:
        if not self.detach:
            return self._root / "gangs"
        try:
            check_directory(self.state_dir)
            make_private(self.state_dir)
        except OSError as error:
            raise Permanent(f"cannot write to {self.state_dir}: {error.strerror}") from error
        clear_expired(self.state_dir)
        return self.state_dir

    @cached_property
    def _root(self) -> Path:
        """The directory of this script, with a reaper from the first instant."""
        clear_abandoned()
        root = new_root()
        self._reaper = _start("reap", root)
        return root

    def close(self) -> None:
        super().close()
        if "_reaper" in self.__dict__ and self._reaper.returncode is None and self._is_own():
            shutil.rmtree(self._root, ignore_errors=True)
            self._reaper.kill()
            self._reaper.wait()


def follow_to_end(directory: str, job_name: str) -> None:
    """Follows a launch to its end, and records it."""
    executor = LocalProcessExecutor(state_dir=directory)
    with contextlib.suppress(NotFound):
        executor.collect(executor.attach(job_name))
        executor._wait_until_recorded(job_name)


def clear_expired(root: Path) -> None:
    """Deletes what is known of detached launches that ended long ago."""
    for directory in root.iterdir():
        with contextlib.suppress(AtollError, OSError):
            record = read_record(directory)
            # Without a record it is of a launch that was refused.
            ended_at = directory.stat().st_mtime if record is None else record.status.ended_at
            if ended_at is not None and time.time() > ended_at + RETENTION_S:
                mark_deleted(directory)
                delete(directory)


def new_root() -> Path:
    """A new directory whose name holds the process that owns it."""
    pid = os.getpid()
    root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{pid}-{processes.start_ticks(pid)}-"))
    check_directory(root)
    return root


def _start(function: str, *arguments: Path | str) -> subprocess.Popen[bytes]:
    """Start a small process next to the script."""
    source = Path(atoll.__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, source, function, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is meant for the script
        cwd="/",
    )


def reap(root: str) -> None:
    """End what the owner of `root` launched, once the owner has ended."""
    pid, start_ticks = owner_of(Path(root))
    with contextlib.suppress(ProcessLookupError):
        owner = os.pidfd_open(pid)
        if processes.is_running(pid, start_ticks):
            select.select([owner], [], [])
    clear(Path(root))


def clear(root: Path) -> None:
    """Ends all processes of the gangs under `root` and removes their files.

    Two may try at once, a reaper and the next script: one waits for the other.
    """
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        asyncio.run(LocalBackend(root / "gangs").clear_all())
        shutil.rmtree(root, ignore_errors=True)
    finally:
        os.close(descriptor)


def clear_abandoned() -> None:
    """Clean up after scripts whose reaper was killed too. May be called from any thread.

    A clean-up that takes long continues in the background.
    """
    for root in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*-*"):
        try:
            is_ours = root.stat().st_uid == os.geteuid() and not root.is_symlink()
            is_alive = processes.is_running(*owner_of(root))
        except (OSError, ValueError):
            continue
        if is_ours and not is_alive:
            thread = threading.Thread(target=clear, args=[root], daemon=True)
            thread.start()
            thread.join(CLEAR_S)


def owner_of(root: Path) -> tuple[int, int]:
    pid, start_ticks, _ = root.name.removeprefix(PREFIX).split("-", 2)
    return int(pid), int(start_ticks)
