"""The loop that starts, stops and restarts the ranks of one training.

All of its state that matters is in the journal, from which a successor continues. It ends when
there is nothing left to run, and leaves no descendant behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import select
import signal
import socket
import stat
import time
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Any

from atoll.agent.process import (
    FROZEN_CAUSE,
    GRACE_CAUSE,
    ROUND_CAUSE,
    SEARCHED_BYTES,
    STACKS_S,
    TAKE_STACKS,
    failure_tail,
    leave_marker,
    own_record,
)
from atoll.agent.records import (
    AttemptFacts,
    Due,
    desired_record,
    due,
    is_unwanted,
    start_record,
)
from atoll.backends.local import processes
from atoll.backends.local.journal import JOURNAL_STAMP_S, JournalWriter, Record
from atoll.backends.local.protocol import (
    FIRST_PAUSE_S,
    FOLLOW_LOGS,
    HEARTBEAT,
    HEARTBEAT_S,
    LEAVE_LOGS,
    LOGS_GREW,
    MAX_PAUSE_S,
    RECORDS_GREW,
    RESTORE,
    SHORT,
    SOCKET,
    bound_socket,
    end_key,
    error_file,
    read_desired,
    read_ends,
    read_stacks,
    waiting_message,
    write_desired,
)
from atoll.backends.local.rank_process import (
    Process,
    StartBarrier,
    attempt_end,
    become_rank,
    lost_record,
)
from atoll.backends.local.rendezvous import Rendezvous
from atoll.backends.local.watchdog import (
    FROZEN_AFTER_S,
    append_persistently,
    kill_descendants,
    kill_orphans,
    mark_for,
    mark_of,
    write_mark,
)
from atoll.core.clock import Retry
from atoll.core.phase import ExitReason
from atoll.core.text import split_lines
from atoll.logs.segments import last_lines

PIPE_BYTES = 1 << 20  # what Linux lets any user set: a rank that prints waits less often
TAIL_LINES, TAIL_CHARS = 20, 4096  # of the log in an exit: a record in a journal has 4 KiB
SEARCHED_LINES = 1000  # for the failure: tracebacks of eight processes and torchrun's report
SWEEP_EVERY_S = 0.05  # a listing of /proc each, and what an ended rank left delays its next attempt
KILL_AGAIN_S = 1.0  # a process that waits for a disk does not end at the first SIGKILL
RANKS_A_MESSAGE = 1000  # some 6 kB: the kernel takes so little as a whole or not at all
# How much longer than its grace a rank may live that has left well: on a starved machine, ending a
# process that has loaded torch has taken 10 s.
LEFT_S = 30.0
SLICE_S = 0.05  # how long ranks are forked before clients and exits are served again


def supervise(directory: Path, listener: int, *, is_heir: bool) -> None:
    """Runs the loop. `is_heir`: an earlier one was killed and may have left processes behind."""
    Supervisor(directory, listener, is_heir=is_heir).run()


class Supervisor:
    def __init__(self, directory: Path, listener: int, *, is_heir: bool) -> None:
        self._directory = directory
        self._pid = os.getpid()
        self._watchdog = mark_for(os.getppid())
        self._journal = JournalWriter(directory / "journal")
        self._desired: dict[str, Any] = {}  # as it was written
        self._launch: dict[str, Any] = {}  # with the environment of the rendezvous
        self._listener = socket.socket(fileno=listener)
        self._clients: dict[int, socket.socket] = {}
        self._followers: dict[int, set[int]] = {}  # by client: ranks whose logs grew, to be sent
        self._by_pid: dict[int, Process] = {}
        self._by_fd: dict[int, tuple[str, Process]] = {}
        self._swept: set[int] = set()  # ranks that ended and may have left processes behind
        self._exec_errors: dict[tuple[int, int], tuple[str, str]] = {}
        self._oom_kills = processes.oom_kills()
        self._barrier: StartBarrier | None = None
        self._applied: Record | None = None  # the desired state by which ranks were stopped
        self._start_at = 0.0  # monotonic; not before, after a shortage
        self._pauses = Retry(FIRST_PAUSE_S, MAX_PAUSE_S)
        self._shortage = ""
        self._heartbeat_at = 0.0  # monotonic
        self._stamp_at = time.monotonic() + JOURNAL_STAMP_S  # the next sign of life in the journal
        self._rendezvous: Rendezvous | None = None
        self._wanted_stacks: dict[str, list[Process]] = {}  # by why they are wanted
        self._takers: dict[int, tuple[list[Process], list[int]]] = {}  # children that take some
        self._asking: list[int] = []  # clients that wait for stacks
        self._prepare(is_heir)

    def _prepare(self, is_heir: bool) -> None:
        processes.adopt_orphans()
        self._limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._limits[1], self._limits[1]))
        # What is written here is nobody else's; ranks get their umask back.
        self._umask = os.umask(0o077)
        self._epoll = select.epoll()
        self._listener.setblocking(False)
        self._epoll.register(self._listener.fileno(), select.EPOLLIN)
        self._woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, RESTORE):
            signal.signal(number, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._epoll.register(self._woken, select.EPOLLIN)
        self._failures, self._failures_in = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._socket_file = _socket_at(self._directory / SOCKET)
        left = self._journal.facts.running()
        if left or is_heir:
            ends = {a.rank: self._recorded_end_of(a) for a in left}
            kill_orphans(left, self._directory, self._directory.name)
            lost = [lost_record(self._directory, a, {}, ends[a.rank]) for a in left]
            append_persistently(self._journal, lost)
            processes.remove_cgroup(self._directory)
        own = os.environ["ATOLL_SUPERVISOR"]
        processes.enter_cgroup(self._directory, processes.cgroup_for(self._directory, own))

    def run(self) -> None:
        if self._accept_desired():
            while self._step():
                pass
            self._restore()
        kill_descendants()
        mark_of(self._directory).unlink(missing_ok=True)

    def _step(self) -> bool:
        """One turn of the loop. False when nothing is left to do."""
        later = self._act()
        if not later and not self._by_pid:
            return False
        ended: list[Process] = []
        for fd, _ in self._epoll.poll(
            min([*later, *self._send_heartbeat(), self._stamp_journal()])
        ):
            self._handle(fd, ended)
        if ended:
            self._finish(ended)
        self._notify_followers()
        return True

    def _handle(self, fd: int, ended: list[Process]) -> None:
        # epoll reports exits in the order in which they happened.
        if fd in self._by_fd:
            kind, process = self._by_fd[fd]
            if kind == "exit":
                ended.append(process)
            else:
                self._copy_output(process)
        elif fd == self._woken:
            with contextlib.suppress(BlockingIOError):
                if RESTORE in os.read(self._woken, 4096):
                    self._restore()
            self._note_stops()
            self._reap_orphans()
        elif fd == self._listener.fileno():
            self._accept_client()
        elif fd in self._clients:
            self._receive(fd)

    # What there is to do

    def _act(self) -> list[float]:
        """Starts, kills and sweeps what is due. Returns in how many seconds more is due."""
        now, later = time.monotonic(), self._start_due()
        if self._rendezvous is not None and (later or self._by_pid):
            left = self._rendezvous.heal()
            later += [] if left is None else [left]
        self._stop_unwanted(now)
        self._end_takers(now)
        for process in list(self._by_pid.values()):
            if process.frozen_since is not None and not process.is_frozen:
                left = process.frozen_since + FROZEN_AFTER_S - now
                if left <= 0:
                    process.is_frozen = True
                    process.kill_at = now
                else:
                    later.append(left)
            if process.kill_at is not None:
                if now >= process.kill_at:
                    self._kill(process, now)
                later.append(process.kill_at - now)
        self._take_stacks()
        if self._swept:
            self._sweep()
            later += [SWEEP_EVERY_S] if self._swept else []
        return later

    def _kill(self, process: Process, now: float) -> None:
        """Kills a rank once its stacks are taken, or were not in time. One that has left well has
        time to end."""
        attempt = process.attempt
        mark = leave_marker(str(self._directory / SOCKET), str(attempt.rank), str(attempt.attempt))
        if process.is_stopping and not process.has_left and os.path.exists(mark):
            process.has_left, process.kill_at = True, now + LEFT_S
            return
        if process.stacks_until is None:
            process.stacks_until = process.kill_at = now + STACKS_S
            why = FROZEN_CAUSE if process.is_frozen else GRACE_CAUSE
            self._wanted_stacks.setdefault(why, []).append(process)
            return
        process.no_stacks = process.no_stacks or f"they were not taken within {STACKS_S:g} s"
        processes.kill_leader(process.attempt.pid, signal.SIGKILL)
        process.kill_at = now + KILL_AGAIN_S

    def _end_takers(self, now: float) -> None:
        """What waited for stacks that are taken is killed now, and who asked for them has them."""
        for pid in [pid for pid in self._takers if not processes.stat_fields(pid)]:
            batch, clients = self._takers.pop(pid)
            for process in batch:
                # Those that are not to be killed have neither.
                if process.stacks_until is not None and process.kill_at == process.stacks_until:
                    process.kill_at = now
            self._send(TAKE_STACKS, [self._clients[fd] for fd in clients if fd in self._clients])

    def _take_stacks(self) -> None:
        """Has a child take the stacks that are wanted."""
        if not self._wanted_stacks:
            return
        from atoll.backends.local.stacks import keep_in_child  # not needed while all is well

        for why, batch in self._wanted_stacks.items():
            attempts = [process.attempt for process in batch]
            try:
                pid = keep_in_child(
                    self._directory, attempts, why, can_continue=why is FROZEN_CAUSE
                )
            except OSError as error:
                for process in batch:
                    process.no_stacks = f"no process could be started: {error.strerror}"
                    if process.stacks_until is not None:
                        process.kill_at = time.monotonic()
                continue
            self._takers[pid] = batch, self._asking
            self._asking = []
        self._wanted_stacks = {}

    def _start_due(self) -> list[float]:
        now = self._journal.now()
        ready: list[Due] = []
        later: list[float] = []
        for each in due(self._journal.facts, self._launch["max_restarts"]):
            left_s = 0.0 if each.after is None else each.after["at"] + each.delay_s - now
            if each.rank in self._swept:
                later.append(SWEEP_EVERY_S)  # its last attempt is still being cleared away
            elif left_s <= 0:
                ready.append(each)
            else:
                later.append(left_s)
        if self._barrier is not None and not self._barrier.waiting.keys() <= {d[:2] for d in ready}:
            self._disband()
        if ready:
            later += self._start(ready)
        return later

    def _stop_unwanted(self, now: float) -> None:
        """Tell ranks to stop; only a new desired state can make a rank unwanted."""
        desired = self._journal.facts.desired
        if desired is None or desired is self._applied:
            return
        self._applied = desired
        for process in self._by_pid.values():
            attempt = process.attempt
            if process.is_stopping or not is_unwanted(desired, attempt.rank, attempt.attempt):
                continue
            process.is_stopping = True
            process.stop_requested_at = time.time()
            process.kill_at = now + self._launch["stop_grace_s"]
            if self._launch["stop_grace_s"] == 0:
                process.stacks_until, process.no_stacks = now, "it had no grace period"
            processes.kill_leader(attempt.pid, signal.SIGTERM)
            processes.kill_leader(attempt.pid, signal.SIGCONT)

    # Starting

    def _start(self, ready: list[Due]) -> list[float]:
        """Forks, journals, then lets the ranks run: a running rank is always in the journal.

        It forks for a while only, so that clients and exits are served in between. Returns in how
        many seconds to go on.
        """
        if (left := self._start_at - time.monotonic()) > 0:
            return [left]
        if not self._open_rendezvous():
            return [FIRST_PAUSE_S]
        until = time.monotonic() + SLICE_S
        try:
            self._barrier = self._barrier or StartBarrier()
            for each in ready:
                if (each.rank, each.attempt) in self._barrier.waiting:
                    continue
                if time.monotonic() > until:
                    return [0.0]
                self._barrier.hold(self._fork_process(each, self._barrier))
            started = list(self._barrier.waiting.values())
            self._journal.append([p.attempt.start for p in started if p.attempt.start])
        except OSError as error:  # too many processes or files, or a full disk: nothing ran
            return [self._wait_for_capacity(len(ready), error)]
        for process in started:
            self._watch(process)
        self._barrier.release()
        self._barrier = None
        self._pauses.has_worked()
        self._shortage = ""
        self._notify_clients()
        return []

    def _wait_for_capacity(self, wanted: int, error: OSError) -> float:
        self._disband()
        seconds = self._pauses.pause_s() or MAX_PAUSE_S
        self._start_at = time.monotonic() + seconds
        self._shortage = waiting_message(f"start {wanted} ranks", error.strerror)
        self._report_shortage(self._clients.values())
        return seconds

    def _disband(self) -> None:
        if self._barrier is not None:
            self._barrier.disband()
            self._barrier = None

    def _open_rendezvous(self) -> bool:
        if self._rendezvous is None:
            self._rendezvous = Rendezvous(self._directory, self._launch["rendezvous"])
        try:
            env = self._rendezvous.open()
        except OSError:
            self._notify_clients()  # the cause is in its file
            return False
        self._launch["env"] = {**env, **self._launch["env"]}
        return True

    def _fork_process(self, due: Due, barrier: StartBarrier) -> Process:
        """A child that waits to become the rank."""
        output, output_in = os.pipe2(os.O_CLOEXEC)
        try:
            pid = self._fork(due, barrier.files, output_in)
            try:
                start = start_record(
                    due.rank,
                    due.attempt,
                    self._journal.now(),
                    pid=pid,
                    startTicks=processes.start_ticks(pid),
                    up=time.monotonic(),
                )
                attempt = AttemptFacts(due.rank, due.attempt, None, start, None)
                logs, log_bytes = self._directory / "logs", self._launch.get("log_bytes")
                return Process(attempt, output, logs, log_bytes, self._journal.now)
            except OSError:
                processes.kill(pid)  # it is reaped with the orphans
                raise
        except OSError:
            os.close(output)
            raise

    def _fork(self, due: Due, go: tuple[int, int], output: int) -> int:
        try:
            pid = os.fork()
            if pid == 0:
                os.close(go[1])
                become_rank(
                    self._directory, self._launch, due, self._pid, self._limits,
                    umask=self._umask, go=go[0], output=output, failures=self._failures_in,
                )  # fmt: skip
            return pid
        finally:
            os.close(output)

    def _watch(self, process: Process) -> None:
        os.set_blocking(process.output, False)
        with contextlib.suppress(OSError):
            fcntl.fcntl(process.output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._by_pid[process.attempt.pid] = process
        self._by_fd[process.pidfd] = ("exit", process)
        self._by_fd[process.output] = ("output", process)
        self._epoll.register(process.pidfd, select.EPOLLIN)
        self._epoll.register(process.output, select.EPOLLIN)

    # Ending

    def _finish(self, ended: list[Process]) -> None:
        """Journals the ends in order; only then reaps, cleans up and notifies."""
        self._read_exec_errors()
        records: list[Record] = []
        for process in ended:
            self._copy_output(process)
            child = os.waitid(os.P_PIDFD, process.pidfd, os.WEXITED | os.WNOWAIT)
            assert child is not None
            status = (
                child.si_status << 8 if child.si_code == os.CLD_EXITED else child.si_status & 0x7F
            )
            records.append(self._exit_of(process, status))
        append_persistently(self._journal, records)
        for process in ended:
            # Before it is reaped: until then no other process can get its pid.
            processes.kill_group(process.attempt.pid, signal.SIGKILL)
            os.waitpid(process.attempt.pid, 0)
            self._copy_output(process)
            for fd in (process.pidfd, process.output):
                self._ignore(fd)
                del self._by_fd[fd]
                os.close(fd)
            process.log.close()
            del self._by_pid[process.attempt.pid]
            self._swept.add(process.attempt.rank)
        self._notify_clients()

    def _exit_of(self, process: Process, status: int) -> Record:
        attempt = process.attempt
        record = attempt_end(self._directory, attempt, status, self._end_of(attempt))
        failure = self._exec_errors.pop((attempt.rank, attempt.attempt), None)
        text = own_record(error_file(self._directory, attempt.rank, attempt.attempt))
        # A rank that failed by itself may still be unwinding when it is stopped.
        is_stopped = process.is_stopping and text.get("failedAt", inf) >= process.stop_requested_at
        if is_stopped:
            record["stopped"] = True
            record["reason"] = ExitReason.STOPPED if record["code"] else record["reason"]
        elif process.is_frozen:
            record["reason"] = ExitReason.FROZEN
            record["message"] = f"stopped by a signal for over {FROZEN_AFTER_S:g} s"
        elif failure is not None:
            record["reason"], record["message"] = failure
        elif record["signal"] == "SIGKILL" and self._oom_kills < processes.oom_kills():
            record["reason"] = ExitReason.OOM_KILLED
        self._oom_kills = processes.oom_kills()
        if stack := self._stack_of(process):
            record["stack"] = stack
        if record["code"] != 0 and not is_stopped:
            log = self._directory / "logs" / str(attempt.rank)
            tail = failure_tail(last_lines(log, SEARCHED_LINES, SEARCHED_BYTES))[-TAIL_LINES:]
            record["tail"] = split_lines("\n".join(tail)[-TAIL_CHARS:])
            record.update(text)
        return record

    def _stack_of(self, process: Process) -> list[str]:
        """Where a rank was that did not move, or that had to be killed; empty for all others."""
        stacks = read_stacks(self._directory, process.attempt.rank, process.attempt.attempt)
        if stacks is not None:
            from atoll.agent.stack_text import summary_of  # not needed while all is well

            return summary_of(stacks)
        is_killed = process.stacks_until is not None and process.no_stacks
        return [f"no stacks: {process.no_stacks}"] if is_killed else []

    def _read_exec_errors(self) -> None:
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self._failures, 1 << 16).decode(errors="replace").splitlines():
                rank, attempt, reason, message = line.split(" ", 3)
                self._exec_errors[int(rank), int(attempt)] = (reason, message)

    def _sweep(self) -> None:
        """Kills what ended ranks left behind: orphans become our children and carry their rank."""
        mains, left = set(self._by_pid), set()
        for pid in processes.children(self._pid):
            if pid in mains:
                continue
            rank = processes.environment_of(pid).get(b"ATOLL_RANK", b"")
            if rank.isdigit() and int(rank) in self._swept:
                processes.kill(pid)
                left.add(int(rank))
        self._reap_orphans()
        self._swept = left

    def _reap_orphans(self) -> None:
        waiting = (
            {p.attempt.pid for p in self._barrier.waiting.values()} if self._barrier else set()
        )
        for pid in processes.children(self._pid):
            if pid not in self._by_pid and pid not in waiting:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)

    def _note_stops(self) -> None:
        """Notes ranks that a signal has stopped; they are frozen unless they continue in time."""
        flags = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitid(os.P_ALL, 0, flags)) is not None and child.si_pid:
                process = self._by_pid.get(child.si_pid)
                if process is None and self._barrier is not None:
                    process = self._barrier.of(child.si_pid)
                if process is not None:
                    is_stopped = child.si_code == os.CLD_STOPPED
                    process.frozen_since = time.monotonic() if is_stopped else None

    def _copy_output(self, process: Process) -> None:
        try:
            data = os.read(process.output, PIPE_BYTES)
        except BlockingIOError:
            return
        if data:
            process.log.write(data)
            for grown in self._followers.values():
                grown.add(process.attempt.rank)
        else:
            self._ignore(process.output)  # closed by the rank, which may keep running

    def _ignore(self, fd: int) -> None:
        with contextlib.suppress(OSError):
            self._epoll.unregister(fd)

    # The control plane

    def _accept_desired(self) -> bool:
        """Takes over the newest desired state. False if there is none to go by.

        One that is lost or damaged is written again as it was, and so is one of an older time.
        """
        desired, facts = read_desired(self._directory), self._journal.facts
        if not desired or desired["version"] < max(self._desired.get("version", 0), facts.version):
            if self._desired:
                with contextlib.suppress(OSError):  # a full disk: the next message tries again
                    write_desired(self._directory, self._desired)
            return bool(self._desired)
        self._desired, self._launch = desired, dict(desired)
        if desired["version"] == facts.version and self._journal.is_of_this_boot():
            return True
        record = desired_record(
            desired["version"],
            desired["size"],
            desired["discarded"],
            facts.desired,
            facts.newest(),
            **self._journal.stamp(),
        )
        append_persistently(self._journal, [record])
        self._notify_clients()
        return True

    def _restore(self) -> None:
        """Writes again what somebody has deleted or damaged of the files that others go by."""
        is_changed = False
        # On a full disk, or without the state directory, the next message tries again.
        with contextlib.suppress(OSError):
            is_changed = self._journal.restore()
        self._accept_desired()
        with contextlib.suppress(OSError):
            write_mark(mark_of(self._directory), self._watchdog)
            current = _socket_at(self._directory / SOCKET)
            if current is None or current != self._socket_file:
                self._listen_anew()
        if is_changed:
            self._notify_clients()

    def _listen_anew(self) -> None:
        listener = bound_socket(self._directory)
        listener.setblocking(False)
        self._ignore(self._listener.fileno())
        self._listener.close()
        self._listener = listener
        self._socket_file = _socket_at(self._directory / SOCKET)
        self._epoll.register(listener.fileno(), select.EPOLLIN)

    def _accept_client(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            client.setblocking(False)
            self._clients[client.fileno()] = client
            self._epoll.register(client.fileno(), select.EPOLLIN)
            client.send(RECORDS_GREW)  # what was recorded before it was accepted
            client.send(HEARTBEAT)  # from here on, every second
            self._report_shortage([client])

    def _receive(self, fd: int) -> None:
        """Clients follow logs or leave them. Any other byte means: there is a new desired state, or
        something is amiss with the files."""
        try:
            data = self._clients[fd].recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._epoll.unregister(fd)
            self._clients.pop(fd).close()
            self._followers.pop(fd, None)
            return
        for byte in (data[at : at + 1] for at in range(len(data))):
            if byte == FOLLOW_LOGS:
                self._followers.setdefault(fd, set())
                # What was printed before this was not sent.
                self._send(LOGS_GREW + b"\n", [self._clients[fd]])
            elif byte == LEAVE_LOGS:
                self._followers.pop(fd, None)
            elif byte == TAKE_STACKS:
                self._asking.append(fd)
                self._wanted_stacks.setdefault(ROUND_CAUSE, []).extend(self._by_pid.values())
        if data.strip(FOLLOW_LOGS + LEAVE_LOGS + TAKE_STACKS):
            self._restore()

    def _notify_clients(self) -> None:
        """The journal has grown. A full buffer says so already."""
        self._send(RECORDS_GREW, self._clients.values())

    def _notify_followers(self) -> None:
        """Once a turn, so that many lines cost one message. Ranks stay pending while the buffer of
        a client is full."""
        for fd, grown in self._followers.items():
            while grown:
                ranks = sorted(grown)[:RANKS_A_MESSAGE]
                try:
                    self._clients[fd].send(LOGS_GREW + ",".join(map(str, ranks)).encode() + b"\n")
                except OSError:
                    break
                grown.difference_update(ranks)

    def _report_shortage(self, clients: Iterable[socket.socket]) -> None:
        if self._shortage:
            self._send(SHORT + self._shortage.encode() + b"\n", clients)

    def _send_heartbeat(self) -> list[float]:
        """Sends a heartbeat every second. Returns in how many seconds the next is due."""
        if not self._clients:
            return []
        now = time.monotonic()
        if now >= self._heartbeat_at:
            self._send(HEARTBEAT, self._clients.values())
            self._heartbeat_at = now + HEARTBEAT_S
        return [self._heartbeat_at - now]

    def _stamp_journal(self) -> float:
        """Stamps the journal now and then. Returns in how many seconds it is due."""
        now = time.monotonic()
        if now >= self._stamp_at:
            self._journal.heartbeat()
            self._stamp_at = now + JOURNAL_STAMP_S
        return self._stamp_at - now

    def _send(self, data: bytes, clients: Iterable[socket.socket]) -> None:
        for client in clients:
            with contextlib.suppress(OSError):
                client.send(data)

    def _recorded_end_of(self, attempt: AttemptFacts) -> float:
        """When a rank without a supervisor ended: at its last sign of life if the machine was off,
        and at most one sign later if it was not."""
        if (
            processes.is_running(attempt.pid, attempt.start_ticks)
            and self._journal.is_of_this_boot()
        ):
            return self._journal.now()
        latest = self._journal.last_alive_at()
        if self._journal.is_of_this_boot():
            latest = min(self._end_of(attempt), latest + JOURNAL_STAMP_S)
        return max(latest, attempt.started_at or 0.0)

    def _end_of(self, attempt: AttemptFacts) -> float:
        """When a rank that was just noticed to be dead ended, as well as that can be known."""
        now = self._journal.now()
        uptime = read_ends(self._directory).get(end_key(attempt))
        late_s = 0.0 if uptime is None else max(time.monotonic() - uptime, 0.0)
        return max(now - late_s, attempt.started_at or 0.0)


def _socket_at(path: Path) -> tuple[int, int] | None:
    """Tells one socket from another; None if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None
