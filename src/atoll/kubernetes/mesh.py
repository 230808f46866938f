"""The mesh gates of the trainings on a cluster: one watch each, for as long as it is looked at.

What the agents say comes through each training's etcd and costs the API server nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable

from atoll.core.errors import BackendError
from atoll.core.ports import Key
from atoll.core.status import MeshStatus, Training
from atoll.kubernetes.fabric import Members, fabric_folder
from atoll.mesh.etcd import EtcdKeys
from atoll.mesh.reach import MeshVerdict
from atoll.mesh.watch import MeshWatch

log = logging.getLogger(__name__)


class Gate:
    """The gate of one training, at one etcd."""

    def __init__(
        self, training: Training, endpoint: str, deadline_s: float, ring: Callable[[], None]
    ):
        self.endpoint = endpoint
        self._ring = ring
        self._keys = EtcdKeys(endpoint)
        self._agents: frozenset[str] = frozenset()
        self._task: asyncio.Task[None] | None = None
        self.watch = MeshWatch(
            self._keys, self._told, deadline_s=deadline_s, folder=fabric_folder(training)
        )

    def follow(self, members: Members, now: float) -> None:
        if members.agents != self._agents:
            self._agents = members.agents
            already_s = max(now - members.placed_at, 0.0)
            self._task = asyncio.create_task(self._run(self._task, already_s))
            self._task.add_done_callback(_log_end)

    async def _run(self, before: asyncio.Task[None] | None, already_s: float) -> None:
        await _end(before)
        await self.watch.run(self._agents, already_s)

    async def close(self) -> None:
        await _end(self._task)
        self._task = None
        await self._keys.close()

    def _told(self, verdict: MeshVerdict) -> None:
        self._ring()


class Meshes:
    """`ring` hears of the trainings whose verdict is another now."""

    def __init__(self, ring: Callable[[Key], None], deadline_s: float) -> None:
        self._ring = ring
        self._deadline_s = deadline_s
        self._gates: dict[str, Gate] = {}

    async def follow(
        self, training: Training, endpoint: str, members: Members | None, now: float
    ) -> MeshStatus | None:
        """The newest verdict; None where nothing new is known.

        `endpoint` is empty while its etcd does not answer, `members` None while ranks are placed:
        what was found before holds until then.
        """
        gate = self._gates.get(training.uid)
        if gate is not None and endpoint and gate.endpoint != endpoint:
            await self._gates.pop(training.uid).close()
            gate = None
        if gate is None and endpoint and members is not None:
            gate = Gate(training, endpoint, self._deadline_s, lambda: self._ring(training.key))
            self._gates[training.uid] = gate
        if gate is None:
            return None
        if members is not None:
            gate.follow(members, now)
        verdict = gate.watch.verdict
        return MeshStatus(state=verdict.state, message=verdict.message, hosts=len(gate.watch.hosts))

    async def drop(self, training: Training, shared: str | None) -> None:
        """It is watched no more; in an etcd that outlives it, its keys are gone."""
        gate = self._gates.pop(training.uid, None)
        if gate is not None:
            await gate.close()
        if shared is None:
            return
        others = {host for other in self._gates.values() for host in other.watch.hosts}
        async with EtcdKeys(shared) as keys:
            watch = MeshWatch(keys, folder=fabric_folder(training))
            with contextlib.suppress(BackendError):  # an etcd that is down must not hold us up
                await watch.clear(keep=others)

    async def sweep(self, known: Callable[[], Awaitable[set[str]]]) -> None:
        """Trainings that were removed by force are watched no more."""
        watched = set(self._gates)
        for uid in watched - await known() if watched else ():
            if gate := self._gates.pop(uid, None):
                await gate.close()

    async def close(self) -> None:
        while self._gates:
            await self._gates.popitem()[1].close()


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("the watch over a mesh ended: %s", error, exc_info=error)
