"""The process of one rank: how a forked child becomes it, and the record of how it ended."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from atoll.agent.process import (
    CONTROL_VARIABLE,
    ERROR_VARIABLE,
    RESULT_VARIABLE,
    SWITCH,
    exit_fields,
    hook_path,
    result_fields,
)
from atoll.agent.records import AttemptFacts, Due, exit_record
from atoll.backends.local import processes
from atoll.backends.local.journal import Record
from atoll.backends.local.protocol import SOCKET, error_file, result_file
from atoll.core.phase import ExitReason
from atoll.logs.segments import LogWriter

GO = b"g"
RESET = (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ)


class Process:
    """A rank's running process: its pidfd, its output pipe, and what is being done to it."""

    def __init__(
        self,
        attempt: AttemptFacts,
        output: int,
        logs: Path,
        log_bytes: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.attempt = attempt
        self.pidfd = os.pidfd_open(attempt.pid)
        self.output = output
        self.log = LogWriter(logs / str(attempt.rank), max_bytes=log_bytes, clock=clock)
        self.is_stopping = False
        self.stop_requested_at = 0.0  # wall, as ranks date their failures
        self.kill_at: float | None = None  # monotonic
        self.frozen_since: float | None = None  # monotonic
        self.is_frozen = False
        self.has_left = False  # it has uploaded what it had, and only its process has to end
        # Monotonic; it is killed by then, or as soon as its stacks are taken. None: not yet asked.
        self.stacks_until: float | None = None
        self.no_stacks = ""  # why none were taken before it was killed


def become_rank(
    directory: Path,
    launch: dict[str, Any],
    due: Due,
    supervisor: int,
    limits: tuple[int, int],
    *,
    umask: int,
    go: int,
    output: int,
    failures: int,
) -> NoReturn:
    """In a forked child: waits for the go-ahead, then executes the user's command."""
    reason, what = ExitReason.CANNOT_RUN, ""
    try:
        os.setsid()
        processes.die_with_parent(supervisor)
        signal.set_wakeup_fd(-1)
        for number in RESET:
            signal.signal(number, signal.SIG_DFL)
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        os.umask(umask)
        if os.read(go, 1) != GO:
            # Not to run, and not to end with a code that could be taken for the command's own.
            os.kill(os.getpid(), signal.SIGKILL)
        where = what = launch["working_dir"] or str(directory)
        os.chdir(where)
        reason, what = ExitReason.COMMAND_NOT_FOUND, launch["command"][0]
        env = environment_of(directory, launch, due)
        os.execvpe(what, launch["command"], {**env, "PWD": where})
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            reason = ExitReason.CANNOT_RUN
        text = f"{due.rank} {due.attempt} {reason} {what[:200]}: {error.strerror}"
        os.write(failures, " ".join(text.splitlines()).encode()[:1000] + b"\n")
    finally:
        os._exit(126 if reason is ExitReason.CANNOT_RUN else 127)


def environment_of(directory: Path, launch: dict[str, Any], due: Due) -> dict[str, str]:
    """What an attempt of a rank finds."""
    devices = launch.get("devices", {}).get(str(due.rank))
    local_ranks = launch["local_ranks"]
    env = {
        **launch["defaults"],
        **launch["env"],
        **({} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(devices)}),
        **({"LOCAL_RANK": str(due.rank % local_ranks)} if local_ranks > 1 else {}),
        **{name: str(due.rank) for name in launch["rank_variables"]},
        "ATOLL_ATTEMPT": str(due.attempt),
        "ATOLL_RESTARTS": str(due.restarts),
        "ATOLL_SUPERVISOR": os.environ.get("ATOLL_SUPERVISOR", ""),
        ERROR_VARIABLE: error_file(directory, due.rank, due.attempt),
        RESULT_VARIABLE: result_file(directory, due.rank, due.attempt),
        CONTROL_VARIABLE: str(directory / SOCKET),
    }
    path = hook_path(env.get(SWITCH), env.get("PYTHONPATH"))
    return env if path is None else {**env, "PYTHONPATH": path}


def lost_record(directory: Path, attempt: AttemptFacts, ended: dict[int, int], at: float) -> Record:
    record = attempt_end(directory, attempt, ended.get(attempt.pid), at)
    if record["code"] in (None, 128 + signal.SIGKILL):
        record["reason"] = ExitReason.SUPERVISOR_LOST
        record["message"] = "the process that supervised this rank was killed"
        record["stack"] = ["no stacks: its supervisor, which takes them, was killed"]
    return record


def attempt_end(
    directory: Path, attempt: AttemptFacts, status: int | None, at: float
) -> dict[str, Any]:
    """Return the record of how an attempt ended, and of the result that it left."""
    rank, number = attempt.rank, attempt.attempt
    result = result_fields(result_file(directory, rank, number))
    return exit_record(rank, number, {**exit_fields(status, at), **result})


class StartBarrier:
    """Held-back ranks by (rank, attempt). A child runs once it reads a byte from the pipe."""

    def __init__(self) -> None:
        self.go_out, self._go_in = os.pipe2(os.O_CLOEXEC)
        self.waiting: dict[tuple[int, int], Process] = {}

    @property
    def files(self) -> tuple[int, int]:
        return self.go_out, self._go_in

    def hold(self, process: Process) -> None:
        self.waiting[process.attempt.rank, process.attempt.attempt] = process

    def of(self, pid: int) -> Process | None:
        return next((p for p in self.waiting.values() if p.attempt.pid == pid), None)

    def release(self) -> None:
        """Lets them run."""
        os.write(self._go_in, GO * len(self.waiting))
        self._close()

    def disband(self) -> None:
        """Ends them: none has run. They are left to be reaped."""
        for process in self.waiting.values():
            processes.kill(process.attempt.pid, signal.SIGKILL)
            os.close(process.pidfd)
            os.close(process.output)
            process.log.close()
        self.waiting.clear()
        self._close()

    def _close(self) -> None:
        os.close(self._go_in)
        os.close(self.go_out)
