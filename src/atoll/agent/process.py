"""Runs a rank's command and writes a record of how it ended.

`python3 -S -I process.py [--record PATH] [--limit BYTES] [--claim PATH] [--bound] -- COMMAND…`

One file for Python 3.7 and its standard library, so that it can travel with a training to images
without atoll. Output is copied through, signals go to the command alone, and this process ends as
the command does. The supervisor of local ranks writes its records with the same functions.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import select
import signal
import struct
import sys
import time
from math import isfinite

TYPE_CHECKING = False  # as in `typing`, which takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

MARK = "atollExit"  # a JSON object with this key is a record
RECORD_VARIABLE = "ATOLL_EXIT_RECORD"
CONTROL_VARIABLE = "ATOLL_CONTROL"  # the socket of the rank's supervisor or wrapper
TAKE_STACKS = b"d"  # on that socket: a request for stacks of all ranks, and the answer to it
# How much longer than its grace a rank may live so that its stacks are taken: py-spy needs a second
# on a quiet machine, Python's own dump 50 ms.
STACKS_S = 3.0
GRACE_CAUSE = "it did not end within its grace period"
FROZEN_CAUSE = "it was stopped by a signal"
ROUND_CAUSE = "an outer round timed out"
# In the folder is a `sitecustomize.py`, with which `agent/stacks.py` reaches Python ranks. Python
# imports it from inside of an archive, too.
HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hook")
SWITCH = "ATOLL_STACKS"  # `0` in the environment of a training: its ranks do without the hook
ERROR_VARIABLE = "TORCHELASTIC_ERROR_FILE"
RESULT_VARIABLE = "ATOLL_RESULT"  # names the file for the result of the program
TAIL_LINES = 40  # of the log in a record: two screens
TAIL_BYTES = 16_384  # what a program may have written itself to its termination message
# Of output that is searched for a failure: tracebacks of eight processes and torchrun's report.
SEARCHED_BYTES = 65_536
CHUNK_BYTES = 65_536  # what a pipe holds by default
PIPE_BYTES = 1 << 20  # what Linux lets any user set: a command that prints waits less often
MANY_TIMES = 16 << 20  # bytes of pairs, a million lines: from here on ten a second are enough
CLAIMED = 75  # exit code if another process runs the attempt
NOT_FOUND, CANNOT_RUN = 127, 126  # as in shells
OWN_REASONS = ("CommandNotFound", "CannotRun")  # which agent/unpack.py may give

REAL_TIME = tuple(range(signal.SIGRTMIN, signal.SIGRTMAX + 1))
FORWARDED = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGCONT,
    signal.SIGWINCH,
    *REAL_TIME,
)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # what backends end a rank with
_PR_SET_PDEATHSIG = 1
USAGE = """\
usage: process.py [--record PATH] [--limit BYTES] [--claim PATH] [--bound] -- COMMAND…
"""


# Records


def exit_fields(status: int | None, at: float) -> dict[str, Any]:
    """How a process ended, from its wait status; unknown where there is none."""
    code = number = None
    if status is not None:
        number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
        code = 128 + number if number else os.WEXITSTATUS(status)
    reason = "Unknown" if code is None else "Completed" if code == 0 else "Error"
    return {
        "code": code,
        "signal": _signal_name(number) if number else None,
        "reason": "Signal" if number else reason,
        "at": at,
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have numbers, not names
        return f"SIGRTMIN+{number - signal.SIGRTMIN}"


def own_record(path: str) -> dict[str, Any]:
    """When and why the program failed, as it wrote itself: before its peers failed in turn.

    The file is written by torch's @record and by atoll's own entry points.
    """
    try:
        with open(path, "rb") as file:
            written_at = os.fstat(file.fileno()).st_mtime
            error = json.loads(file.read(1 << 20))["message"]
        failed_at = float(error["extraInfo"]["timestamp"])
        if failed_at.is_integer():  # torch rounds down, which would put it before its cause
            failed_at = max(failed_at, min(written_at, failed_at + 1.0))
        if not isfinite(failed_at):
            return {}
        # Python strings may hold what is not UTF-8, such as file names, and cannot be stored.
        text = str(error["message"]).encode(errors="backslashreplace").decode()
        # The exception comes first, but one of a child process comes last, after its traceback.
        line = -1 if "Traceback (most recent call last)" in text else 0
        failure = {"failedAt": failed_at, "message": _lines(text)[line][:500]}
        if error["extraInfo"].get("reason") in OWN_REASONS:
            failure["reason"] = error["extraInfo"]["reason"]
        return failure
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return {}


def _lines(text: str) -> list[str]:
    """Only a newline ends a line."""
    text = text[:-1] if text.endswith("\n") else text
    return text.split("\n") if text else []


_TORCHRUN_ERROR = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
_TORCHRUN_LOG = re.compile(r"[A-Z]\d{4} .* torch/distributed/elastic/")
_TRACEBACK = re.compile(r"(\[rank\d+\]: ?)?Traceback \(most recent call last\):")


def failure_tail(lines: list[str]) -> list[str]:
    """The lines up to the failure of the program: without torchrun's own report that follows it.

    That report names the process that failed first, but not its exception. If nothing else
    explains the failure, all lines count. Each line is as a terminal shows it: of a progress bar,
    its last state.
    """
    lines = [_shown(line) for line in lines]
    ends = [at for at, line in enumerate(lines) if line.startswith(_TORCHRUN_ERROR)]
    if not ends:
        return lines
    starts = [at for at in range(ends[-1]) if lines[at].startswith("Traceback (most recent")]
    own, report = lines[: starts[-1] if starts else ends[-1]], lines[ends[-1] :]
    while own and _TORCHRUN_LOG.match(own[-1]):
        own.pop()
    prefix = f"[rank{_first_failed(report)}]: "
    marked = [at for at, line in enumerate(own) if line.startswith(prefix)]
    if marked:
        own = own[: marked[-1] + 1]
    return own if any(map(_TRACEBACK.match, own)) else lines


def _shown(line: str) -> str:
    """What is left of a line that was written over."""
    return next((part for part in reversed(line.split("\r")) if part.strip()), "")


def _first_failed(report: list[str]) -> str:
    """The rank that torchrun calls the root cause, as it prints it."""
    text = "\n".join(report).partition("Root Cause (first observed failure):")[2]
    hit = re.search(r"^ *rank *: (\d+) ", text, re.MULTILINE)
    return hit.group(1) if hit else ""


def record_line(record: dict[str, Any], limit: int) -> bytes:
    """The record as one line of at most `limit` bytes: the oldest lines of the log are cut."""
    head = {name: value for name, value in record.items() if name != "tail"}
    tail = [line[-limit:] for line in record.get("tail", ())]
    while True:
        line = json.dumps({MARK: 1, **head, "tail": tail}, ensure_ascii=False)
        data = line.encode(errors="replace") + b"\n"
        over = len(data) - limit
        if over <= 0 or not tail:
            return data
        tail = tail[1:] if len(tail) > 1 else [tail[0][over:]] if len(tail[0]) > over else []


def read_record(text: str) -> dict[str, Any] | None:
    """The record in `text`, or None: a file for records may hold anything else."""
    if not text.startswith('{"' + MARK):
        return None
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        try:  # without its last lines, if it was cut short
            record = json.loads(text.partition(', "tail": [')[0] + "}")
        except (ValueError, RecursionError):
            return None
    if not isinstance(record, dict) or MARK not in record:
        return None
    code, at, tail = record.get("code"), record.get("at"), record.get("tail", [])
    is_complete = isinstance(code, (int, type(None))) and isinstance(at, (int, float, type(None)))
    is_complete = is_complete and isinstance(tail, list)
    return record if is_complete else None


# The wrapper


class OutputTimes:
    """Notes beside the log that this process's output goes to, when it was copied there.

    As `logs/segments.py` reads it. A log that is never cut gets fewer pairs when there are many.
    """

    PAIR = struct.Struct("=Qd")

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._size = os.fstat(self._file).st_size
        self._noted_at = 0.0

    def note(self) -> None:
        """What is written from now on is written now."""
        now = time.time()
        if 0 <= now - self._noted_at < (0.001 if self._size < MANY_TIMES else 0.1):
            return
        with contextlib.suppress(OSError):
            self._size += os.write(self._file, self.PAIR.pack(os.fstat(1).st_size, now))
            self._noted_at = now


class Command:
    """The command as a child, whose output and signals pass through this process.

    `is_leader`: it gets a process group of its own. `folder`: where it runs.
    """

    def __init__(
        self,
        arguments: list[str],
        env: dict[bytes, bytes],
        *,
        is_bound: bool,
        is_leader: bool = False,
        folder: str = "",
    ) -> None:
        self.status: int | None = None
        self.tail = b""
        self.times: OutputTimes | None = None  # where it is noted when output was copied
        self.failure = 0  # errno of a command that could not be run
        self.is_folder_missing = False  # the failure is that of its folder
        self.signalled: int | None = None  # the first signal by which it has to end
        self.stopped_at: float | None = None  # monotonic, while a signal has stopped it
        self.printed_at = time.monotonic()  # when it last printed
        self._is_bound = is_bound
        self._is_leader = is_leader
        self._folder = folder
        self._parent = os.getppid()
        self._output, output_in = os.pipe()
        self._woken, self._wake = os.pipe()
        for fd in (self._woken, self._wake):
            os.set_blocking(fd, False)
        with contextlib.suppress(OSError, AttributeError):
            fcntl.fcntl(self._output, getattr(fcntl, "F_SETPIPE_SZ", 1031), PIPE_BYTES)
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        try:
            signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
            signal.signal(signal.SIGCHLD, _ignore)
            self._forwarded = [n for n in FORWARDED if signal.getsignal(n) != signal.SIG_IGN]
            for number in self._forwarded:
                signal.signal(number, self._forward)
            if is_bound:
                # Harmless where the parent lives: only the thread that forked this may have ended.
                set_death_signal(signal.SIGCONT)
            self._start(arguments, env, output_in)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
            os.close(output_in)

    def wake(self) -> None:
        """`tick` is called soon. From any thread."""
        with contextlib.suppress(OSError):
            os.write(self._wake, b"\0")

    def kill(self, number: int) -> None:
        """Sends a signal to the command, SIGKILL to its whole group if it leads one."""
        with contextlib.suppress(ProcessLookupError):
            if self._is_leader and number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def wait(self, tick: Callable[[], float | None] | None = None) -> None:
        """Waits until the command has ended, but not for processes that it started.

        `tick` is called again and again, at the latest after the seconds that it returned.
        """
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        is_over = False
        while not is_over:
            pause_s = None if tick is None else tick()
            for fd, _ in poll.poll(None if pause_s is None else max(int(pause_s * 1000), 1)):
                if fd == self._woken:
                    is_over = self._reap()
                elif not self._copy():
                    poll.unregister(fd)  # closed by the command, which may keep running
        os.set_blocking(self._output, False)
        with contextlib.suppress(BlockingIOError):
            left = PIPE_BYTES
            while left > 0 and self._copy():
                left -= CHUNK_BYTES

    def _start(self, arguments: list[str], env: dict[bytes, bytes], output: int) -> None:
        failures, failures_in = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self._become(arguments, env, output, failures_in)
        os.close(failures_in)
        failure = int(os.read(failures, 16) or b"0")
        self.failure, self.is_folder_missing = abs(failure), failure < 0
        os.close(failures)

    def _become(
        self, arguments: list[str], env: dict[bytes, bytes], output: int, failures: int
    ) -> NoReturn:
        sign = 1
        try:
            signal.set_wakeup_fd(-1)
            # Python ignores two signals, and the command would inherit that.
            for number in (*self._forwarded, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(output, 1)
            os.dup2(output, 2)
            if self._is_bound:
                set_death_signal(signal.SIGKILL)
            if self._is_leader:
                os.setpgid(0, 0)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
            if self._folder:
                sign = -1
                os.chdir(self._folder)
                sign = 1
            os.execvpe(arguments[0], arguments, env)
        except BaseException as error:
            os.write(failures, b"%d" % (sign * (getattr(error, "errno", None) or errno.EINVAL)))
        finally:
            os._exit(NOT_FOUND)

    def _forward(self, number: int, _: object) -> None:
        """Sends the signal to the command alone: its data loaders must live until it has saved."""
        if number in ENDING and self.signalled is None:
            self.signalled = number
        self.kill(signal.SIGKILL if self.is_orphan else number)

    @property
    def is_orphan(self) -> bool:
        """Whether the parent that this process is bound to has ended."""
        return self._is_bound and os.getppid() != self._parent

    def _reap(self) -> bool:
        """Whether the command has ended. Orphans come here where this is process 1."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self._woken, 4096)) == 4096:
                pass
        flags = os.WNOHANG | os.WUNTRACED | os.WCONTINUED
        try:
            pid, status = os.waitpid(-1, flags)
            while pid:
                if pid == self.pid and not self._note_pause(status):
                    self.status = status
                    return True
                pid, status = os.waitpid(-1, flags)
        except ChildProcessError:
            return True
        return False

    def _note_pause(self, status: int) -> bool:
        """Whether the command has only been stopped by a signal, or goes on after that."""
        is_stopped = os.WIFSTOPPED(status)
        if is_stopped or os.WIFCONTINUED(status):
            self.stopped_at = time.monotonic() if is_stopped else None
            return True
        return False

    def _copy(self) -> bool:
        data = os.read(self._output, CHUNK_BYTES)
        if data:
            self.printed_at = time.monotonic()
        self.tail = (self.tail + data)[-SEARCHED_BYTES:]
        if self.times is not None and data:
            self.times.note()
        left = memoryview(data)
        with contextlib.suppress(OSError):  # nobody reads; the command keeps running
            while left:
                left = left[os.write(1, left) :]
        return bool(data)


