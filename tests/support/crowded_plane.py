"""A control plane whose store holds what was invented for it: thousands of trainings, and large
worlds. No rank runs. For a browser to look at."""

from __future__ import annotations

import asyncio
import contextlib
import math
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from msgspec.structs import replace

from atoll.agent.metrics import MetricWriter, batch_of
from atoll.cli.plane import link_of
from atoll.core.phase import Phase
from atoll.core.ports import Executor
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import (
    Exit,
    LogLine,
    RankExit,
    RankStatus,
    Status,
    Training,
    WorldPoint,
    WorldStatus,
)
from atoll.metrics.store import MetricStore
from atoll.server.app import create_app
from atoll.server.http.auth import hash_token
from atoll.server.http.server import GuardedServer, listen
from atoll.server.http.streams import Streams
from atoll.server.ui.sessions import Sessions
from atoll.store.database import SQLiteTokens
from atoll.store.sqlite import SQLiteStore

T = TypeVar("T")
TOKEN = "t"


class IdleExecutor(Executor):
    """Accepts everything and runs nothing. What ranks printed was invented too."""

    name = "local"

    def __init__(self) -> None:
        self.lines: dict[str, list[LogLine]] = {}  # by training

    async def logs(
        self, training: Training, *, ranks: Any = None, tail: int | None = None, follow: Any = None
    ) -> AsyncIterator[LogLine]:
        for line in self.lines.get(training.name, []):
            if ranks is None or line.rank in ranks:
                yield line
        while follow is not None and not follow():  # noqa: ASYNC110
            await asyncio.sleep(0.2)


class CrowdedPlane:
    """It serves in a thread; `put` and `report` fill it from outside."""

    def __init__(self, where: Path) -> None:
        self.store = SQLiteStore(where / "db")
        self.store._db.execute("pragma synchronous = off")
        self.tokens = SQLiteTokens(where / "db")
        self.executor = IdleExecutor()
        self.metrics = MetricStore(where / "series.db")
        self.streams = Streams()
        self._listening = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        sessions = Sessions("0123456789ab", is_loopback=True)
        self.origin = self.url.replace("127.0.0.1", sessions.host)  # of the dashboard's pages
        self._numbers: dict[tuple[str, int], int] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        app = create_app(
            store=self.store,
            tokens=self.tokens,
            executors={"local": self.executor},
            streams=self.streams,
            metrics=self.metrics,
            sessions=sessions,
        )
        self._server = GuardedServer(app)
        self._serving: Future[None] | None = None

    def start(self) -> None:
        """Begins to serve; what was put before is there at once."""
        self.run(self.tokens.add(hash_token(TOKEN), "default", "", 0.0))
        serving = self._server.serve([self._listening])
        self._serving = asyncio.run_coroutine_threadsafe(serving, self._loop)
        while not self._server.started:
            assert not self._serving.done()
            time.sleep(0.01)

    def stop(self) -> None:
        self.streams.close()
        self._server.should_exit = True
        if self._serving is not None:
            self._serving.result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()
        self._listening.close()
        self.metrics.close()
        self.tokens.close()
        self.store.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)

    def put(self, *trainings: Training) -> None:
        async def store_all() -> None:
            for training in trainings:
                stored = await self.store.create(replace(training, status=Status()))
                await self.store.update_status(stored, training.status)

        self.run(store_all())

    def change(self, name: str, status: Status) -> None:
        async def store_it() -> None:
            training = await self.store.get(("default", name))
            await self.store.update_status(training, status)

        self.run(store_it())

    def report(
        self, uid: str, rank: int, figures: dict[str, list[tuple[float, int, float]]]
    ) -> None:
        """Points of one rank: time, step, value."""
        number = self._numbers[uid, rank] = self._numbers.get((uid, rank), 0) + 1
        points = {name: [list(each) for each in told] for name, told in figures.items()}
        line = batch_of(MetricWriter(rank, 1, 0, f"life{rank}"), number, points, 0)  # type: ignore[arg-type]
        self.metrics.take(uid, [line.rstrip(b"\n")])

    def link(self) -> str:
        bearer = {"Authorization": f"Bearer {TOKEN}"}
        made = httpx2.post(f"{self.url}/ui/codes", headers=bearer).json()
        return link_of(self.url, made["host"], made["code"])


