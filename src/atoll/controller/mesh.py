"""The controller's side of the mesh gate: hosts in, reports in, keys out.

One of these for a training with several hosts. It holds nothing that is not in etcd: a successor
reads the hosts, the roster and the reports there and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from atoll.core.errors import BackendError, ValidationError
from atoll.core.fabric import DEADLINE_S, FABRIC_DIR, Fabric, MeshVerdict, Report, Roster
from atoll.core.mesh import DEGRADED_DIR, GATE_DIR, READY_DIR, MeshState
from atoll.core.model import decode, encode
from atoll.remote.etcd import EtcdKeys

AGAIN_S = 0.2


class MeshWatch:
    """Follows the fabric of `hosts` and writes their keys; `on_verdict` is told every change."""

    def __init__(
        self,
        keys: EtcdKeys,
        on_verdict: Callable[[MeshVerdict], None] = lambda verdict: None,
        *,
        deadline_s: float = DEADLINE_S,
        folder: str = FABRIC_DIR,
    ) -> None:
        self._keys = keys
        self._on_verdict = on_verdict
        self._deadline_s = deadline_s
        self._folder = folder
        self._wanted: frozenset[str] = frozenset()
        self._ever: set[str] = set()  # wanted now or before: their keys are ours to remove
        self._places: dict[str, tuple[str, int]] = {}
        self._fabric = Fabric()
        self._is_overdue = False
        self._was_ready = False
        self._marked: set[str] = set()  # the gate's keys as they are in etcd
        self.verdict = MeshVerdict(MeshState.PENDING, "not all hosts have come up")

    async def run(self, hosts: Iterable[str], already_s: float = 0.0) -> None:
        """Until cancelled; run it again when the hosts are others.

        `already_s` of the deadline were used up by a predecessor.
        """
        self._wanted = frozenset(hosts)
        self._ever |= self._wanted
        self._places, self._marked = {}, set()
        self._is_overdue = self._was_ready = False
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._overdue(max(self._deadline_s - already_s, 0.0)))
            tasks.create_task(self._follow())

    async def clear(self) -> None:
        """No key of these hosts is left, neither the gate's nor the agents'."""
        for directory in (READY_DIR, DEGRADED_DIR):
            for host in sorted(self._ever):
                await self._keys.delete(f"{directory}/{host}")
        await self._keys.delete_all(self._folder)

    async def _overdue(self, left_s: float) -> None:
        await asyncio.sleep(left_s)
        self._is_overdue = True
        while True:
            try:
                return await self._settle()
            except BackendError:
                await asyncio.sleep(AGAIN_S)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(BackendError):
                gate, _ = await self._keys.list(GATE_DIR)
                self._marked = {key for key in gate if key.rpartition("/")[2] in self._ever}
                found, index = await self._keys.list(self._folder)
                for key, value in sorted(found.items(), key=lambda item: "/reports/" in item[0]):
                    self._note(key, value)
                while True:
                    await self._settle()
                    change = await self._keys.next_change(self._folder, index)
                    if change is not None:
                        index = change.version
                        if change.value is not None:
                            self._note(change.key, change.value)
            await asyncio.sleep(AGAIN_S)

    def _note(self, key: str, value: str) -> None:
        kind, _, host = key.removeprefix(self._folder + "/").partition("/")
        with contextlib.suppress(ValidationError):  # not written by an agent of ours
            if kind == "hosts" and host in self._wanted:
                self._places[host] = decode(value, tuple[str, int])
            elif kind == "roster":
                self._fabric.enlist(decode(value, Roster))
            elif kind == "reports":
                self._fabric.fold(decode(value, Report))

    async def _settle(self) -> None:
        """Roster and keys are what the hosts and reports known now call for."""
        roster = self._fabric.roster
        is_complete = len(self._places) == len(self._wanted)
        if is_complete and (roster is None or roster.addresses != self._places):
            version = 1 if roster is None else roster.version + 1
            new = Roster(version=version, addresses=dict(self._places))
            await self._keys.put(f"{self._folder}/roster", encode(new).decode())
            self._fabric.enlist(new)
        verdict = self._fabric.judge(
            is_overdue=self._is_overdue or self._was_ready,
            missing=self._wanted.difference(self._places),
        )
        self._was_ready = self._was_ready or verdict.state is MeshState.READY
        await self._mark(verdict.state)
        if verdict != self.verdict:
            self.verdict = verdict
            self._on_verdict(verdict)

    async def _mark(self, state: MeshState) -> None:
        if state is MeshState.PENDING:
            return
        folder = READY_DIR if state is MeshState.READY else DEGRADED_DIR
        wanted = {f"{folder}/{host}" for host in self._wanted}
        # The new ones first: a rank that looks in between finds one or both, never none.
        for key in sorted(wanted - self._marked):
            await self._keys.put(key, "1")
        for key in sorted(self._marked - wanted):
            await self._keys.delete(key)
        self._marked = wanted
