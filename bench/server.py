"""How fast the face is: waits, waiters, imports, status reads. Prints a table, asserts nothing.

`python bench/server.py` starts a control plane of its own; wrk is used for reads if it is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import uvicorn
from msgspec.structs import replace

import atoll
from atoll.core.phase import Phase
from atoll.core.status import RankStatus, Status, WorldStatus
from atoll.sdk.endpoint import read_token, start
from atoll.server.app import create_app
from atoll.server.http.auth import hash_token
from atoll.store.database import SQLiteTokens
from atoll.store.sqlite import SQLiteStore

RESULTS = Path(__file__).parent / "results" / "server.json"
WAITERS = 500
CHANGES = 200


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Written:
    """A server whose statuses this program writes, so that it knows when each was stored."""

    def __init__(self, where: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.store = SQLiteStore(where / "db")
        self.tokens = SQLiteTokens(where / "db")
        app = create_app(store=self.store, tokens=self.tokens, executors={"local": None})  # type: ignore[dict-item]
        self.server = uvicorn.Server(
            uvicorn.Config(app, port=0, log_config=None, access_log=False, lifespan="on")
        )
        threading.Thread(target=self._run, daemon=True).start()
        while not self.server.started:
            time.sleep(0.01)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.do(self.tokens.add(hash_token("t"), "default", "", 0.0))

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.server.serve())

    def do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def see(self, name: str, phase: str) -> float:
        """Written; returns when."""
        training = await self.store.get(("default", name))
        world = WorldStatus(ready=4, target=4, min=1, max=4, below_minimum=False)
        ranks = [RankStatus(rank=rank, phase="Running", node="host") for rank in range(4)]
        status = Status(phase=Phase(phase), world=world, ranks=ranks, observed_generation=1)
        await self.store.update_status(training, replace(status, message=str(time.time())))
        return time.perf_counter()


def waits(served: Written) -> dict[str, Any]:
    """From the change being durable to the return of `result()`, in another process."""
    code = (
        "import sys, time, atoll\n"
        "client = atoll.Client(sys.argv[1], 't')\n"
        "for name in sys.stdin:\n"
        "    t = client.get(name.strip())\n"
        "    print('go', flush=True)\n"
        "    t.result(60)\n"
        "    print(time.perf_counter(), flush=True)\n"
    )
    took: list[float] = []
    with atoll.Client(served.url, "t") as client, _program(code, served.url) as waiter:
        for number in range(CHANGES):
            name = f"wait-{number}"
            client.deploy_distributed(name, command=["true"], world_size=4)
            waiter.stdin.write(f"{name}\n")
            waiter.stdin.flush()
            waiter.stdout.readline()
            time.sleep(0.03)  # until it listens
            stored = served.do(served.see(name, "succeeded"))
            took.append(float(waiter.stdout.readline()) - stored)
    return {"p50 ms": 1e3 * statistics.median(took), "p99 ms": 1e3 * percentile(took, 0.99)}


@contextlib.contextmanager
def _program(code: str, *words: str) -> Iterator[Any]:
    program = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield program
    finally:
        program.stdin.close()  # type: ignore[union-attr]
        program.wait()


def waiters(url: str, token: str, pid: int) -> dict[str, Any]:
    """500 waits at once on one training: what they cost while nothing changes, and at the end."""

    async def run() -> dict[str, Any]:
        with atoll.Client(url, token) as client:
            folder = tempfile.mkdtemp()
            hold = f"while [ ! -e {folder}/go ]; do sleep 0.2; done"
            t = await client.deploy_distributed_async("held", command=["sh", "-c", hold])
            await t.wait_until_min_world_async(60)
            ends: list[float] = []

            async def wait() -> None:
                await t.result_async(300)
                ends.append(time.perf_counter())

            tasks = [asyncio.create_task(wait()) for _ in range(WAITERS)]
            await asyncio.sleep(10)
            before, began = cpu_seconds(pid), time.perf_counter()
            await asyncio.sleep(10)
            idle = (cpu_seconds(pid) - before) / (time.perf_counter() - began)
            open(f"{folder}/go", "w").close()  # noqa: ASYNC230
            await asyncio.gather(*tasks)
            shutil.rmtree(folder)
            await t.delete_async()
        return {
            "server CPU while idle %": 100 * idle,
            "first to last return ms": 1e3 * (max(ends) - min(ends)),
        }

    return asyncio.run(run())


def imports() -> dict[str, Any]:
    def took(code: str) -> float:
        times = []
        for _ in range(15):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(time.perf_counter() - began)
        return 1e3 * statistics.median(times)

    bare = took("")
    return {
        "bare python ms": bare,
        "import atoll ms over bare": took("import atoll") - bare,
        "atoll.Client ms over bare": took("import atoll; atoll.Client") - bare,
    }


def reads(url: str, token: str, pid: int) -> dict[str, Any]:
    """Status reads of a training with 4 ranks, 16 connections."""
    path, header = f"{url}/v1/trainings/read", f"Authorization: Bearer {token}"
    with atoll.Client(url, token) as client:
        client.deploy_distributed("read", command=["sleep", "60"], world_size=4, wait="target")
        before, began = cpu_seconds(pid), time.perf_counter()
        if shutil.which("wrk"):
            command = ["wrk", "-t1", "-c16", "-d5", "--latency", "-H", header, path]
            text = subprocess.run(command, capture_output=True, text=True).stdout
            words = {
                line.split()[0]: line.split()[-1] for line in text.splitlines() if line.split()
            }
            found: dict[str, Any] = {
                "reads/s": float(words["Requests/sec:"]),
                "p50": words["50%"],
                "p99": words["99%"],
            }
        else:
            found = _reads_without_wrk(path, header)
        busy = (cpu_seconds(pid) - before) / (time.perf_counter() - began)
        client.get("read").delete()
    per_core = found["reads/s"] / busy if busy else 0.0
    return {**found, "cores used": busy, "reads/s for one core": per_core}


def _reads_without_wrk(path: str, header: str) -> dict[str, Any]:
    name, _, value = header.partition(": ")
    took: list[float] = []
    with httpx2.Client(headers={name: value}) as http:
        began = time.perf_counter()
        while time.perf_counter() < began + 5:
            one = time.perf_counter()
            http.get(path)
            took.append(time.perf_counter() - one)
    p50, p99 = statistics.median(took), percentile(took, 0.99)
    return {"reads/s": len(took) / 5, "p50": f"{1e3 * p50:.2f}ms", "p99": f"{1e3 * p99:.2f}ms"}


def launches(url: str, token: str) -> dict[str, Any]:
    """Four no-op ranks from Python, beside torchrun in the same run."""
    found: dict[str, Any] = {}
    with atoll.Client(url, token) as client:
        times = []
        for number in range(10):
            began = time.perf_counter()
            client.deploy_distributed(f"n-{number}", command=["true"], world_size=4).result(60)
            times.append(time.perf_counter() - began)
        found["4 no-op ranks, server up ms"] = 1e3 * statistics.median(times)
    times = []
    for _ in range(3):
        began = time.perf_counter()
        with atoll.Client.local() as private:
            private.deploy_distributed("n", command=["true"], world_size=4).result(60)
            times.append(time.perf_counter() - began)
    found["4 no-op ranks, server started too ms"] = 1e3 * statistics.median(times)
    torchrun = Path(sys.executable).with_name("torchrun")
    if torchrun.exists():
        times = []
        for _ in range(3):
            began = time.perf_counter()
            subprocess.run(
                [torchrun, "--nproc-per-node", "4", "--no-python", "true"], capture_output=True
            )
            times.append(time.perf_counter() - began)
        found["torchrun, 4 no-op ranks ms"] = 1e3 * statistics.median(times)
    return found


def main() -> None:
    where = Path(tempfile.mkdtemp(prefix="atoll-bench-"))
    server = start(where, is_owned=True)
    url, token, pid = server.url, read_token(where), server.process.pid
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "imports": imports,
        "status reads": lambda: reads(url, token, pid),
        "launch": lambda: launches(url, token),
        "waits": lambda: waits(Written(Path(tempfile.mkdtemp()))),
        f"{WAITERS} waiters": lambda: waiters(url, token, pid),
    }
    results: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "load average at start": os.getloadavg(),
    }
    chosen = sys.argv[1:] or list(parts)
    for name in chosen:
        results[name] = parts[name]()
        for what, value in results[name].items():
            shown = f"{value:10.2f}" if isinstance(value, float) else f"{value:>10}"
            print(f"{name:14} {what:38} {shown}", flush=True)
    results["load average at end"] = os.getloadavg()
    server.stop()
    if not sys.argv[1:]:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
