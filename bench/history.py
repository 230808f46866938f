"""What listing, one change and watching cost when much is stored. Ratios within one run.

`python bench/history.py [watch]`: 10 and 10,000 trainings side by side, then many watches at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2

from atoll.core.phase import Phase
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Status, Training
from atoll.server.app import create_app
from atoll.server.http.auth import hash_token
from atoll.server.http.server import GuardedServer, listen
from atoll.server.http.streams import Streams
from atoll.store.database import SQLiteTokens
from atoll.store.sqlite import SQLiteStore

RESULTS = Path(__file__).parent / "results" / "history.json"
FEW, MANY = 10, 10_000
ROUNDS = 60
WATCHES, SCALES = 2500, 300
PAGE = {"limit": 10}  # as many as the small store holds, so that both answer the same


class Executor:
    """Accepts everything and runs nothing."""

    name = "local"


class Stored:
    """A server whose store holds `count` trainings, one in ten of them still running."""

    def __init__(self, count: int) -> None:
        where = Path(tempfile.mkdtemp(prefix="atoll-history-"))
        self.count = count
        self.store = SQLiteStore(where / "db")
        self.tokens = SQLiteTokens(where / "db")
        self.streams = Streams()
        app = create_app(
            store=self.store,
            tokens=self.tokens,
            executors={"local": Executor()},  # type: ignore[dict-item]
            streams=self.streams,
        )
        self.server = GuardedServer(app)
        self.listening = listen("127.0.0.1", 0)

    async def start(self) -> None:
        self.store._db.execute("pragma synchronous = off")  # filling is not what is measured
        for number in range(self.count):
            world = WorldSize(min=1, target=4, max=8)
            name = f"t{number:05}"
            spec = TrainingSpec(
                name=name, command=["python", "train.py"], world_size=world, executor="local"
            )
            stored = await self.store.create(
                Training(namespace="default", uid=name, spec=spec, created_at=time.time())
            )
            phase = Phase.READY if number % 10 == 0 else Phase.SUCCEEDED
            await self.store.update_status(stored, Status(phase=phase))
        self.store._db.execute("pragma synchronous = full")
        await self.tokens.add(hash_token("t"), "default", "", 0.0)
        self.serving = asyncio.create_task(self.server.serve([self.listening]))
        while not self.server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        port = self.listening.getsockname()[1]
        self.http = httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": "Bearer t"},
            limits=httpx2.Limits(max_connections=None),
            timeout=600,
        )

    async def stop(self) -> None:
        await self.http.aclose()
        self.streams.close()
        self.server.should_exit = True
        await self.serving
        self.tokens.close()
        self.store.close()

    async def page(self) -> None:
        assert len((await self.http.get("/v1/trainings", params=PAGE)).json()["items"]) == FEW

    async def phase(self) -> None:
        params = {"limit": 1, "phase": "ready"}
        assert len((await self.http.get("/v1/trainings", params=params)).json()["items"]) == 1

    async def change(self) -> None:
        """A scale, until it was told to a watch of all trainings."""
        self.target = 3 if getattr(self, "target", 4) == 4 else 4
        after = await self.store.version()
        params = {"watch": "true", "after": after}
        async with self.http.stream("GET", "/v1/trainings", params=params) as watch:
            events = watch.aiter_bytes()
            await anext(events)
            path = f"/v1/trainings/t{0:05}/scale"
            assert (await self.http.post(path, json={"target": self.target})).status_code == 200
            async for chunk in events:
                if b"event: changed" in chunk:
                    return


async def ratio(few: Stored, many: Stored, what: str) -> dict[str, float]:
    """The median of each, measured in turns so that both meet the same noise; in processor time of
    server and client, which others on this machine change less."""
    took: dict[str, list[float]] = {"few": [], "many": []}
    for _ in range(ROUNDS):
        for name, stored in (("few", few), ("many", many)):
            began = time.process_time()
            await getattr(stored, what)()
            took[name].append(time.process_time() - began)
    small, large = statistics.median(took["few"]), statistics.median(took["many"])
    return {
        f"{FEW} stored ms": 1e3 * small,
        f"{MANY} stored ms": 1e3 * large,
        "ratio": large / small,
    }


async def watches(stored: Stored) -> dict[str, float]:
    """Many watches of one training, while it is scaled again and again."""
    after = await stored.store.version()
    last = asyncio.Event()
    arrived = 0

    async def follow() -> None:
        nonlocal arrived
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(stored.http.base_url.port or 0), limit=2**22
        )
        head = f"GET /v1/trainings/t{0:05}?watch&after={after} HTTP/1.1\r\nHost: a\r\n"
        writer.write((head + "Authorization: Bearer t\r\n\r\n").encode())
        await reader.readuntil(b"still here")
        ready.release()
        seen = 0
        while seen < SCALES:
            seen += (await reader.read(2**16)).count(b"event: changed")
        arrived += 1
        writer.close()
        if arrived == WATCHES:
            last.set()

    ready = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(follow()) for _ in range(WATCHES)]
    for _ in range(WATCHES):
        await ready.acquire()
    began, busy = time.perf_counter(), time.process_time()
    for number in range(SCALES):
        body = {"target": 1 + number % 7}
        await stored.http.post(f"/v1/trainings/t{0:05}/scale", json=body)
    await last.wait()
    took, busy = time.perf_counter() - began, time.process_time() - busy
    await asyncio.gather(*tasks)
    return {
        "seconds": took,
        "processor seconds, clients included": busy,
        "processor µs for each event and watch": 1e6 * busy / WATCHES / SCALES,
    }


async def measure(chosen: list[str]) -> dict[str, Any]:
    few, many = Stored(FEW), Stored(MANY)
    await few.start()
    if chosen != ["watch"]:
        await many.start()
    parts: dict[str, Callable[[], Awaitable[dict[str, float]]]] = {
        "first page": lambda: ratio(few, many, "page"),
        "by phase": lambda: ratio(few, many, "phase"),
        "one change": lambda: ratio(few, many, "change"),
        "watch": lambda: watches(few),
    }
    results: dict[str, Any] = {}
    for name in chosen or parts:
        results[name] = await parts[name]()
        for what, value in results[name].items():
            print(f"{name:12} {what:40} {value:10.2f}", flush=True)
    await few.stop()
    if chosen != ["watch"]:
        await many.stop()
    return results


def main() -> None:
    results = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load average at start": os.getloadavg(),
        **asyncio.run(measure(sys.argv[1:])),
        "load average at end": os.getloadavg(),
    }
    earlier = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**earlier, **results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
