"""Scripts that begin with torch loaded: processes of their own, forked from one that has loaded it.

Loading torch and its first optimiser takes seconds of the processor, and a small replica needs
hardly more for its whole run. Where starting Python is the subject, start Python.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from subprocess import CompletedProcess, TimeoutExpired
from typing import Any, Self, TextIO

_forkserver = multiprocessing.get_context("forkserver")
_forkserver.set_forkserver_preload(["torch._dynamo", "torch.distributed", "atoll.diloco"])
_STREAMS = ("stdin", "stdout", "stderr")


class Forked:
    """One of them, with as much of `subprocess.Popen` as tests use, and pipes for all streams."""

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        self.args = command
        pipes = [_forkserver.Pipe(duplex=False) for _ in _STREAMS]
        theirs = [pipe[number > 0] for number, pipe in enumerate(pipes)]
        ours = [pipe[number == 0] for number, pipe in enumerate(pipes)]
        self._process = _forkserver.Process(target=_run, args=(command, dict(env), theirs))
        self._process.start()
        for connection in theirs:
            connection.close()
        assert self._process.pid is not None
        self.pid = self._process.pid
        files = [_file(connection, mode) for connection, mode in zip(ours, "wrr", strict=True)]
        self.stdin: TextIO | None = files[0]
        self.stdout: TextIO | None = files[1]
        self.stderr: TextIO | None = files[2]

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it still says until it ends."""
        if self.stdin is not None:
            self.stdin.close()
        with ThreadPoolExecutor(2) as readers:
            said = [readers.submit(stream.read) for stream in (self.stdout, self.stderr) if stream]
            try:
                self.wait(timeout)
            except TimeoutExpired:
                self.kill()  # or what it says would never end
                raise
            return said[0].result(), said[1].result()

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing of it is left, whatever happened."""
        self.kill()
        self.wait()
        for stream in filter(None, (self.stdin, self.stdout, self.stderr)):
            stream.close()


def run_forked(command: list[str], env: Mapping[str, str], timeout: float) -> CompletedProcess[str]:
    with Forked(command, env) as process:
        said = process.communicate(timeout)
        return CompletedProcess(command, process.wait(), *said)


def _file(connection: Connection[Any, Any], mode: str) -> TextIO:
    file = os.fdopen(os.dup(connection.fileno()), mode)
    connection.close()
    return file  # type: ignore[return-value]


def _run(command: list[str], env: dict[str, str], streams: list[Connection[Any, Any]]) -> None:
    """In the new process: becomes what `python SCRIPT WORDS…` would be."""
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin = open(0)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = command
    sys.path[0] = os.path.dirname(command[0])
    try:
        runpy.run_path(command[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()