def _become_alone(arguments: list[str], env: dict[bytes, bytes]) -> NoReturn:
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        os.execvpe(arguments[0], arguments, env)
    except OSError as error:
        os.write(2, f"atoll: {arguments[0]}: {error.strerror}\n".encode(errors="replace"))
        os._exit(NOT_FOUND if isinstance(error, FileNotFoundError) else CANNOT_RUN)


def _ignore(*_: object) -> None:
    """Handles a signal whose only purpose is to wake this process."""


def set_death_signal(number: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def environment() -> dict[bytes, bytes]:
    """The environment as this process got it: Python may have changed the locale in its own."""
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return dict(os.environb)
    return dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)


def hook_path(switch: str | None, python_path: str | None) -> str | None:
    """The PYTHONPATH in which Python registers the dump of its stacks; None if it is not to."""
    if switch == "0":
        return None
    return os.pathsep.join([HOOK, *filter(None, [python_path])])


def error_file_of(env: dict[bytes, bytes]) -> str:
    """The file in which the program may write why it failed; a new one if none is set."""
    name = ERROR_VARIABLE.encode()
    if not env.get(name):
        folder = "{}/atoll-{}-{}".format(
            os.environ.get("TMPDIR") or "/tmp", os.getpid(), time.time_ns()
        )
        with contextlib.suppress(OSError):  # no place to write: go without it
            os.mkdir(folder, 0o700)
            env[name] = os.fsencode(folder + "/error.json")
    return os.fsdecode(env.get(name, b""))


