"""An executor of 10,000 ranks that runs none, and the life of a training on it in any store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.controller.reconcile import Reconciler
from atoll.core.clock import Now
from atoll.core.errors import NotFound
from atoll.core.model import decode, encode
from atoll.core.ports import Executor, Key
from atoll.core.spec import MAX_WORLD, TrainingSpec, WorldSize
from atoll.core.status import DesiredState, Exit, Observation, ObservedRank, Training
from atoll.server.basilica.wire import distributed

BEGIN = 1_800_000_000.0
NAME = "crowd"


class Crowd(Executor):
    """Its ranks run at once, and end when and how the test says."""

    def __init__(self) -> None:
        self.desired: DesiredState | None = None
        self.ends: dict[int, Exit] = {}

    async def apply(self, training: Training, desired: DesiredState) -> None:
        self.desired = desired

    async def observe(self, training: Training) -> Observation:
        if self.desired is None:
            return Observation()
        ranks = [self._look(rank) for rank in range(training.spec.world_size.target)]
        return Observation(ranks=ranks, desired=self.desired, is_supervised=True)

    def _look(self, rank: int) -> ObservedRank:
        ended = self.ends.get(rank)
        return ObservedRank(
            rank=rank,
            state="running" if ended is None else "exited",
            started_at=BEGIN + rank / 1000,
            exit=ended,
            pod_name=f"crowd-{rank}-{rank * 7919 % 99_991:05d}",
            host=f"ip-10-0-{rank // 256}-{rank % 256}.internal",
        )

    async def release(self, training: Training) -> None:
        self.desired = None

    async def purge(self, training: Training) -> None:
        self.desired = None

    async def changes(self) -> AsyncIterator[Key]:
        yield "", NAME


def ends(*, is_each_different: bool) -> dict[int, Exit]:
    if not is_each_different:
        typo = Exit(code=127, at=BEGIN + 60, reason="CommandNotFound", log_tail=["not found"])
        return dict.fromkeys(range(MAX_WORLD), typo)
    return {
        rank: Exit(
            code=1 + rank % 255,
            at=BEGIN + 60 + rank * 7919 % 99_991 / 1000,
            reason="Error",
            message=f"rank {rank} could not read /data/{rank}",
            log_tail=[f"rank {rank}: line {line}" for line in range(20)],
        )
        for rank in range(MAX_WORLD)
    }


async def live_and_die(
    store: Any,
    namespace: str,
    stored_bytes: Callable[[], Awaitable[int]],
    *,
    executor: str,
    is_each_different: bool,
) -> list[int]:
    """10,000 ranks are created, run, fail, are told of and deleted. The bytes stored of them while
    they run and when they have ended."""
    key, crowd = (namespace, NAME), Crowd()
    executors: Any = {executor: crowd}
    reconciler = Reconciler(store, executors, lambda: Now.at(BEGIN + 100))

    async def settle() -> Training:
        while await reconciler.reconcile(key) == 0.0:
            pass
        training: Training = await store.get(key)
        return training

    world = WorldSize(min=MAX_WORLD, target=MAX_WORLD, max=MAX_WORLD)
    spec = TrainingSpec(name=NAME, command=["pyhton"], world_size=world, executor=executor)
    await store.create(Training(namespace=namespace, uid="u", spec=spec, created_at=BEGIN))
    await settle()
    training = await settle()
    assert (training.status.phase, training.world.ready) == ("ready", MAX_WORLD)
    sizes = [await stored_bytes()]
    assert await settle() == training, "a look that shows nothing new writes nothing"

    crowd.ends = ends(is_each_different=is_each_different)
    training = await settle()
    status = training.status
    assert status.phase == "failed"
    codes = {e.rank: (e.exit_code, e.ended_at) for e in status.rank_exits}
    assert codes == {rank: (e.code, e.at) for rank, e in crowd.ends.items()}
    cause = status.root_cause
    assert cause is not None
    assert cause.log_tail == crowd.ends[cause.rank].log_tail
    sizes.append(await stored_bytes())
    assert len(await store.events(key)) < 20
    assert "StatusIncomplete" not in {c.type for c in status.conditions}

    answer = decode(encode(training), Training)  # as the API and the SDK have it
    assert len(answer.status.rank_exits) == MAX_WORLD
    exits = distributed(training)["rankExits"]
    assert [e["rank"] for e in exits] == list(range(MAX_WORLD))

    await store.update_spec(replace(training, deletion_requested_at=BEGIN + 200))
    with pytest.raises(NotFound):
        await settle()
    return sizes
