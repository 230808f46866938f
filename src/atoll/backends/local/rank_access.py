"""Commands beside a rank of this machine, in its environment and directory, and signals to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from atoll.backends.local import processes
from atoll.core.errors import Conflict
from atoll.core.rank_access import TIMED_OUT, ExecResult

MAX_OUTPUT_BYTES = 2**20  # of each stream, in the memory of the control plane
# The command ends with the process that asked for it, and with the rank: `prctl` outlives `exec`.
BOUND_COMMAND = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.stderr.write(f"atoll: {sys.argv[1]}: {error.strerror}\\n")
    os._exit(127 if isinstance(error, FileNotFoundError) else 126)
"""


class Surroundings(NamedTuple):
    """What a command needs to run as its rank does."""

    env: dict[bytes, bytes]
    directory: str


@contextlib.contextmanager
def open_process(pid: int, start_ticks: int) -> Iterator[int]:
    """The pidfd of that very process. Raises Conflict if it has ended."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError as error:
        raise Conflict(f"the rank does not run: process {pid} has ended") from error
    try:
        if start_ticks and not processes.is_running(pid, start_ticks):
            raise Conflict(f"the rank does not run: process {pid} has ended")
        yield pidfd
    finally:
        os.close(pidfd)


def surroundings_of(pid: int) -> Surroundings | None:
    """None while the process is not yet the command of its rank. Raises Conflict if it has ended,
    or is of another user."""
    try:
        directory = os.readlink(f"/proc/{pid}/cwd")
    except OSError as error:
        raise Conflict(f"process {pid} cannot be entered: {error.strerror}") from error
    env = processes.environment_of(pid)
    return Surroundings(env, directory) if b"ATOLL_UID" in env else None


def bound_command(command: Sequence[str]) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", BOUND_COMMAND, *command]


async def run_in_rank(
    pid: int, start_ticks: int, command: Sequence[str], stdin: bytes, timeout_s: float
) -> ExecResult:
    """Runs the command beside the process until it ends, the process ends or time is up."""
    with open_process(pid, start_ticks) as pidfd:
        while (surroundings := surroundings_of(pid)) is None:  # noqa: ASYNC110, nobody tells
            await asyncio.sleep(0.01)  # it has been forked, and is about to run its command
        env, directory = surroundings
        child = await asyncio.create_subprocess_exec(
            *bound_command(command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=env,
            cwd=directory,
            start_new_session=True,
        )
        loop, is_timed_out = asyncio.get_running_loop(), False

        def end() -> None:
            loop.remove_reader(pidfd)
            processes.kill_group(child.pid, signal.SIGKILL)

        loop.add_reader(pidfd, end)
        try:
            async with asyncio.timeout(timeout_s):
                assert child.stdin is not None
                assert child.stdout is not None
                assert child.stderr is not None
                (out, is_out_cut), (errors, are_errors_cut), _ = await asyncio.gather(
                    _read(child.stdout), _read(child.stderr), _feed(child.stdin, stdin)
                )
                await child.wait()
        except TimeoutError:
            is_timed_out, out, errors, is_out_cut, are_errors_cut = True, b"", b"", False, False
            errors = f"atoll: ended after {timeout_s:g} s\n".encode()
        finally:
            loop.remove_reader(pidfd)
            if child.returncode is None:
                processes.kill_group(child.pid, signal.SIGKILL)
                await child.wait()
    code = child.returncode or 0
    return ExecResult(
        exit_code=TIMED_OUT if is_timed_out else 128 - code if code < 0 else code,
        stdout=out.decode(errors="replace"),
        stderr=errors.decode(errors="replace"),
        is_cut=is_out_cut or are_errors_cut,
    )


async def _read(stream: asyncio.StreamReader) -> tuple[bytes, bool]:
    data, is_cut = bytearray(), False
    while chunk := await stream.read(2**16):
        is_cut = is_cut or len(data) + len(chunk) > MAX_OUTPUT_BYTES
        data += chunk[: MAX_OUTPUT_BYTES - len(data)]
    return bytes(data), is_cut


async def _feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it does not read all of it
        stream.write(data)
        await stream.drain()
    stream.close()
