"""The control plane's side of the mesh gate: it reads reports and writes the gate's keys.

A training with several hosts has one watch. It holds nothing that is not in etcd: a successor reads
the agents, the membership and the reports there and goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

from atoll.core.errors import BackendError, ValidationError
from atoll.core.mesh import DEGRADED_DIR, GATE_DIR, READY_DIR, MeshState
from atoll.core.model import decode, encode
from atoll.core.retry import Retry
from atoll.mesh.etcd import EtcdKeys
from atoll.mesh.reach import (
    DEADLINE_S,
    FABRIC_DIR,
    Fabric,
    Membership,
    MeshVerdict,
    ReachReport,
    host_of,
)

AGAIN_S, MAX_AGAIN_S = 0.2, 2.0
AT_ONCE = 4  # keys written at a time: as many as etcd.MAX_IDLE connections


class MeshWatch:
    """Follows the fabric of some agents and writes the gate's keys of their hosts.

    `on_verdict` is called with every change. Several agents may share a host: see `reach.host_of`.
    `is_alone`: nobody else has gate keys in this etcd, so what others change there is put right.
    """

    def __init__(
        self,
        keys: EtcdKeys,
        on_verdict: Callable[[MeshVerdict], None] = lambda verdict: None,
        *,
        deadline_s: float = DEADLINE_S,
        folder: str = FABRIC_DIR,
        is_alone: bool = False,
    ) -> None:
        self._keys = keys
        self._on_verdict = on_verdict
        self._deadline_s = deadline_s
        self._folder = folder
        self._agents: frozenset[str] = frozenset()
        self._all_hosts: set[str] = set()  # those of now and before: their keys are ours to remove
        self._addresses: dict[str, tuple[str, int]] = {}
        self._fabric = Fabric()
        self._version = 0  # of the newest membership
        self._is_overdue = False
        self._was_ready = False
        self._is_only_fewer = False
        self._gate_keys: set[str] = set()  # as they are in etcd
        self._is_alone = is_alone
        self._gate_lock = asyncio.Lock()  # held while keys and `_gate_keys` differ
        self._is_gate_known = asyncio.Event()
        self.foreign_writes = 0
        self.verdict = MeshVerdict(MeshState.PENDING, "not all hosts have come up")

    @property
    def hosts(self) -> set[str]:
        return set(map(host_of, self._agents))

    @property
    def is_guarding(self) -> bool:
        """Whether it knows which keys of the gate are its own."""
        return self._is_gate_known.is_set()

    async def run(self, agents: Iterable[str], already_s: float = 0.0) -> None:
        """Follow `agents` until cancelled; for another set of agents, run it again.

        `already_s` is the part of the deadline that a predecessor has used up.
        """
        before, self._agents = self._agents, frozenset(agents)
        # What is left of a whole mesh is still whole: the verdict stays while it is checked.
        self._is_only_fewer = self.verdict.state is MeshState.READY and self._agents <= before
        self._all_hosts |= self.hosts
        self._addresses, self._gate_keys = {}, set()
        self._is_gate_known.clear()
        self._is_overdue = self._was_ready = False
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._overdue(max(self._deadline_s - already_s, 0.0)))
            tasks.create_task(self._follow())
            if self._is_alone:
                tasks.create_task(self._guard())

    async def clear(self, keep: Collection[str] = ()) -> None:
        """Deletes the keys of these agents, and the gate's keys of their hosts not in `keep`."""
        values, _ = await self._keys.list(self._folder)
        for key, value in values.items():
            self._note(key, value)
        for directory in (READY_DIR, DEGRADED_DIR):
            for host in sorted(self._all_hosts.difference(keep)):
                await self._keys.delete(f"{directory}/{host}")
        await self._keys.delete_all(self._folder)

    async def _overdue(self, left_s: float) -> None:
        await asyncio.sleep(left_s)
        self._is_overdue = True
        while True:
            if await self._has_worked(self._settle()):
                return
            await asyncio.sleep(MAX_AGAIN_S)

    async def _follow(self) -> None:
        retry = Retry(AGAIN_S, MAX_AGAIN_S, growth=1.5)
        while True:
            if await self._has_worked(self._follow_once()):
                retry.has_worked()
            else:
                await asyncio.sleep(retry.pause_s() or 0.0)

    async def _guard(self) -> None:
        """Puts the gate's keys right whenever somebody else has changed them, for ever."""
        retry = Retry(AGAIN_S, MAX_AGAIN_S, growth=1.5)
        while True:
            if await self._has_worked(self._guard_once()):
                retry.has_worked()
            await asyncio.sleep(retry.pause_s() or 0.0)

    async def _guard_once(self) -> None:
        await self._is_gate_known.wait()
        async with self._gate_lock:
            present, index = await self._keys.list(GATE_DIR)
            membership = await self._keys.get(f"{self._folder}/membership")
            strange, missing = present.keys() - self._gate_keys, self._gate_keys - present.keys()
            is_lost = bool(missing) and membership is None  # an etcd that came back empty
            if not is_lost:
                for key in sorted({_of_host(key) for key in strange}):
                    await self._keys.delete_all(key)
                for key in sorted(missing):
                    await self._keys.put(key, "1")
        if (strange or missing) and not is_lost:
            self.foreign_writes += 1
            self._on_verdict(self.verdict)
        elif not is_lost:
            await self._keys.next_change(GATE_DIR, index)

    async def _has_worked(self, work: Coroutine[Any, Any, None]) -> bool:
        """Whether `work` ended without a BackendError.

        An etcd that cannot be reached does not change the verdict on a mesh that is whole.
        """
        try:
            await work
        except BackendError as error:
            if self.verdict.state is not MeshState.READY:
                state = MeshState.DEGRADED if self._is_overdue else MeshState.PENDING
                self._set_verdict(MeshVerdict(state, str(error)))
            return False
        return True

    async def _follow_once(self) -> None:
        """Follow the changes until none has come for a while, as a replaced etcd reports none."""
        values, index = await self._keys.list(self._folder)
        if f"{self._folder}/membership" not in values:
            self._fabric = Fabric()
        for key, value in sorted(values.items(), key=lambda item: "/reports/" in item[0]):
            self._note(key, value)
        async with self._gate_lock:
            gate, _ = await self._keys.list(GATE_DIR)
            self._gate_keys = {key for key in gate if key.rpartition("/")[2] in self._all_hosts}
            self._is_gate_known.set()
        while True:
            await self._settle()
            change = await self._keys.next_change(self._folder, index)
            if change is None:
                return
            index = change.version
            if change.value is not None:
                self._note(change.key, change.value)

    def _note(self, key: str, value: str) -> None:
        kind, _, agent = key.removeprefix(self._folder + "/").partition("/")
        with contextlib.suppress(ValidationError):  # not written by an agent of ours
            if kind == "hosts":
                address = decode(value, tuple[str, int])
                self._all_hosts.add(host_of(agent))
                if agent in self._agents:
                    self._addresses[agent] = address
            elif kind == "membership":
                self._enlist(decode(value, Membership))
            elif kind == "reports":
                self._fabric.fold(decode(value, ReachReport))

    def _enlist(self, membership: Membership) -> None:
        self._fabric.enlist(membership)
        self._version = max(self._version, membership.version)

    async def _settle(self) -> None:
        """Writes membership, keys and verdict as the agents and reports known now require."""
        membership = self._fabric.membership
        is_complete = len(self._addresses) == len(self._agents)
        if is_complete and (membership is None or membership.addresses != self._addresses):
            # Agents follow the highest version; a successor with an empty etcd must exceed it too.
            version = max(self._version + 1, int(time.time() * 1000))
            new = Membership(version=version, addresses=dict(self._addresses))
            await self._keys.put(f"{self._folder}/membership", encode(new).decode())
            self._enlist(new)
        verdict = self._fabric.judge(
            is_overdue=self._is_overdue or self._was_ready,
            missing=self._agents.difference(self._addresses),
        )
        self._was_ready = self._was_ready or verdict.state is MeshState.READY
        await self._mark(verdict.state)
        if verdict.state is not MeshState.PENDING or not self._is_only_fewer:
            self._set_verdict(verdict)

    def _set_verdict(self, verdict: MeshVerdict) -> None:
        if verdict != self.verdict:
            self.verdict = verdict
            self._on_verdict(verdict)

    async def _mark(self, state: MeshState) -> None:
        if state is MeshState.PENDING:
            return
        async with self._gate_lock:
            await self._write_gate(READY_DIR if state is MeshState.READY else DEGRADED_DIR)

    async def _write_gate(self, folder: str) -> None:
        gate_keys = {f"{folder}/{host}" for host in self.hosts}
        # The new keys come first: a rank that polls in between finds one or both, never none.
        new = sorted(gate_keys - self._gate_keys)
        for at in range(0, len(new), AT_ONCE):
            await asyncio.gather(*(self._keys.put(key, "1") for key in new[at : at + AT_ONCE]))
        for key in sorted(self._gate_keys - gate_keys):
            await self._keys.delete(key)
        self._gate_keys = gate_keys


def _of_host(key: str) -> str:
    """The gate's key that `key` is or lies below."""
    return "/".join(key.split("/")[:3])