@contextlib.contextmanager
def crowded_plane() -> Iterator[CrowdedPlane]:
    with tempfile.TemporaryDirectory(prefix="atoll-crowd-") as folder:
        plane = CrowdedPlane(Path(folder))
        try:
            yield plane
        finally:
            plane.stop()


def training(
    name: str, status: Status, *, target: int = 4, least: int = 2, at: float | None = None
) -> Training:
    size = WorldSize(min=least, target=target, max=max(8, target))
    spec = TrainingSpec(
        name=name, command=["python", "train.py"], world_size=size, executor="local"
    )
    created = time.time() - 3600 if at is None else at
    return Training(
        namespace="default", uid=f"uid-{name}", spec=spec, created_at=created, status=status
    )


def many(count: int) -> list[Training]:
    """One in twenty of them failed, the others succeeded, but for a dozen that run."""
    now, size = time.time(), WorldSize(min=2, target=4, max=8)
    out = []
    for number in range(count):
        started = now - 60.0 * (count - number)
        if number % (count // 12 + 1) == 7:
            ranks = [RankStatus(rank=r, phase="Running", started_at=started) for r in range(4)]
            status = Status(
                phase=Phase.READY, world=WorldStatus.of(4, size), ranks=ranks, started_at=started
            )
        elif number % 20 == 3:
            cause = RankExit(
                rank=1, exit_code=1, termination_reason="Error", ended_at=started + 30,
                started_at=started, log_tail=[f"RuntimeError: number {number}"],
            )  # fmt: skip
            status = Status(
                phase=Phase.FAILED, root_cause=cause, rank_exits=[cause], started_at=started,
                ended_at=started + 30,
            )  # fmt: skip
        else:
            ends = [
                RankExit(rank=r, exit_code=0, termination_reason="Completed", ended_at=started + 50)
                for r in range(4)
            ]
            status = Status(
                phase=Phase.SUCCEEDED, world=WorldStatus.of(4, size), rank_exits=ends,
                started_at=started, ended_at=started + 50,
            )  # fmt: skip
        out.append(training(f"run-{number:05}", status, at=started - 1))
    return out


def large(ranks: int, *, name: str = "large") -> Training:
    """A world of which three ranks failed and were started again, and two wait."""
    now = time.time()
    started = now - 1800
    killed = Exit(code=137, at=now - 600, reason="OOMKilled", signal="SIGKILL")
    rows = []
    for rank in range(ranks):
        row = RankStatus(
            rank=rank, phase="Running", node=f"node-{rank // 8:03}", attempt=0,
            started_at=started + rank * 0.01,
        )  # fmt: skip
        if rank in (5, ranks // 2, ranks - 3):
            row = replace(row, restarts=1, attempt=1, previous_exit=killed, started_at=now - 590)
        elif rank in (7, ranks - 2):
            row = RankStatus(rank=rank, node=None, message="waits for a node with 8 H100")
        rows.append(row)
    size = WorldSize(min=ranks // 2, target=ranks, max=ranks)
    status = Status(
        phase=Phase.READY,
        world=WorldStatus.of(ranks - 2, size),
        ranks=rows,
        started_at=started,
        world_size_history=[
            WorldPoint(at=started, target=ranks, ready=0),
            WorldPoint(at=started + 20, target=ranks, ready=ranks - 40),
            WorldPoint(at=started + 90, target=ranks, ready=ranks - 2),
        ],
    )
    return training(name, status, target=ranks, least=ranks // 2)


def losing(plane: CrowdedPlane, uid: str, ranks: int, points: int = 120) -> None:
    """Loss, tokens and what the machine sees, of each rank."""
    begun = time.time() - 1800
    for rank in range(ranks):
        times = [begun + 1800 * at / points for at in range(points)]
        plane.report(
            uid,
            rank,
            {
                "loss": [
                    (t, n, 2.2 + 4 / (1 + n / 9) + 0.1 * math.sin(n * (rank + 1)))
                    for n, t in enumerate(times)
                ],
                "tokens": [(t, n, 4096.0 * n) for n, t in enumerate(times)],
                "machine/memory": [
                    (t, n, 2e10 + 1e8 * rank + 1e7 * n) for n, t in enumerate(times)
                ],
                "machine/cpu": [(t, n, 7.5 + (rank % 5) / 10) for n, t in enumerate(times)],
            },
        )