def result_fields(path: str) -> dict[str, Any]:
    """Return what an exit says of the result that the program left in a file, if it left one."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.readline(1000))
        return {"result": {"encoding": str(header["encoding"]), "bytes": int(header["bytes"])}}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def remove_with_folder(path: str) -> None:
    """Remove a temporary file that has a folder of its own."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError):
        os.rmdir(os.path.dirname(path))


def record_of(command: Command, argument: str, error_file: str, host: str) -> dict[str, Any]:
    record = exit_fields(command.status, round(time.time(), 6))
    record["host"] = host
    if command.failure:
        is_missing = command.failure in (errno.ENOENT, errno.ENOTDIR)
        is_missing = is_missing and not command.is_folder_missing
        record["code"] = NOT_FOUND if is_missing else CANNOT_RUN
        record["reason"] = "CommandNotFound" if is_missing else "CannotRun"
        what = "its working directory" if command.is_folder_missing else argument[:200]
        record["message"] = f"{what}: {os.strerror(command.failure)}"
    elif record["code"] != 0:
        record["tail"] = failure_tail(_lines(command.tail.decode(errors="replace")))[-TAIL_LINES:]
        record.update(own_record(error_file))
    return record


def _write(path: str, record: dict[str, Any], limit: int) -> None:
    """Writes atomically in a folder; an existing file keeps what the program wrote."""
    with contextlib.suppress(OSError):
        if os.path.exists(path):
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read(TAIL_BYTES)
            if text and read_record(text) is None:
                record = {**record, "tail": _lines(text)[-TAIL_LINES:]}
            with open(path, "wb") as file_in:
                file_in.write(record_line(record, limit))
            return
        write_file(path, record_line(record, limit))


