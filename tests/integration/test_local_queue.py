"""More trainings than this machine has slots: they start in order, and waiting costs nothing."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.support.control_plane import ControlPlane, serving

from atoll.backends.local.executor import LocalBackend
from atoll.controller.loop import Controller, Pass
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Training
from atoll.store.sqlite import MemoryStore

FOREVER = ["sleep", "1000"]


def started_in_order(plane: ControlPlane, names: list[str]) -> list[str]:
    starts = {name: plane.until_over(name).status.started_at for name in names}
    return sorted(names, key=lambda name: starts[name] or 0.0)


def test_a_gang_starts_although_small_ones_keep_coming(tmp_path: Path) -> None:
    with serving(tmp_path / "state", slots=4) as plane:
        running = [plane.create(FOREVER) for _ in range(4)]
        for name in running:
            plane.until_ready(name, 1)
        gang = plane.create(FOREVER, 4)
        plane.until(gang, lambda t: t.status.phase == "pending")
        small = [plane.create("exit 0") for _ in range(8)]
        for name in running:
            plane.ask(name, cancel=True)
            plane.until_released(name)
            small.append(plane.create("exit 0"))
        plane.until_ready(gang, 4)
        assert not [name for name in small if plane.get(name).status.has_run]
        last = plane.until(small[-1], lambda t: t.status.phase == "pending")
        assert "older trainings come first" in last.status.ranks[0].message
        plane.ask(gang, cancel=True)
        for name in small:
            assert plane.until_over(name).status.phase == "succeeded"


def test_the_order_outlives_the_control_plane(tmp_path: Path) -> None:
    with serving(tmp_path / "state", slots=2) as plane:
        first = plane.create(FOREVER, 2)
        plane.until_ready(first, 2)
        gang = plane.create("exit 0", 2)
        names = [gang, *(plane.create("exit 0", 2) for _ in range(4))]
        late = plane.create("exit 0")
        plane.until(late, lambda t: t.status.phase == "pending")
        plane.restart()
        plane.ask(first, cancel=True)
        assert started_in_order(plane, [*names, late]) == [*names, late]


def test_one_that_can_never_start_keeps_nobody_waiting(tmp_path: Path) -> None:
    with serving(tmp_path / "state", slots=2) as plane:
        never = plane.create("exit 0", 3)
        waiting = plane.until(never, lambda t: t.status.phase == "pending")
        assert "0 of 2 slots" in waiting.status.ranks[0].message
        assert plane.until_over(plane.create("exit 0", 2)).status.phase == "succeeded"
        plane.restart()
        assert plane.until_over(plane.create("exit 0", 2)).status.phase == "succeeded"


def test_one_that_is_cancelled_while_it_waits_makes_way(tmp_path: Path) -> None:
    with serving(tmp_path / "state", slots=2) as plane:
        plane.until_ready(plane.create(FOREVER), 1)
        gang = plane.create(FOREVER, 2)
        plane.until(gang, lambda t: t.status.phase == "pending")
        small = plane.create("exit 0")
        plane.until(small, lambda t: t.status.phase == "pending")
        plane.ask(gang, cancel=True)
        assert plane.until_over(small).status.phase == "succeeded"


def test_one_that_runs_grows_before_younger_ones_start(tmp_path: Path) -> None:
    with serving(tmp_path / "state", slots=3) as plane:
        hold = plane.create(FOREVER)
        plane.until_ready(hold, 1)
        elastic = plane.create(FOREVER, 2, min=1)
        plane.until_ready(elastic, 2)
        plane.ask(elastic, target=3)
        plane.until(elastic, lambda t: t.status.observed_generation == 2)
        small = plane.create("exit 0")
        plane.until(small, lambda t: t.status.phase == "pending")
        plane.ask(hold, cancel=True)
        plane.until_ready(elastic, 3)
        assert not plane.get(small).status.has_run
        plane.ask(elastic, target=1)
        assert plane.until_over(small).status.phase == "succeeded"


def test_a_freed_slot_wakes_only_whose_turn_it_is(tmp_path: Path) -> None:
    """Passes of the controller over each training, with 40 in the queue."""
    passes: Counter[str] = Counter()

    def count(done: Pass) -> None:
        passes[done.key[1]] += 1

    async def scene() -> None:
        store, backend = MemoryStore(), LocalBackend(tmp_path / "ranks", slots=1)
        running = asyncio.create_task(Controller(store, {"local": backend}, on_pass=count).run())

        async def create(name: str, command: list[str]) -> Training:
            one = WorldSize(min=1, target=1, max=1)
            spec = TrainingSpec(name=name, command=command, world_size=one, executor="local")
            return await store.create(
                Training(namespace="n", uid=uuid.uuid4().hex, spec=spec, created_at=time.time())
            )

        async def until(holds: Callable[[], Awaitable[bool]]) -> None:
            deadline = time.monotonic() + 60
            while not await holds():
                assert time.monotonic() < deadline
                await asyncio.sleep(0.01)

        async def until_over(training: Training) -> None:
            async def is_over() -> bool:
                return (await store.get(training.key)).status.phase.is_terminal

            await until(is_over)

        async def all_wait() -> bool:
            stored = [await store.get(training.key) for training in behind]
            return all(training.status.phase == "pending" for training in stored)

        async def is_closed() -> bool:
            return not gate.exists()

        gate = tmp_path / "go"
        wait = f"while [ ! -e {gate} ]; do sleep 0.02; done"
        head = await create("head", ["sh", "-c", wait])
        first = [await create(f"a{n}", ["true"]) for n in range(5)]
        last = await create("last", ["sh", "-c", f"rm {gate}; {wait}"])
        behind = [await create(f"z{n}", ["true"]) for n in range(40)]
        await until(all_wait)
        before = dict(passes)
        gate.touch()
        for training in (head, *first):
            await until_over(training)
        await until(is_closed)
        looked_at = {t.name: passes[t.name] - before[t.name] for t in behind}
        gate.touch()
        await until_over(last)
        for training in behind:
            await until_over(training)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for training in (head, *first, last, *behind):
            await backend.release(training)
        await backend.close()
        assert looked_at == {t.name: 0 for t in behind}

    asyncio.run(scene())
