"""Two servers: a whole control plane, and one whose statuses the test writes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

import atoll
from atoll.core.phase import Phase
from atoll.core.ports import Executor
from atoll.core.status import LogLine, Status, Training, WorldStatus
from atoll.sdk.endpoint import read_token, running, start, start_time
from atoll.server.app import create_app
from atoll.server.http.auth import hash_token
from atoll.server.http.server import GuardedServer, Limits, listen
from atoll.server.http.streams import Streams
from atoll.store.database import SQLiteTokens
from atoll.store.sqlite import SQLiteStore

PATIENCE_S = 60


class PrintedLogs(Executor):
    """An executor that only has logs: these tests write statuses by hand, so nothing runs."""

    name = "local"

    async def logs(
        self,
        training: Training,
        *,
        ranks: Sequence[int] | None = None,
        tail: int | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        for number in range(3):
            for rank in (0, 1):
                if ranks is None or rank in ranks:
                    yield LogLine(rank=rank, text=f"line {number}")
        while follow is not None and not follow():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class Served:
    """The real server on a real port and a real store; the test plays the controller."""

    def __init__(
        self,
        where: Path,
        executors: Any = None,
        limits: Limits | None = None,
        is_metrics_open: bool = True,
        **settings: Any,
    ) -> None:
        self.loop = asyncio.new_event_loop()
        self.store = SQLiteStore(where / "db", **settings)
        self.tokens = SQLiteTokens(where / "db")
        self.streams = Streams(heartbeat_s=0.2)
        app = create_app(
            store=self.store,
            tokens=self.tokens,
            executors={"local": PrintedLogs()} if executors is None else executors,
            streams=self.streams,
            is_metrics_open=is_metrics_open,
        )
        self.server = GuardedServer(app, limits=limits)
        self._socket = listen("127.0.0.1", 0)
        port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        self.wait_for(lambda: self.server.started)
        self.url = f"http://127.0.0.1:{port}"
        for name in ("one", "two"):
            self.do(self.tokens.add(hash_token(f"token-{name}"), name, name, 0.0))
        self.http = self.client("one")

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.server.serve([self._socket]))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())

    def client(self, namespace: str) -> httpx2.Client:
        headers = {"Authorization": f"Bearer token-{namespace}"}
        return httpx2.Client(base_url=self.url, headers=headers, timeout=30)

    def sdk(self, namespace: str = "one") -> atoll.Client:
        return atoll.Client(self.url, f"token-{namespace}")

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def wait_for(self, condition: Callable[[], bool], patience_s: float = 30.0) -> None:
        pause = threading.Event()
        for _ in range(int(patience_s / 0.01)):
            if condition():
                return
            pause.wait(0.01)
        raise AssertionError("it did not come true")

    def create(self, name: str, **fields: Any) -> dict[str, Any]:
        body = {
            "name": name,
            "worldSize": {"min": 1, "target": 2, "max": 4},
            "command": ["true"],
            **fields,
        }
        answer = self.http.post("/v1/trainings", json=body)
        assert answer.status_code == 201, answer.text
        made: dict[str, Any] = answer.json()
        return made

    def see(self, name: str, phase: str, ready: int = 0, namespace: str = "one") -> Training:
        """What a controller does: write down what it saw."""

        async def write() -> Training:
            training = await self.store.get((namespace, name))
            size = training.spec.world_size
            world = WorldStatus(
                ready=ready,
                target=size.target,
                min=size.min,
                max=size.max,
                below_minimum=ready < size.min,
            )
            status = Status(
                phase=Phase(phase), world=world, observed_generation=training.generation
            )
            return await self.store.update_status(training, replace(status))

        found: Training = self.do(write())
        return found

    def remove(self, name: str, namespace: str = "one") -> None:
        async def write() -> None:
            await self.store.remove(await self.store.get((namespace, name)))

        self.do(write())

    def close(self) -> None:
        self.http.close()
        self.loop.call_soon_threadsafe(self.streams.close)
        self.server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()
        self.tokens.close()
        self.store.close()
        self.loop.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path)
    yield server
    server.close()


class Plane:
    """A whole control plane in a process of its own, with real ranks."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.process = start(where, is_owned=True)
        self.url, self.token = self.process.url, read_token(where)

    def client(self) -> atoll.Client:
        return atoll.Client(self.url, self.token)


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    found = Plane(tmp_path_factory.mktemp("plane"))
    yield found
    found.process.stop()


@pytest.fixture
def client(plane: Plane) -> Iterator[atoll.Client]:
    """Its trainings are gone after the test."""
    with plane.client() as found:
        yield found
        for training in found.list():
            training.delete()


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory of our own; whatever serves it afterwards is stopped."""
    found = tmp_path / "state"
    monkeypatch.setenv("ATOLL_STATE_DIR", str(found))
    monkeypatch.delenv("ATOLL_URL", raising=False)
    monkeypatch.delenv("ATOLL_TOKEN", raising=False)
    yield found
    if running(found):
        with atoll.Client() as client:
            for training in client.list():
                training.delete()
        stop(found)


def told(where: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((where / "endpoint.json").read_text())
    return found


def stop(where: Path, how: signal.Signals = signal.SIGTERM) -> None:
    """That one is gone; a client that needs one may have started the next by then."""
    pid, started = int(str(told(where)["pid"])), told(where)["startTime"]
    os.kill(pid, how)
    until(lambda: start_time(pid) != started)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
