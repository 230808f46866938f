"""One local gang as the executor sees it: its directory, its journal, its shim."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import atoll
from atoll.core.errors import Permanent, Temporary
from atoll.core.retry import Retry
from atoll.local import cgroup, processes
from atoll.local.journal import GangState, JournalReader, write_durably
from atoll.local.pulse import BEAT, BEAT_S, GROWN, Pulse, pair_of, send
from atoll.local.rankprocess import end_key, write_ends
from atoll.local.shortage import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    SHORT,
    tells_of_shortage,
    waiting_words,
)

SOURCE_ROOT = str(Path(atoll.__file__).parents[1])
SHIM = (
    "import sys; sys.path.insert(0, sys.argv[1]); from atoll.local.shim import main; "
    "main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))"
)
FILES = (
    *("gang.json", "journal", "control", "lock", "keeper", "shim.log"),
    *("rendezvous.json", "etcd.log", "ends", "cgroup"),
)
KEEPER_STUCK_S = 3.0
FRUITLESS_STARTS = 5
ACCEPT_TIMEOUT_S = 10.0
LAST_WORDS_BYTES = 4096

log = logging.getLogger(__name__)
_shims: list[subprocess.Popen[bytes]] = []  # of all gangs: children of this process, to be reaped


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
        self._buffer = b""
        self._pulse = Pulse()
        self._ticking: asyncio.TimerHandle | None = None
        self._ends: dict[str, float] = {}  # ranks seen dead while their supervisor was silent
        self._shim: subprocess.Popen[bytes] | None = None
        self._unheard_since: float | None = None
        self._is_hurried = False
        self._begun_at = -1  # size of the journal when the last shim was started
        self._log_at = 0  # size of the shims' log at that time
        self._is_weighed = True  # whether the end of the last shim has been counted
        self._fruitless = 0  # shims in a row that died without writing anything
        self._pauses = Retry(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        self._again_at = 0.0  # monotonic; no shim is started before
        self.shortage = ""  # what the ranks wait for, of this machine, in one line

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
                self.shortage = waiting_words(f"write to {self.directory}", error.strerror)
                raise Temporary(self.shortage) from error
        deadline = time.monotonic() + ACCEPT_TIMEOUT_S
        while not self._is_accepted(gang):
            self._weigh()
            if self._fruitless >= FRUITLESS_STARTS:
                raise Permanent(f"the supervisor of the ranks keeps dying: {self._last_words()}")
            if time.monotonic() > deadline:
                raise Temporary(f"the supervisor in {self.directory} does not answer")
            if self._connected() or self._start():
                self._say()
            await self._wait(0.05)
        self._pauses.has_worked()

    def is_supervised(self) -> bool:
        """Whether a shim acts on the wish. Starts a new one for ranks that have none."""
        if self._connected():
            self._unheard_since = None
            return True
        lock = self._take_lock()
        if lock is None:  # the keeper is clearing up after a supervisor that died
            self._hurry_keeper()
            self._look_again(0.05)
            return True
        self._unheard_since = None
        self._weigh(is_over=True)
        is_needed = self.state.alive() or (self.directory / "keeper").exists()
        if not is_needed or self._fruitless >= FRUITLESS_STARTS:
            os.close(lock)
            return False
        try:
            self._spawn(lock)
        except Temporary as error:  # nobody acts yet, but somebody will
            self._look_again(error.retry_after_s)
            return True
        return self._connected()  # to notice its messages and its end

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
        cgroup.remove(self.directory)
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
        try:
            line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise Temporary(waiting_words("reach the supervisor", error.strerror)) from error
        try:
            with self._here() as here:
                line.connect(f"{here}/control")
        except OSError:
            line.close()
            return False
        self._line, self._buffer, self._pulse = line, b"", Pulse()
        loop = asyncio.get_running_loop()
        loop.add_reader(line, self._hear)
        self._ticking = loop.call_later(BEAT_S, self._tick)
        return True

    def _hear(self) -> None:
        """A beat, the word that the journal has grown, or a line of what is short."""
        assert self._line is not None
        try:
            data = self._line.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up()
        self._pulse.hear(data)
        self._buffer += data
        is_news = not data
        while self._buffer:
            word, rest = self._buffer[:1], self._buffer[1:]
            if word == GROWN:
                self.shortage = ""
            elif word == SHORT:
                text, end, rest = rest.partition(b"\n")
                if not end:
                    break
                self.shortage = text.decode(errors="replace")
            is_news = is_news or word != BEAT
            self._buffer = rest
        if is_news:
            self._news.set()
            self._notify()

    def _tick(self) -> None:
        """Looks at the pair whenever a beat is missing."""
        self._ticking = asyncio.get_running_loop().call_later(BEAT_S, self._tick)
        if not self._pulse.tick():
            self._ends.clear()
            return
        self._note_ends()
        pair = pair_of(self.directory)
        number = self._pulse.judge(pair)
        if number is None:
            return
        with contextlib.suppress(OSError):  # on a full disk, ends are dated when they are seen
            write_ends(self.directory, self._ends)
        what = "go on" if number == signal.SIGCONT else "are ended and replaced"
        log.warning("%s: keeper and supervisor do not answer; they %s", self.directory, what)
        for life in (pair.supervisor, pair.keeper):
            if life is not None:
                send(life, number)

    def _note_ends(self) -> None:
        for attempt in self.state.alive():
            if not processes.is_running(attempt.pid, attempt.born):
                self._ends.setdefault(end_key(attempt), time.monotonic())

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
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    def _look_again(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._notify)

    def _take_lock(self) -> int | None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Temporary(waiting_words("open the lock", error.strerror)) from error
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
        """Starts a shim that owns the lock from the first instant: there is never a second one.

        Raises Temporary where the machine is short of something.
        """
        try:
            self._weigh(is_over=True)
            if (left := self._again_at - time.monotonic()) > 0:
                raise Temporary(self.shortage, retry_after_s=left)
            self._journal.refresh()
            self._begun_at = self._journal.offset
            with (self.directory / "shim.log").open("ab") as words:
                self._log_at = words.tell()
                self._shim = self._forked(lock, words)
            _shims.append(self._shim)
            self._is_weighed = False
        except OSError as error:
            left = self._pause(error.strerror or str(error))
            raise Temporary(self.shortage, retry_after_s=left) from error
        finally:
            os.close(lock)

    def _forked(self, lock: int, words: IO[bytes]) -> subprocess.Popen[bytes]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            (self.directory / "control").unlink(missing_ok=True)
            with self._here() as here:
                listener.bind(f"{here}/control")
            listener.listen(16)
            files = (lock, listener.fileno())
            return subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", SHIM, SOURCE_ROOT, str(self.directory)]
                + [str(fd) for fd in files],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                start_new_session=True,
                cwd="/",
            )

    def _weigh(self, *, is_over: bool = False) -> None:
        """Counts the end of the last shim as a failure, unless it wrote something or was short.

        `is_over`: the caller holds the lock, so that it has surely ended.
        """
        _shims[:] = [shim for shim in _shims if shim.poll() is None]
        self._journal.refresh()
        if self._journal.offset > self._begun_at:
            self._fruitless = 0
            return
        if self._is_weighed or (self._shim in _shims and not is_over):
            return
        self._is_weighed = True
        words = self._last_words()
        if not words:
            self._pause("it was killed before it began")
        elif tells_of_shortage(words):
            self._pause(words)
        else:
            self._fruitless += 1

    def _pause(self, why: str) -> float:
        seconds = self._pauses.pause_s() or LONGEST_PAUSE_S
        self._again_at = time.monotonic() + seconds
        self.shortage = waiting_words("start the supervisor", why)
        self._look_again(seconds)
        return seconds

    def _last_words(self) -> str:
        """Of the last shim; empty if it said nothing."""
        try:
            with (self.directory / "shim.log").open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_at, end - LAST_WORDS_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""

    def _hurry_keeper(self) -> None:
        """Lets a keeper that was stopped go on; ends one that takes too long to clear up."""
        now = time.monotonic()
        self._unheard_since = self._unheard_since or now
        if now < self._unheard_since + KEEPER_STUCK_S:
            return
        self._unheard_since = now
        pair = pair_of(self.directory)
        number = signal.SIGCONT if pair.is_stopped and not self._is_hurried else signal.SIGKILL
        self._is_hurried = number == signal.SIGCONT
        for life in pair if pair.is_stopped else (pair.keeper,):
            if life is not None:
                send(life, number)

    @contextlib.contextmanager
    def _here(self) -> Iterator[str]:
        """A short name for the directory: socket paths may have 107 bytes at the most."""
        folder = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{folder}"
        finally:
            os.close(folder)
