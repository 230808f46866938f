"""Where the processes of a rank are: the stacks of all their threads, taken from outside.

py-spy reads them if it is installed; else the process dumps them itself, on a signal that
`hook/sitecustomize.py` registered. A process without that handler is never sent the signal: it
would end. One file for Python 3.7 and its standard library: supervisors and wrappers run it before
they kill a rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time

if __package__:
    from atoll.agent import process
else:  # beside it in one archive
    process = __import__("process")

TYPE_CHECKING = False  # as in `typing`, which takes longer to import than all the rest
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

SIGNAL = signal.SIGRTMAX - 2  # no program is known to use it; `hook/sitecustomize.py` has it, too
MEMORY = "/memfd:atoll-stacks"  # what the file of the dump is called in /proc
REQUEST_S = 5.0  # for the stacks of all ranks, before a rank continues without them
INSTALL = "install py-spy (pip install '.[stacks]' in a clone of atoll)"
MAX_PROCESSES = 32  # of a rank: eight GPUs with three data loaders each
MAX_THREADS, MAX_FRAMES, MAX_CODE = 64, 64, 120
DUMP_S = 1.0  # a dump takes a millisecond of CPU; a starved machine needs its turn for that
PY_SPY_S = 5.0  # it reads symbols first: 0.1 to 1 s on a quiet machine
STARTING_S = 5.0  # a Python comes to the hook within 20 ms, and a starved machine takes longer

_THREAD = re.compile(r"^(Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def find_py_spy() -> str | None:
    """The command of py-spy in this environment; None if it is not installed."""
    from shutil import which  # slow to import, and the supervisor loads this file

    command = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return command if os.access(command, os.X_OK) else which("py-spy")


def take(pid: int, py_spy: str | None = None, *, can_continue: bool = False) -> list[Json]:
    """The stacks of a process and of its descendants, the process first.

    Each has `threads`, or a `reason` why there are none. With `can_continue`, one that a signal has
    stopped runs on until it has dumped its stacks.
    """
    dumps = []
    for each in _tree(pid)[:MAX_PROCESSES]:
        state, command = _state(each), _command(each)
        if not state:
            continue
        threads, reason = _threads_of(each, state, py_spy, can_continue)
        for frame in threads[0]["frames"][:MAX_FRAMES] if threads else ():
            frame["code"] = _code_at(each, frame["file"], frame["line"])
        dumps.append(
            {"pid": each, "command": command, "state": state, "threads": threads, "reason": reason}
        )
    return dumps


def _threads_of(pid: int, state: str, py_spy: str | None, can_continue: bool) -> Any:
    threads: list[Json] = []
    reason = ""
    if py_spy:
        threads, reason = _by_py_spy(pid, py_spy, is_stopped=state in "Tt")
    if not threads and state in "Tt" and not can_continue:
        return [], "it is stopped by a signal" + (f"; {reason}" if reason else "")
    if not threads:
        threads, own = _by_signal(pid, is_stopped=state in "Tt")
        reason = "" if threads else "; ".join(filter(None, (own, reason)))
    return threads[:MAX_THREADS], reason


def _by_py_spy(pid: int, py_spy: str, *, is_stopped: bool) -> Any:
    import subprocess  # as above

    # A stopped process cannot be stopped again for the reading.
    more = ["--nonblocking"] if is_stopped else []
    try:
        done = subprocess.run(
            [py_spy, "dump", "--json", "--pid", str(pid), *more],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PY_SPY_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [], f"py-spy did not end within {PY_SPY_S:g} s"
    except OSError as error:
        return [], f"py-spy: {error.strerror}"
    if done.returncode:
        lines = done.stderr.decode(errors="replace").split("\n")
        return [], "py-spy: " + next((line for line in lines if line.strip()), "failed")
    try:
        return threads_of_py_spy(json.loads(done.stdout)), ""
    except (ValueError, KeyError, TypeError):
        return [], "py-spy: its answer cannot be read"


def threads_of_py_spy(document: list[Json]) -> list[Json]:
    """The threads of its JSON, the main one first."""
    threads = [
        {
            "name": thread.get("thread_name") or "",
            "frames": [
                {"file": f["filename"], "line": f["line"], "function": f["name"]}
                for f in thread["frames"][:MAX_FRAMES]
            ],
            "main": thread.get("thread_name") == "MainThread"
            or thread.get("os_thread_id") == thread.get("pid"),
        }
        for thread in document
    ]
    return _main_first(threads)


def threads_of_faulthandler(text: str) -> list[Json]:
    """The threads of a dump, the one that took the signal first: the kernel prefers the main one.

    Of several dumps, one after another, the last.
    """
    threads: list[Json] = []
    for line in text.split("\n"):
        head, frame = _THREAD.match(line), _FRAME.match(line)
        if head:
            is_current = head.group(1) == "Current thread"
            threads.append({"name": head.group(3) or "", "frames": [], "main": is_current})
        elif frame and threads:
            number = int(frame.group(2)) if frame.group(2).isdigit() else 0
            where = {"file": frame.group(1), "line": number, "function": frame.group(3)}
            if len(threads[-1]["frames"]) < MAX_FRAMES:
                threads[-1]["frames"].append(where)
    return _main_first(threads)


def _main_first(threads: list[Json]) -> list[Json]:
    threads.sort(key=lambda thread: not thread.pop("main"))
    return threads


def _by_signal(pid: int, *, is_stopped: bool) -> Any:
    """Has the process dump its own stacks. Forked children share the file: one at a time."""
    if not _catches(pid):
        if _is_starting(pid):
            return [], "it has just been started, and Python has not yet run atoll's hook"
        return [], f"it is no Python with atoll's hook: {INSTALL} to see other Pythons"
    memory = _memory_of(pid)
    if memory is None:
        return [], "it has closed the file of its dump"
    with open(memory, "rb") as file:
        file.seek(0, os.SEEK_END)  # what others had dumped
        before = _blocking(pid)
        try:
            os.kill(pid, SIGNAL)
            if is_stopped:
                os.kill(pid, signal.SIGCONT)
        except OSError:
            return [], "it has ended"
        text, deadline = b"", time.monotonic() + DUMP_S
        while time.monotonic() < deadline:
            time.sleep(0.005)
            more = file.read()
            text += more
            # The thread that dumps blocks the signal until its handler returns.
            if text and not more and not _blocking(pid) - before:
                text += file.read()
                break
    if not text:
        return [], f"it did not dump its stacks within {DUMP_S:g} s"
    return threads_of_faulthandler(text.decode(errors="replace")), ""


def _catches(pid: int) -> bool:
    return _has_signal(f"/proc/{pid}/status", "SigCgt:")


def _blocking(pid: int) -> set[str]:
    """The threads that block the signal."""
    with contextlib.suppress(OSError):
        folder = f"/proc/{pid}/task"
        return {t for t in os.listdir(folder) if _has_signal(f"{folder}/{t}/status", "SigBlk:")}
    return set()


def _has_signal(path: str, field: str) -> bool:
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.startswith(field):
                return bool(int(line.split()[1], 16) >> (SIGNAL - 1) & 1)
    return False


def _is_starting(pid: int) -> bool:
    """Whether it is a Python that may still come to the hook."""
    with contextlib.suppress(OSError, IndexError):
        if not os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("python"):
            return False
        with open(f"/proc/{pid}/environ", "rb") as environment:
            if b"ATOLL_STACKS=0" in environment.read().split(b"\0"):
                return False
        with open(f"/proc/{pid}/stat", errors="replace") as stat, open("/proc/uptime") as uptime:
            started_s = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
            return float(uptime.read().split()[0]) - started_s < STARTING_S
    return False


def _memory_of(pid: int) -> str | None:
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(MEMORY):
                    return path
    return None


def _tree(pid: int) -> list[int]:
    """The process and its descendants, parents first."""
    pids = [pid]
    for each in pids:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{each}/task"):
                with open(f"/proc/{each}/task/{thread}/children", encoding="ascii") as file:
                    pids += map(int, file.read().split())
        if len(pids) > MAX_PROCESSES:
            break
    return pids


def _state(pid: int) -> str:
    """The kernel's letter for the state of a process; empty if it has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as file:
        state = file.read().rpartition(")")[2].split()[0]
        return "" if state in "ZX" else state
    return ""


