"""A local training as the executor sees it: its directory, its journal, its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
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
from atoll.agent.records import AttemptFacts, Facts, due
from atoll.backends.local import processes
from atoll.backends.local.journal import Cursor, JournalDamaged, JournalReader, is_salvageable
from atoll.backends.local.liveness import (
    HeartbeatMonitor,
    ask_to_restore,
    pair_of,
    send,
    supervision_pids,
)
from atoll.backends.local.protocol import (
    DESIRED_FILE,
    FIRST_PAUSE_S,
    FOLLOW_LOGS,
    HEARTBEAT,
    HEARTBEAT_S,
    LEAVE_LOGS,
    LOGS_GREW,
    MAX_PAUSE_S,
    READ_DESIRED,
    RECORDS_GREW,
    SHORT,
    SOCKET,
    WATCHDOG_FILE,
    bound_socket,
    end_key,
    mentions_shortage,
    read_desired,
    short_name,
    waiting_message,
    write_desired,
    write_ends,
)
from atoll.backends.records import RankMemory
from atoll.core.clock import Retry
from atoll.core.errors import BackendError, Permanent, Temporary
from atoll.files.ownership import make_private, private
from atoll.files.writing import clear_way
from atoll.logs.files import LogGrowth

SOURCE_ROOT = str(Path(atoll.__file__).parents[1])
SUPERVISOR_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from atoll.backends.local.watchdog import main; "
    "main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))"
)
LOG = "supervisor.log"
FILES = (
    *(DESIRED_FILE, "journal", SOCKET, "lock", WATCHDOG_FILE, LOG),
    *("rendezvous.json", "etcd.log", "ends", "cgroup"),
)
WATCHDOG_STUCK_S = (
    3.0  # it has only to kill and to write; on a starved machine it is continued first
)
MAX_FAILED_STARTS = 5  # in a row without a record: the next one would not get further
ACCEPT_TIMEOUT_S = 30.0  # a starved machine takes 10 s to start a Python
END_TIMEOUT_S = 10.0  # for processes to end that were asked to, and again once they were killed
RESTORED_S = 0.2  # how long a supervisor is given to write its files again
LAST_OUTPUT_BYTES = 4096  # of its log, in which its last line is searched

log = logging.getLogger(__name__)
_children: list[subprocess.Popen[bytes]] = []  # supervisors that this process has to reap


class SupervisorClient:
    """The files and the supervisor of one training. Nobody else writes its `desired.json`."""

    def __init__(self, directory: Path, notify: Callable[[], None]) -> None:
        self.directory = directory
        self.turn = asyncio.Lock()
        self._notify = notify
        self.memory = RankMemory()
        self._journal = JournalReader(directory / "journal")
        self._socket: socket.socket | None = None
        self._news = asyncio.Event()
        self._followers: set[LogGrowth] = set()
        self._buffer = b""
        self._heartbeats = HeartbeatMonitor()
        self._ticking: asyncio.TimerHandle | None = None
        self._ends: dict[str, float] = {}  # when ranks ended while their supervisor was silent
        self._child: subprocess.Popen[bytes] | None = None
        self._silent_since: float | None = None
        self._is_continued = False
        self._position_before: Cursor | None = None  # in the journal, when the last one started
        self._log_at = 0  # size of the supervisors' log at that time
        self._is_end_counted = True  # whether the end of the last supervisor has been counted
        self._failed_starts = 0  # supervisors in a row that died without a record
        self._pauses = Retry(FIRST_PAUSE_S, MAX_PAUSE_S)
        self._again_at = 0.0  # monotonic; none is started before
        self.shortage = ""  # what the ranks wait for, of this machine, in one line

    @property
    def facts(self) -> Facts:
        """What the journal says; what it last said, if it is damaged by now."""
        with contextlib.suppress(JournalDamaged):
            self._journal.refresh()
        return self._journal.facts

    def running(self) -> list[AttemptFacts]:
        """The attempts that run as far as the journal has been read. Threads may have them."""
        return self._journal.facts.running()

    def is_requested(self) -> bool:
        """Whether there is anything to go by: a desired state, or the record of one."""
        return any((self.directory / name).exists() for name in (DESIRED_FILE, "journal"))

    def document(self) -> dict[str, Any]:
        """The desired state as it was written; empty if it is lost."""
        return read_desired(self.directory)

    def damage(self) -> str:
        """What is amiss with the files of a training that has run; empty if nothing is."""
        try:
            self._journal.refresh()
        except JournalDamaged as error:
            return str(error)
        if not self.document():
            return f"{self.directory / DESIRED_FILE} is lost or damaged"
        return "" if self._journal.facts.version else f"{self.directory} has no journal any more"

    def restore(self) -> bool:
        """Asks the supervisor to write its files again. False if none lives."""
        if self._connected():
            self._send()
            return True
        supervisor = pair_of(self.directory).supervisor
        if supervisor is not None:
            ask_to_restore(supervisor)
        return supervisor is not None

    async def apply(self, document: dict[str, Any]) -> None:
        """Writes the desired state and waits until the supervisor accepts it. An older one is
        ignored."""
        before = self.document()
        if before.get("version", 0) >= document["version"]:
            document = before
        else:
            try:
                make_private(self.directory)
                if not self.is_requested():  # from then on, a lock that is missing was lost
                    (self.directory / "lock").touch(0o600)
                write_desired(self.directory, document)
            except OSError as error:
                self.shortage = waiting_message(f"write to {self.directory}", error.strerror)
                raise Temporary(self.shortage) from error
        deadline = time.monotonic() + ACCEPT_TIMEOUT_S
        while not self._is_accepted(document):
            self._count_failed_start()
            if self._failed_starts >= MAX_FAILED_STARTS:
                raise Permanent(f"the supervisor of the ranks keeps dying: {self._last_output()}")
            if time.monotonic() > deadline:
                raise Temporary(f"the supervisor in {self.directory} does not answer")
            if self._connected() or self._start():
                self._send()
            else:
                self._wake_watchdog()
            await self._wait(0.05)
        self._pauses.has_worked()

    def is_supervised(self) -> bool:
        """Whether a supervisor acts on the desired state. Starts one for ranks that have none."""
        if self._connected():
            return True
        lock = self._take_lock()
        if lock is None:  # the watchdog is clearing up after a supervisor that died
            self._wake_watchdog()
            self._check_again(0.05)
            return True
        self._silent_since = None
        self._count_failed_start(is_over=True)
        if not self._is_needed() or self._failed_starts >= MAX_FAILED_STARTS:
            os.close(lock)
            return False
        try:
            self._spawn(lock)
        except Temporary as error:  # nobody acts yet, but somebody will
            self._check_again(error.retry_after_s)
            return True
        return self._connected()  # to notice its messages and its end

    def _is_needed(self) -> bool:
        """Whether a new supervisor has anything to do. The caller holds the lock: none lives.

        Without any record, nobody knows which ranks have run: none is started again.
        """
        try:
            self._journal.refresh()
        except JournalDamaged:
            self._journal = JournalReader(self.directory / "journal")
            if is_salvageable(self.directory / "journal"):
                return True
        facts = self.facts
        is_marked = (self.directory / WATCHDOG_FILE).exists()
        return bool(facts.running()) or (is_marked and facts.version > 0)

    async def clear(self, *, has_run: bool = True) -> None:
        """Ends all processes of the training and removes its files, but for logs and data of ranks.

        It needs no file for that: what runs carries the uid of the training.
        """
        is_complete = self.is_requested() and not self.damage()
        if not (is_complete and await self._is_stopped()) and has_run:
            await self._kill_all()
        self._disconnect()
        self._journal = JournalReader(self.directory / "journal")
        processes.remove_cgroup(self.directory)
        if not self.directory.is_dir():
            return
        # The desired state is removed first: alone, it would count as ranks that hold slots.
        for name in FILES:
            clear_way(self.directory / name)
            (self.directory / name).unlink(missing_ok=True)
        for name in ("errors", "source", "etcd"):
            shutil.rmtree(self.directory / name, ignore_errors=True)

    async def _is_stopped(self) -> bool:
        """Has the supervisor end all ranks and itself. False if that did not work in time."""
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                if self.is_supervised():
                    document = self.document()
                    more = {"version": document["version"] + 1, "size": 0, "stop_grace_s": 0.0}
                    await self.apply({**document, **more})
                while self.is_supervised():
                    await self._wait(0.05)
        except (TimeoutError, BackendError, KeyError):
            return False
        return True

    async def _kill_all(self) -> None:
        """Kills the supervisor, whose reaper ends all below it, and what carries the uid."""
        uid, deadline = self.directory.name, time.monotonic() + END_TIMEOUT_S
        while left := await asyncio.to_thread(processes_of, self.directory, uid):
            if time.monotonic() > deadline:
                pids = ", ".join(map(str, sorted(left)))
                raise Temporary(f"processes of the training do not end: {pids}", retry_after_s=1.0)
            for pid in left:
                processes.kill(pid)
            await asyncio.sleep(0.02)

    def close(self) -> None:
        """Closes the connection to the supervisor, which keeps running."""
        self._disconnect()

    def _is_accepted(self, document: dict[str, Any]) -> bool:
        """Whether a supervisor has recorded the desired state, and runs if ranks are to start."""
        facts = self.facts
        is_idle = not any(due(facts, document["max_restarts"]))
        return facts.version == document["version"] and (is_idle or self._connected())

    def _connected(self) -> bool:
        if self._socket is not None:
            return True
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as error:
            raise Temporary(waiting_message("reach the supervisor", error.strerror)) from error
        try:
            with short_name(self.directory) as here:
                connection.connect(f"{here}/{SOCKET}")
        except OSError:
            connection.close()
            return False
        self._socket, self._buffer, self._heartbeats = connection, b"", HeartbeatMonitor()
        self._silent_since = None
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, self._receive)
        self._ticking = loop.call_later(HEARTBEAT_S, self._tick)
        self._send()  # what was done to its files meanwhile is undone
        if self._followers:
            self._send(FOLLOW_LOGS)
        return True

    def _receive(self) -> None:
        """Read heartbeats, notices that the journal has grown, and lines about shortages."""
        assert self._socket is not None
        try:
            data = self._socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect()
        self._heartbeats.receive(data)
        self._buffer += data
        is_news = not data
        while self._buffer:
            kind, remainder = self._buffer[:1], self._buffer[1:]
            if kind == RECORDS_GREW:
                self.shortage = ""
            elif kind in (SHORT, LOGS_GREW):
                text, end, remainder = remainder.partition(b"\n")
                if not end:
                    break
                if kind == SHORT:
                    self.shortage = text.decode(errors="replace")
                else:
                    self._wake_followers([*map(int, text.split(b","))] if text else None)
            is_news = is_news or kind not in (HEARTBEAT, LOGS_GREW)
            self._buffer = remainder
        if is_news:
            self._news.set()
            self._notify()

    def _tick(self) -> None:
        """Judge watchdog and supervisor whenever a heartbeat is missing."""
        self._ticking = asyncio.get_running_loop().call_later(HEARTBEAT_S, self._tick)
        if not self._heartbeats.tick():
            self._ends.clear()
            return
        self._note_ends()
        pair = pair_of(self.directory)
        number = self._heartbeats.judge(pair)
        if number is None:
            return
        with contextlib.suppress(OSError):  # on a full disk, ends are dated when they are noticed
            write_ends(self.directory, self._ends)
        what = "continue" if number == signal.SIGCONT else "are ended and replaced"
        log.warning("%s: watchdog and supervisor do not answer; they %s", self.directory, what)
        for process in (pair.supervisor, pair.watchdog):
            if process is not None:
                send(process, number)

    def _note_ends(self) -> None:
        for attempt in self.facts.running():
            if not processes.is_running(attempt.pid, attempt.start_ticks):
                self._ends.setdefault(end_key(attempt), time.monotonic())

    def _send(self, message: bytes = READ_DESIRED) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(message)

    @contextlib.contextmanager
    def follow_logs(self) -> Iterator[LogGrowth]:
        """Has the supervisor say which logs grow, for as long as somebody follows them."""
        growth, is_first = LogGrowth(), not self._followers
        self._followers.add(growth)
        try:
            if self._socket is None:
                with contextlib.suppress(Temporary):  # a new connection asks for it
                    self._connected()
            elif is_first:
                self._send(FOLLOW_LOGS)
            yield growth
        finally:
            self._followers.discard(growth)
            if not self._followers:
                self._send(LEAVE_LOGS)

    def _wake_followers(self, ranks: list[int] | None) -> None:
        for growth in self._followers:
            growth.add(ranks)

    async def _wait(self, seconds: float) -> None:
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes with the event.
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def _disconnect(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
            self._wake_followers(None)  # the last lines may have had no notice
        if self._ticking is not None:
            self._ticking.cancel()
            self._ticking = None

    def _check_again(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._notify)

    def _take_lock(self) -> int | None:
        path = self.directory / "lock"
        try:
            make_private(self.directory)
            clear_way(path)
            # A supervisor whose lock was deleted or replaced holds one that nobody else can see.
            if not path.exists() and any(pair_of(self.directory)):
                return None
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise Temporary(waiting_message("open the lock", error.strerror)) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return None
        if (self.directory / WATCHDOG_FILE).exists() and any(pair_of(self.directory)):
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
        """Starts a supervisor that owns the lock from the first instant: there is never another.

        Raises Temporary where the machine is short of something.
        """
        try:
            self._count_failed_start(is_over=True)
            if (left := self._again_at - time.monotonic()) > 0:
                raise Temporary(self.shortage, retry_after_s=left)
            self._position_before = self._position()
            with open(self.directory / LOG, "ab", opener=private) as output:
                self._log_at = output.tell()
                self._child = self._fork_process(lock, output)
            _children.append(self._child)
            self._is_end_counted = False
        except OSError as error:
            left = self._pause(error.strerror or str(error))
            raise Temporary(self.shortage, retry_after_s=left) from error
        finally:
            os.close(lock)

    def _fork_process(self, lock: int, output: IO[bytes]) -> subprocess.Popen[bytes]:
        with bound_socket(self.directory) as listener:
            files = (lock, listener.fileno())
            return subprocess.Popen(
                [
                    sys.executable,
                    "-S",
                    "-E",
                    "-c",
                    SUPERVISOR_CODE,
                    SOURCE_ROOT,
                    str(self.directory),
                ]
                + [str(fd) for fd in files],
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                cwd="/",
            )

    def _count_failed_start(self, *, is_over: bool = False) -> None:
        """Counts the end of the last supervisor as a failure, unless it wrote or was short.

        `is_over`: the caller holds the lock, so that it has surely ended.
        """
        _children[:] = [child for child in _children if child.poll() is None]
        if self._position() != self._position_before:
            self._failed_starts = 0
            return
        if self._is_end_counted or (self._child in _children and not is_over):
            return
        self._is_end_counted = True
        output = self._last_output()
        if not output:
            self._pause("it was killed before it began")
        elif mentions_shortage(output):
            self._pause(output)
        else:
            self._failed_starts += 1

    def _position(self) -> Cursor:
        with contextlib.suppress(JournalDamaged):
            self._journal.refresh()
        return self._journal.cursor

    def _pause(self, why: str) -> float:
        seconds = self._pauses.pause_s() or MAX_PAUSE_S
        self._again_at = time.monotonic() + seconds
        self.shortage = waiting_message("start the supervisor", why)
        self._check_again(seconds)
        return seconds

    def _last_output(self) -> str:
        """The last line that the last supervisor printed; empty if there is none."""
        try:
            with (self.directory / LOG).open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_at, end - LAST_OUTPUT_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            return ""
        return lines[-1] if lines else ""

    def _wake_watchdog(self) -> None:
        """Continues a watchdog that was stopped; ends one that takes too long to clear up.

        A supervisor that runs and cannot be reached has lost its socket, and makes a new one.
        """
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            self.restore()
        if now < self._silent_since + WATCHDOG_STUCK_S:
            return
        self._silent_since = now
        pair = pair_of(self.directory)
        if pair.supervisor is not None and not pair.is_stopped:
            if not pair.supervisor.is_stopped:
                ask_to_restore(pair.supervisor)
            return
        number = signal.SIGCONT if pair.is_stopped and not self._is_continued else signal.SIGKILL
        self._is_continued = number == signal.SIGCONT
        for process in pair if pair.is_stopped else (pair.watchdog,):
            if process is not None:
                send(process, number)


def processes_of(directory: Path, uid: str) -> set[int]:
    """What runs for a training: supervision, ranks, and what has the uid or the group of them."""
    marked = {
        pid
        for pid in processes.all_pids()
        if processes.environment_of(pid).get(b"ATOLL_UID") == uid.encode()
    }
    return ({*supervision_pids(directory)} | marked | processes.cgroup_members(directory)) - {
        os.getpid()
    }
