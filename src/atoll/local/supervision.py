"""One local gang as the executor sees it: its directory, its journal, its shim."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import atoll
from atoll.core.errors import Permanent, Temporary
from atoll.local import processes
from atoll.local.journal import GangState, JournalReader, write_durably

SOURCE_ROOT = str(Path(atoll.__file__).parents[1])
SHIM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from atoll.local.shim import main; "
    "main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))"
)
FILES = (
    *("gang.json", "journal", "control", "lock", "keeper", "shim.log"),
    *("rendezvous.json", "etcd.log"),
)
KEEPER_STUCK_S = 3.0
FRUITLESS_STARTS = 5
ACCEPT_TIMEOUT_S = 10.0


class Supervision:
    """One gang's files and shim. Nobody else writes its `gang.json`."""

    def __init__(self, directory: Path, notify: Callable[[], None]) -> None:
        self.directory = directory
        self.turn = asyncio.Lock()
        self.host = socket.gethostname()
        self._notify = notify
        self._journal = JournalReader(directory / "journal")
        self._line: socket.socket | None = None
        self._news = asyncio.Event()
        self._keeper: subprocess.Popen[bytes] | None = None
        self._unheard_since: float | None = None
        self._begun_at = -1  # size of the journal when the last shim was started
        self._fruitless = 0  # shims in a row that died without writing anything

    @property
    def state(self) -> GangState:
        self._journal.refresh()
        return self._journal.state

    def is_asked(self) -> bool:
        return (self.directory / "gang.json").exists()

    def gang(self) -> dict[str, Any]:
        try:
            data: dict[str, Any] = json.loads((self.directory / "gang.json").read_bytes())
        except FileNotFoundError:
            return {}
        return data

    async def wish(self, gang: dict[str, Any]) -> None:
        """Writes the gang document and waits until the shim accepts it. An older one is ignored."""
        before = self.gang()
        if before.get("version", 0) >= gang["version"]:
            gang = before
        else:
            try:
                self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                (self.directory / "errors").mkdir(exist_ok=True)
                write_durably(self.directory / "gang.json", json.dumps(gang).encode())
            except OSError as error:
                raise Temporary(f"cannot write to {self.directory}: {error.strerror}") from error
        deadline = time.monotonic() + ACCEPT_TIMEOUT_S
        while not self._is_accepted(gang):
            if self._fruitless >= FRUITLESS_STARTS:
                raise Permanent(f"the supervisor of the ranks keeps dying: {self._last_words()}")
            if time.monotonic() > deadline:
                raise Temporary(f"the supervisor in {self.directory} does not answer")
            if self._connected() or self._start():
                self._say()
            await self._wait(0.05)

    def is_supervised(self) -> bool:
        """Whether a shim acts on the wish. Starts a new one for ranks that have none."""
        if self._connected():
            self._unheard_since = None
            return True
        lock = self._take_lock()
        if lock is None:  # the keeper is clearing up after a supervisor that died
            self._kill_stuck_keeper()
            asyncio.get_running_loop().call_later(0.05, self._notify)
            return True
        self._unheard_since = None
        self._reap()
        is_needed = self.state.alive() or (self.directory / "keeper").exists()
        if is_needed and self._fruitless < FRUITLESS_STARTS:
            self._spawn(lock)
            return self._connected()  # to notice its messages and its end
        os.close(lock)
        return False

    async def clear(self) -> None:
        """Ends all processes of the gang and removes its files, but for logs and data of ranks."""
        if not self.directory.exists():
            return
        if self.is_asked() and self.is_supervised():
            gang = self.gang()
            await self.wish(
                {**gang, "version": gang["version"] + 1, "size": 0, "stop_grace_s": 0.0}
            )
        while self.is_supervised():
            await self._wait(0.05)
        self._hang_up()
        self._reap()
        # The wish is removed first: alone, it would count as ranks that hold slots.
        for name in FILES:
            (self.directory / name).unlink(missing_ok=True)
        for name in ("errors", "source", "etcd"):
            shutil.rmtree(self.directory / name, ignore_errors=True)

    def close(self) -> None:
        """Closes the connection to the shim, which keeps running."""
        self._hang_up()

    def _is_accepted(self, gang: dict[str, Any]) -> bool:
        """Whether a shim has journalled the wish, and runs if anything is left to start."""
        state = self.state
        is_idle = not any(state.due(gang["max_restarts"]))
        return state.version == gang["version"] and (is_idle or self._connected())

    def _connected(self) -> bool:
        if self._line is not None:
            return True
        line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            with self._here() as here:
                line.connect(f"{here}/control")
        except OSError:
            line.close()
            return False
        self._line = line
        asyncio.get_running_loop().add_reader(line, self._hear)
        return True

    def _hear(self) -> None:
        assert self._line is not None
        try:
            data = self._line.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up()
        self._news.set()
        self._notify()

    def _say(self) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):
                self._line.send(b"w")

    async def _wait(self, seconds: float) -> None:
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes with the event.
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def _hang_up(self) -> None:
        if self._line is not None:
            asyncio.get_running_loop().remove_reader(self._line)
            self._line.close()
            self._line = None

    def _take_lock(self) -> int | None:
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return None
        return lock

    def _start(self) -> bool:
        lock = self._take_lock()
        if lock is None:
            return False
        self._spawn(lock)
        return self._connected()

    def _spawn(self, lock: int) -> None:
        """Starts a shim that owns the lock from the first instant: there is never a second one."""
        self._reap()
        self._journal.refresh()
        is_further = self._journal.offset > self._begun_at
        self._fruitless = 0 if is_further else self._fruitless + 1
        self._begun_at = self._journal.offset
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            (self.directory / "control").unlink(missing_ok=True)
            with self._here() as here:
                listener.bind(f"{here}/control")
            listener.listen(16)
            with (self.directory / "shim.log").open("ab") as log:
                files = (lock, listener.fileno())
                self._keeper = subprocess.Popen(
                    [sys.executable, "-S", "-E", "-c", SHIM, SOURCE_ROOT, str(self.directory)]
                    + [str(fd) for fd in files],
                    pass_fds=files,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    cwd="/",
                )
        except OSError as error:
            raise Temporary(f"cannot start a supervisor: {error}") from error
        finally:
            listener.close()
            os.close(lock)

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = (self.directory / "shim.log").read_text(errors="replace").splitlines()
            return lines[-1] if lines else "it says nothing"
        return "its log is gone"

    def _reap(self) -> None:
        """Reaps the keeper. Call it when the lock is free: the keeper has ended or is about to."""
        if self._keeper is not None:
            self._keeper.wait()
            self._keeper = None

    def _kill_stuck_keeper(self) -> None:
        now = time.monotonic()
        self._unheard_since = self._unheard_since or now
        if now < self._unheard_since + KEEPER_STUCK_S:
            return
        with contextlib.suppress(OSError, ValueError):
            pid, born = map(int, (self.directory / "keeper").read_text().split())
            if processes.is_running(pid, born):
                processes.kill(pid)

    @contextlib.contextmanager
    def _here(self) -> Iterator[str]:
        """A short name for the directory: socket paths may have 107 bytes at the most."""
        folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{folder}"
        finally:
            os.close(folder)