def _command(pid: int) -> str:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return " ".join(file.read().decode(errors="replace").split("\0"))[:200].strip()
    return ""


def _code_at(pid: int, path: str, line: int) -> str:
    """That line of the source, as the process would find it; empty if there is none."""
    if path.startswith("<") or not line:
        return ""
    where = path if path.startswith("/") else os.path.join(f"/proc/{pid}/cwd", path)
    with contextlib.suppress(OSError), open(where, encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, 1):
            if number == line:
                return text.strip()[:MAX_CODE]
    return ""


def request_all() -> None:
    """In a rank: has its supervisor or wrapper take the stacks of all ranks, and waits for it.

    Does nothing where there is none to ask, and never raises.
    """
    control = os.environ.get(process.CONTROL_VARIABLE)
    if not control:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(REQUEST_S)
        folder = os.open(os.path.dirname(control), os.O_RDONLY)
        try:  # by a short name: the path of a socket has at most 107 bytes
            connection.connect(f"/proc/self/fd/{folder}/{os.path.basename(control)}")
        finally:
            os.close(folder)
        connection.send(process.TAKE_STACKS)
        deadline = time.monotonic() + REQUEST_S
        while time.monotonic() < deadline:
            answer = connection.recv(4096)
            if not answer or process.TAKE_STACKS in answer:
                return


def write_dumps(path: str, dumps: Json) -> None:
    """Replaces the file as a whole; a reader never finds a part."""
    draft = f"{path}.{os.getpid()}"
    with open(draft, "w", encoding="utf-8") as file:
        json.dump(dumps, file)
    os.replace(draft, path)
