"""The link bench of local trainings: this host with itself, in a process beside the ranks.

The result is a file in the training's directory. A control plane that is killed takes the process
with it, and the next one measures again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from atoll.backends.companions import bench_command
from atoll.backends.local import processes
from atoll.core.errors import ValidationError
from atoll.core.model import decode
from atoll.core.status import BENCH_LIMIT_S, BenchResult, ObservedBench

FILE = "bench.json"


class LocalBench:
    """Measurements by training. `notify` is called when one ends."""

    def __init__(self, root: Path, host: str) -> None:
        self._root = root
        self._host = host
        self._running: dict[str, asyncio.Task[None]] = {}
        self._errors: dict[str, str] = {}

    def observe(self, uid: str) -> ObservedBench:
        if uid in self._running:
            return ObservedBench(state="running", message=f"measuring {self._host} with itself")
        if uid in self._errors:
            return ObservedBench(state="failed", message=self._errors[uid])
        try:
            result = decode((self._root / uid / FILE).read_bytes(), BenchResult)
        except (OSError, ValidationError):
            return ObservedBench(state="idle", message="about to be measured")
        return ObservedBench(state="done", result=result)

    def start(self, uid: str, notify: Callable[[], None]) -> None:
        if uid not in self._running:
            self._running[uid] = asyncio.create_task(self._measure(uid, notify))
            notify()

    async def stop(self, uid: str) -> None:
        """Stops the measurement and removes its result."""
        task = self._running.pop(uid, None)
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._errors.pop(uid, None)
        with contextlib.suppress(OSError):  # what cannot be removed keeps nobody from stopping
            (self._root / uid / FILE).unlink()

    async def close(self) -> None:
        for uid in list(self._running):
            task = self._running.pop(uid)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _measure(self, uid: str, notify: Callable[[], None]) -> None:
        error = ""
        try:
            error = await self._run(self._root / uid)
        except OSError as failure:
            error = f"cannot measure: {failure}"
        finally:
            self._running.pop(uid, None)
        if error:
            self._errors[uid] = error
        notify()

    async def _run(self, directory: Path) -> str:
        """Runs the bench. Returns why it failed, or nothing if the result was written."""
        os.makedirs(directory, exist_ok=True, mode=0o700)
        parent = os.getpid()
        arguments = ("--host", self._host, "--output", str(directory / FILE))
        process = await asyncio.create_subprocess_exec(
            *bench_command(sys.executable, "loopback", *arguments, limit_s=BENCH_LIMIT_S),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            preexec_fn=lambda: processes.die_with_parent(parent),
            process_group=0,
        )
        try:
            _, error_output = await process.communicate()
        finally:
            if process.returncode is None:
                processes.kill_group(process.pid, 9)
                await process.wait()
        if process.returncode == 0:
            return ""
        lines = error_output.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"netbench ended with {process.returncode}"
