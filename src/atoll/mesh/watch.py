"""The control plane's side of the mesh gate: it reads reports and writes the gate's keys.

A training with several hosts has one watch. It holds nothing that is not in etcd: a successor reads
the agents, the membership and the reports there and goes on. `MeshWatches` has the watches of all
trainings of an executor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable
from typing import Any, NamedTuple

from atoll.core.clock import Retry
from atoll.core.errors import BackendError, ValidationError
from atoll.core.mesh import DEGRADED_DIR, GATE_DIR, READY_DIR, MeshState
from atoll.core.model import Model, decode, encode
from atoll.core.ports import Key
from atoll.core.status import MeshStatus, Training
from atoll.mesh.etcd import EtcdKeys

# Whether every host of a training can reach every other, by the reports of their agents. Pure.
#
# The agent of a host probes all other hosts and reports how many it reaches, and by name only those
# it does not. So N hosts cost the controller N reports, folded one at a time, and not N² pairs.

FABRIC_DIR = "atoll/fabric"  # under it: hosts/<host>, membership, reports/<host>
MAX_NAMED = 32  # hosts that a report names; of more it gives only the number
MAX_PAIRS = 8  # in a sentence
DEADLINE_S = 60.0  # after which ranks are let in with what there is


def fabric_folder(uid: str) -> str:
    """A training's folder in its etcd, named by uid because several trainings may share one."""
    return f"{FABRIC_DIR}/{uid}"


def agent_name(rank: int, host: str) -> str:
    """The name of the agent of one rank, where each rank has its own: `rank-3@gpu-7`."""
    return f"rank-{rank}@{host}"


def host_of(agent: str) -> str:
    """The host of an agent; an agent that is alone on its host has the host's name."""
    return agent.rpartition("@")[2]


class Membership(Model, frozen=True):
    """The hosts that must reach each other, and the address of each one's agent."""

    version: int
    addresses: dict[str, tuple[str, int]]


class ReachReport(Model, frozen=True):
    """The report of one host's agent about a membership; its newest report counts."""

    host: str
    membership: int
    reached: int
    unreached: int = 0
    named: list[str] = []  # the first few of the unreached


class MeshVerdict(NamedTuple):
    state: MeshState
    message: str


class Fabric:
    """The reports so far. Folding one in costs its length, judging costs that of the bad ones."""

    def __init__(self, membership: Membership | None = None) -> None:
        self._membership = membership
        self._reporters: set[str] = set()
        self._bad: dict[str, ReachReport] = {}

    @property
    def membership(self) -> Membership | None:
        return self._membership

    def enlist(self, membership: Membership) -> None:
        """Replaces the membership; reports on an older one no longer count."""
        if self._membership is None or membership.version > self._membership.version:
            self.__init__(membership)  # type: ignore[misc]

    def fold(self, report: ReachReport) -> None:
        """Adds the report, unless it is about another membership or from a host outside it."""
        membership = self._membership
        if membership is None or report.membership != membership.version:
            return
        if report.host not in membership.addresses:
            return
        others = len(membership.addresses) - 1
        self._reporters.add(report.host)
        # A peer that a report does not mention is not reached: the agent may have just begun.
        if report.reached >= others:
            self._bad.pop(report.host, None)
        else:
            self._bad[report.host] = report

    @property
    def is_complete(self) -> bool:
        """Every host has reported, and reached every other."""
        if self._membership is None or self._bad:
            return False
        return len(self._reporters) == len(self._membership.addresses)

    def judge(self, *, is_overdue: bool, missing: Collection[str] = ()) -> MeshVerdict:
        """Ready if whole; otherwise Pending, or Degraded once the deadline has passed.

        `missing` are hosts that are not members yet, as their agents have not come up.
        """
        if self.is_complete and not missing:
            return MeshVerdict(MeshState.READY, "")
        state = MeshState.DEGRADED if is_overdue else MeshState.PENDING
        return MeshVerdict(state, self._message(sorted(missing)))

    def _message(self, missing: list[str]) -> str:
        if missing:
            return f"not all hosts have come up: no agent on {_few(missing)}"
        if self._membership is None:
            return "not all hosts have come up"
        parts = []
        if self._bad:
            parts.append(f"cannot talk: {self._pairs()}")
        silent = sorted(set(self._membership.addresses) - self._reporters)
        if silent:
            parts.append(f"no report from {_few(silent)}")
        return "; ".join(parts)

    def _pairs(self) -> str:
        """Each pair once; `a -> b` where only that direction is known to fail."""
        ways = {(host, peer) for host, bad in self._bad.items() for peer in bad.named}
        pairs = []
        for a, b in sorted(ways):
            if (b, a) not in ways:
                pairs.append(f"{a} -> {b}")
            elif a < b:
                pairs.append(f"{a} <-> {b}")
        unnamed = sum(bad.unreached - len(bad.named) for bad in self._bad.values())
        more = max(len(pairs) - MAX_PAIRS, 0) + unnamed
        return ", ".join(pairs[:MAX_PAIRS]) + (f" and {more} more" if more else "")


