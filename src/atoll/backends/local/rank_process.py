"""The process of one rank: how a forked child becomes it, and the record of how it ended."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from atoll.agent.process import ERROR_VARIABLE, RESULT_VARIABLE, exit_fields, result_fields
from atoll.agent.records import RESULT, AttemptFacts, Due, exit_record, name_of
from atoll.backends.local import processes
from atoll.backends.local.journal import Record
from atoll.core.reasons import ExitReason
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


def become_rank(
    directory: Path,
    gang: dict[str, Any],
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
        where = what = gang["working_dir"] or str(directory)
        os.chdir(where)
        reason, what = ExitReason.COMMAND_NOT_FOUND, gang["command"][0]
        env = environment_of(directory, gang, due)
        os.execvpe(what, gang["command"], {**env, "PWD": where})
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            reason = ExitReason.CANNOT_RUN
        text = f"{due.rank} {due.attempt} {reason} {what[:200]}: {error.strerror}"
        os.write(failures, " ".join(text.splitlines()).encode()[:1000] + b"\n")
    finally:
        os._exit(126 if reason is ExitReason.CANNOT_RUN else 127)


def environment_of(directory: Path, gang: dict[str, Any], due: Due) -> dict[str, str]:
    """What an attempt of a rank finds."""
    devices = gang.get("devices", {}).get(str(due.rank))
    local_ranks = gang["local_ranks"]
    return {
        **gang["defaults"],
        **gang["env"],
        **({} if devices is None else {"CUDA_VISIBLE_DEVICES": ",".join(devices)}),
        **({"LOCAL_RANK": str(due.rank % local_ranks)} if local_ranks > 1 else {}),
        **{name: str(due.rank) for name in gang["rank_variables"]},
        "ATOLL_ATTEMPT": str(due.attempt),
        "ATOLL_RESTARTS": str(due.restarts),
        "ATOLL_SUPERVISOR": os.environ.get("ATOLL_SUPERVISOR", ""),
        ERROR_VARIABLE: error_file(directory, due.rank, due.attempt),
        RESULT_VARIABLE: result_file(directory, due.rank, due.attempt),
    }


def lost_record(directory: Path, attempt: AttemptFacts, ended: dict[int, int], at: float) -> Record:
    record = attempt_end(directory, attempt, ended.get(attempt.pid), at)
    if record["code"] in (None, 128 + signal.SIGKILL):
        record["reason"] = ExitReason.SUPERVISOR_LOST
        record["message"] = "the process that supervised this rank was killed"
    return record


def attempt_end(
    directory: Path, attempt: AttemptFacts, status: int | None, at: float
) -> dict[str, Any]:
    """Return the record of how an attempt ended, and of the result that it left."""
    rank, number = attempt.rank, attempt.attempt
    result = result_fields(result_file(directory, rank, number))
    return exit_record(rank, number, {**exit_fields(status, at), **result})


def end_key(attempt: AttemptFacts) -> str:
    return f"{attempt.pid}.{attempt.start_ticks}"


def write_ends(directory: Path, ends: dict[str, float]) -> None:
    """Tells a supervisor that was stopped when its ranks were first seen dead, by `end_key`.

    The times are those of the monotonic clock, which all processes of a machine share.
    """
    if ends:
        draft = directory / "ends.new"
        draft.write_text(json.dumps(ends))
        draft.replace(directory / "ends")


def read_ends(directory: Path) -> dict[str, float]:
    try:
        ends: dict[str, float] = json.loads((directory / "ends").read_bytes())
    except (OSError, ValueError):
        return {}
    return ends


def result_file(directory: Path, rank: int, attempt: int) -> str:
    """Return the file in which `atoll.set_result` writes."""
    return str(directory / "results" / name_of(rank, attempt, RESULT))


def error_file(directory: Path, rank: int, attempt: int) -> str:
    """The file in which torch's @record and atoll's entry points write when and why they failed."""
    return str(directory / "errors" / f"{rank}.{attempt}.json")