def write_draft(path: str, data: bytes) -> str:
    """A durable file with the data beside `path`, under a name of no other process of any host."""
    folder, name = os.path.split(path)
    host, pid, number = os.uname().nodename, os.getpid(), time.monotonic_ns()
    draft = os.path.join(folder, f".{name}.{host}.{pid}.{number}")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(file, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(file)
    except BaseException:
        os.unlink(draft)
        raise
    return draft


def write_file(path: str, data: bytes) -> None:
    """Replaces the content of `path`, atomically and durably."""
    os.replace(write_draft(path, data), path)
    sync_folder(os.path.dirname(path))


def sync_folder(folder: str) -> None:
    with contextlib.suppress(OSError):  # not every file system can
        file = os.open(folder or ".", os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def write_error_file(message: str, **extra: str) -> None:
    """Writes when and why this program failed, for `own_record`, in the form of torch's elastic
    agents. What torch has written itself stays, whoever comes first."""
    path = os.environ.get(ERROR_VARIABLE)
    if not path:
        return
    error = {"message": message, "extraInfo": {"timestamp": f"{time.time():.6f}", **extra}}
    with contextlib.suppress(OSError):  # it is there, or there is no place for it
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(file, "w", errors="surrogateescape") as out:
            json.dump({"message": error}, out)


def leave_marker(control: str, rank: str, attempt: str) -> str:
    """Beside the socket of the supervisor: a rank that was to stop has uploaded what it had."""
    return os.path.join(os.path.dirname(control), "errors", f"{rank}.{attempt}.left")


def mark_left() -> None:
    """In a rank: it has left well, and its supervisor waits longer for its process to end."""
    control, rank, attempt = map(os.environ.get, (CONTROL_VARIABLE, "ATOLL_RANK", "ATOLL_ATTEMPT"))
    if control and rank and attempt:
        with contextlib.suppress(OSError):  # it is killed when its grace is over, as others are
            open(leave_marker(control, rank, attempt), "wb").close()


def _claim(path: str) -> bool:
    """Whether this process is the one to run the attempt that the path names."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    return True


def end_as(record: dict[str, Any], status: int | None) -> NoReturn:
    """Ends this process as the command ended, so that its parent sees no difference."""
    if status is not None and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        with contextlib.suppress(Exception):  # the command may have left a core; one is enough
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)  # process 1 of a container survives it
    os._exit(CANNOT_RUN if record["code"] is None else record["code"])


def watch_use(env: dict[bytes, bytes], command: Command, *, is_contained: bool) -> Any:
    """Reports what the command uses of the machine, where its rank reports; None if it does not."""
    if not env.get(b"ATOLL_REPORTS"):
        return None
    try:
        if __package__:
            from atoll.agent import machine_use, metric_sinks
        else:
            machine_use, metric_sinks = _companions("machine_use"), _companions("metric_sinks")
    except (ImportError, OSError, SyntaxError):
        return None
    return machine_use.watch_use(
        env,
        command.pid,
        is_contained=is_contained,
        is_alone=is_contained,
        sinks=metric_sinks,
        printed_at=lambda: command.printed_at,
    )


def _companions(name: str) -> Any:
    """A module in the archive of this file, or in its folder."""
    try:
        return __import__(name)
    except ImportError:
        import importlib.util

        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name + ".py")
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


def run(arguments: list[str], *, record: str, limit: int, is_bound: bool) -> NoReturn:
    """Run the command, write how it ended, and end as it did."""
    env = environment()
    env.pop(RECORD_VARIABLE.encode(), None)
    is_own_file = not env.get(ERROR_VARIABLE.encode())
    error_file = error_file_of(env)
    try:
        command = Command(arguments, env, is_bound=is_bound)
    except OSError:  # no process or pipe to be had; the command itself needs neither
        _become_alone(arguments, env)
    watch_use(env, command, is_contained=True)
    command.wait()
    host = os.environ.get("NODE_NAME") or os.uname().nodename
    ended = record_of(command, arguments[0], error_file, host)
    if command.failure:
        os.write(2, f"atoll: {ended['message']}\n".encode(errors="replace"))
    if record:
        _write(record, ended, limit)
    if is_own_file:
        remove_with_folder(error_file)
    end_as(ended, None if command.failure else command.status)


def main(arguments: list[str]) -> int:
    options = {"--record": os.environ.get(RECORD_VARIABLE, ""), "--limit": "4096", "--claim": ""}
    is_bound = False
    while arguments and arguments[0] != "--":
        argument = arguments.pop(0)
        name, equals, value = argument.partition("=")
        if argument == "--check":  # whether this Python can run this file
            return 0
        if argument == "--bound":
            is_bound = True
        elif name in options and (equals or arguments):
            options[name] = value if equals else arguments.pop(0)
        else:
            arguments = []
    if len(arguments) < 2 or not options["--limit"].isdigit():
        sys.stderr.write(USAGE)
        return 2
    if options["--claim"] and not _claim(options["--claim"]):
        sys.stderr.write(f"atoll: another process runs this attempt: {options['--claim']}\n")
        return CLAIMED
    run(arguments[1:], record=options["--record"], limit=int(options["--limit"]), is_bound=is_bound)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
