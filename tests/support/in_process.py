"""A control plane in this process: the real store, controller and local executor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from atoll.backends.local.executor import LocalBackend
from atoll.controller.loop import Controller
from atoll.core.spec import TrainingSpec
from atoll.core.status import Training
from atoll.store.sqlite import SQLiteStore


class Plane:
    """A control plane in this process, and one training in it."""

    def __init__(self, store: SQLiteStore, executor: LocalBackend, root: Path) -> None:
        self.store = store
        self.executor = executor
        self.root = root

    async def create(self, **spec: Any) -> Training:
        training = Training(
            namespace="n", uid=uuid.uuid4().hex, spec=TrainingSpec(**spec), created_at=time.time()
        )
        return await self.store.create(training)

    async def until(
        self, training: Training, holds: Callable[[Training], bool], within: float = 100
    ) -> Training:
        deadline = time.monotonic() + within
        while True:
            now = await self.store.get(training.key)
            if holds(now):
                return now
            assert time.monotonic() < deadline, f"{now.status}\n{await self.logs(now)}"
            await asyncio.sleep(0.02)

    async def scale(self, training: Training, target: int) -> None:
        now = await self.store.get(training.key)
        size = replace(now.spec.world_size, target=target)
        await self.store.update_spec(replace(now, spec=replace(now.spec, world_size=size)))

    async def delete(self, training: Training) -> None:
        now = await self.store.get(training.key)
        await self.store.update_spec(replace(now, deletion_requested_at=time.time()))
        deadline = time.monotonic() + 30
        while (self.root / training.uid).exists():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    async def logs(self, training: Training) -> list[str]:
        return [line.text async for line in self.executor.logs(training)]

    async def environments(self, training: Training, count: int) -> list[dict[str, str]]:
        """What each rank was started with, told by the ranks themselves."""
        return [json.loads(line) for line in await self.lines(training, count)]

    async def lines(self, training: Training, count: int) -> list[str]:
        deadline = time.monotonic() + 30
        while len(lines := await self.logs(training)) < count:
            assert time.monotonic() < deadline, lines
            await asyncio.sleep(0.02)
        return lines


@contextlib.asynccontextmanager
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    store = SQLiteStore(tmp_path / "db")
    executor = LocalBackend(tmp_path / "ranks")
    running = asyncio.create_task(Controller(store, {"local": executor}).run())
    try:
        yield Plane(store, executor, tmp_path / "ranks")
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        for training in await store.list():
            await executor.release(training)
        await executor.close()
        store.close()