def _few(hosts: list[str]) -> str:
    more = len(hosts) - MAX_PAIRS
    return ", ".join(hosts[:MAX_PAIRS]) + (f" and {more} more" if more > 0 else "")


log = logging.getLogger(__name__)

AGAIN_S, MAX_AGAIN_S = 0.2, 2.0  # after a failure of etcd, which elects a leader in a second
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


class Members(NamedTuple):
    """The agents that must reach each other, and when the last of them got its node."""

    agents: frozenset[str]
    placed_at: float


class FollowedMesh:
    """The watch over the mesh of one training, in one etcd."""

    def __init__(
        self,
        training: Training,
        endpoint: str,
        deadline_s: float,
        notify: Callable[[], None],
        *,
        is_alone: bool,
    ):
        self.endpoint = endpoint
        self.agents: frozenset[str] = frozenset()
        self._notify = notify
        self._keys = EtcdKeys(endpoint)
        self._task: asyncio.Task[None] | None = None
        self.watch = MeshWatch(
            self._keys,
            self._on_verdict,
            deadline_s=deadline_s,
            folder=fabric_folder(training.uid),
            is_alone=is_alone,
        )

    def follow(self, members: Members, now: float) -> None:
        if members.agents != self.agents:
            self.agents = members.agents
            already_s = max(now - members.placed_at, 0.0)
            self._task = asyncio.create_task(self._run(self._task, already_s))
            self._task.add_done_callback(_log_end)

    async def _run(self, before: asyncio.Task[None] | None, already_s: float) -> None:
        await _end(before)
        await self.watch.run(self.agents, already_s)

    async def close(self) -> None:
        await _end(self._task)
        self._task = None
        await self._keys.close()

    def _on_verdict(self, verdict: MeshVerdict) -> None:
        self._notify()


class MeshWatches:
    """One watch for each training with a mesh. A changed verdict calls `notify`.

    A watch reads what the agents report and writes the keys of their hosts once it can decide.
    It runs on between observations because the hosts wait for those keys. Reports come through the
    training's etcd, in any order, and cost the API server nothing. Only a followup starts a watch
    or changes it.
    """

    def __init__(
        self, notify: Callable[[Key], None], deadline_s: float, *, is_alone: bool = True
    ) -> None:
        self._notify = notify
        self._is_alone = is_alone  # each training has an etcd of its own
        self._deadline_s = deadline_s
        self._meshes: dict[str, FollowedMesh] = {}

    def verdict(self, uid: str, endpoint: str) -> MeshStatus | None:
        """The newest verdict in that etcd, in any if `endpoint` is empty; None if there is none."""
        mesh = self._meshes.get(uid)
        if mesh is None or (endpoint and mesh.endpoint != endpoint):
            return None
        verdict = mesh.watch.verdict
        return MeshStatus(
            state=verdict.state,
            message=verdict.message,
            hosts=len(mesh.watch.hosts),
            foreign_writes=mesh.watch.foreign_writes,
        )

    def is_followed(self, uid: str, endpoint: str, members: Members | None) -> bool:
        """Whether the watch has this etcd and these members.

        `endpoint` is empty while the etcd does not answer, and `members` is None while ranks are
        being scheduled. The watch stays as it is until they are known.
        """
        mesh = self._meshes.get(uid)
        if mesh is None:
            return not endpoint or members is None
        is_there = not endpoint or mesh.endpoint == endpoint
        return is_there and (members is None or members.agents == mesh.agents)

    async def follow(
        self, training: Training, endpoint: str, members: Members | None, now: float
    ) -> None:
        mesh = self._meshes.get(training.uid)
        if mesh is not None and endpoint and mesh.endpoint != endpoint:
            await self._meshes.pop(training.uid).close()
            mesh = None
        if mesh is None and endpoint and members is not None:
            key = training.key
            mesh = FollowedMesh(
                training,
                endpoint,
                self._deadline_s,
                lambda: self._notify(key),
                is_alone=self._is_alone,
            )
            self._meshes[training.uid] = mesh
        if mesh is not None and members is not None:
            mesh.follow(members, now)

    async def drop(self, training: Training, shared: str | None) -> None:
        """The watch has ended, and the keys of the training in a shared etcd are deleted."""
        mesh = self._meshes.pop(training.uid, None)
        if mesh is not None:
            await mesh.close()
        if shared is None:
            return
        others = {host for other in self._meshes.values() for host in other.watch.hosts}
        async with EtcdKeys(shared) as keys:
            watch = MeshWatch(keys, folder=fabric_folder(training.uid))
            with contextlib.suppress(BackendError):  # an etcd that is down must not hold us up
                await watch.clear(keep=others)

    async def sweep(self, known: Callable[[], Awaitable[set[str]]]) -> None:
        """The watches of trainings that were removed by force have ended."""
        watched = set(self._meshes)
        for uid in watched - await known() if watched else ():
            if mesh := self._meshes.pop(uid, None):
                await mesh.close()

    async def close(self) -> None:
        while self._meshes:
            await self._meshes.popitem()[1].close()


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("the watch over a mesh ended: %s", error, exc_info=error)


def _of_host(key: str) -> str:
    """The gate's key that `key` is or lies below."""
    return "/".join(key.split("/")[:3])
