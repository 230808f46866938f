"""Store, executor and controller as a process of their own, for tests that kill it.

Speaks JSON lines on its standard input and output. It can be armed to SIGKILL itself just before
or after a given call of its controller.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec

from atoll.backends.local.executor import LocalBackend
from atoll.controller.loop import Controller, machine_clock, write_mark
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, Conflict
from atoll.core.executors import PlaneContext, load
from atoll.core.spec import TrainingSpec
from atoll.core.status import Training, usage
from atoll.store.sqlite import SQLiteStore


class Crashing:
    """Passes every call on; at the one it is armed for, the process is killed instead."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._armed: tuple[str, str] | None = None
        self._left = 0

    def arm(self, call: str, when: str, nth: int) -> None:
        self._armed, self._left = (call, when), nth

    def __getattr__(self, name: str) -> Any:
        wrapped = getattr(self._inner, name)
        if self._armed is None or name != self._armed[0]:
            return wrapped

        async def called(*args: Any, **options: Any) -> Any:
            self._left -= 1
            if self._left == 0 and self._armed == (name, "before"):
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                return await wrapped(*args, **options)
            finally:  # however it ended: a release may ask to be called again
                if self._left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        return called


class Plane:
    def __init__(self, store: Any, executor: Any, crashing: list[Crashing], clock: Clock) -> None:
        self.store, self.executor, self.crashing = store, executor, crashing
        self.clock = clock

    async def arm(self, call: str, when: str, nth: int) -> None:
        """SIGKILL itself before or after the nth such call of the controller from now on."""
        for part in self.crashing:
            part.arm(call, when, nth)

    async def ping(self) -> int:
        return os.getpid()

    async def create(self, spec: Any, key: str) -> Training:
        training = Training(
            namespace="default",
            uid=uuid.uuid4().hex,
            created_at=time.time(),
            spec=msgspec.convert(spec, TrainingSpec),
        )
        return await self.store.create(training, idempotency_key=key)

    async def get(self, name: str) -> Training:
        return await self.store.get(("default", name))

    async def names(self) -> list[str]:
        return [t.name for t in await self.store.list()]

    async def ask(self, name: str, change: dict[str, Any]) -> Training:
        """Scale or cancel, whatever else is being written meanwhile."""
        while True:
            training = await self.get(name)
            spec = training.spec
            if "target" in change:
                world = msgspec.structs.replace(spec.world_size, target=change["target"])
                spec = msgspec.structs.replace(spec, world_size=world)
            if change.get("cancel"):
                spec = msgspec.structs.replace(spec, cancel=True)
            wanted = msgspec.structs.replace(training, spec=spec)
            if change.get("delete"):
                wanted = msgspec.structs.replace(wanted, deletion_requested_at=time.time())
            try:
                return await self.store.update_spec(wanted)
            except Conflict:
                continue

    async def changed(self, name: str, after: int, within_s: float) -> Training:
        """The training once it is newer than `after`, or as it is when time is up."""
        key = ("default", name)
        training = await self.store.get(key)
        if training.resource_version > after:
            return training
        try:
            async with asyncio.timeout(within_s):
                async for change in self.store.watch(training.resource_version, key):
                    return await self.store.get(change.training.key)
        except TimeoutError:
            pass
        return await self.store.get(key)

    async def quarantine(self) -> list[str]:
        return list(self.executor.notes())

    async def usage(self, name: str) -> float:
        return usage(await self.get(name), self.clock()).rank_seconds

    async def events(self, name: str) -> Any:
        return await self.store.events(("default", name))

    async def log_bytes(self, name: str, rank: int) -> int:
        training = await self.get(name)
        return sum(
            [len(line.text) + 1 async for line in self.executor.logs(training, ranks=[rank])]
        )

    async def log_lines(self, name: str, tail: int | None = None) -> Any:
        training = await self.get(name)
        return [line async for line in self.executor.logs(training, tail=tail)]


async def answer(plane: Plane, line: bytes) -> None:
    request = msgspec.json.decode(line)
    try:
        said = {"ok": await getattr(plane, request["op"])(**request["with"])}
    except AtollError as error:
        said = {"error": type(error).__name__, "text": str(error)}
    sys.stdout.buffer.write(msgspec.json.encode({"id": request["id"], **said}) + b"\n")
    sys.stdout.buffer.flush()


async def executor_of(state: Path, slots: int | None, store: SQLiteStore) -> Any:
    """The local one, or the one that ATOLL_TEST_EXECUTOR tells: its kind, and its options."""
    if told := os.environ.get("ATOLL_TEST_EXECUTOR"):
        kind, options = msgspec.json.decode(told)
        return load(kind).configured("local", options, PlaneContext(state, "test", state))
    local = LocalBackend(state / "trainings", slots=slots)
    await local.start(store)
    return local


async def main(state: Path, slots: int | None) -> None:
    store = SQLiteStore(state / "atoll.db")
    executor = await executor_of(state, slots, store)
    crashing = [Crashing(store), Crashing(executor)]
    clock = machine_clock(state / "clock")
    write_mark(clock, state / "clock")
    running = asyncio.create_task(
        Controller(crashing[0], {"local": crashing[1]}, clock=clock).run()
    )
    running.add_done_callback(lambda task: os._exit(3) if not task.cancelled() else None)
    plane = Plane(store, executor, crashing, clock)
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    answers: set[asyncio.Task[None]] = set()
    while line := await reader.readline():
        task = asyncio.create_task(answer(plane, line))
        answers.add(task)
        task.add_done_callback(answers.discard)
    os._exit(0)  # the test is gone; ranks go on, as they would


if __name__ == "__main__":
    try:
        asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None))
    except AtollError as error:
        sys.exit(f"{type(error).__name__}: {error}")
