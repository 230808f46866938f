"""The agent on a host with ranks: it listens, probes every other host, and reports.

`python -m atoll.mesh.fabric --host NAME --address ADDR --etcd ENDPOINT`. Agents meet in the
training's etcd: each writes where it listens, reads the membership that the controller makes of all
of them, and writes a report whenever, and only when, its view changes. The agent is a process of
its own, so it may use an event loop; nothing that a rank imports does.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any

import click

from atoll.core.clock import Retry
from atoll.core.errors import BackendError, ValidationError
from atoll.core.mesh import split_endpoint
from atoll.core.model import decode, encode
from atoll.mesh.etcd import EtcdKeys
from atoll.mesh.watch import FABRIC_DIR, MAX_NAMED, Membership, ReachReport

PROBE_S = 1.0  # the limit for answering a peer's probe
PATIENCE_S = 1.0  # the limit for all tries of one probe
COMPANY_S = 0.25  # after which another try joins one that hangs, if the peer was reached before
RETRY_S = 0.05  # the same if it was not, and the pause after a failed probe
RETRY_MORE_S = 0.005  # is added to RETRY_S for every peer that is not reached
MAX_RETRY_S = 1.0  # between tries to reach etcd
RECHECK_S = 5.0  # between probes of a peer that was reached
AT_ONCE = 64  # probes in flight
SETTLE_S = 0.02  # changes this close together make one report
HELLO = b"atoll-fabric "


class Agent:
    """One host's view of a membership."""

    def __init__(
        self, host: str, publish: Callable[[ReachReport], Coroutine[Any, Any, None]]
    ) -> None:
        self._host = host
        self._publish = publish
        self._membership: Membership | None = None
        self._reached: set[str] = set()
        self._tried: set[str] = set()
        self._nudges: dict[str, asyncio.Event] = {}
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._changed = asyncio.Event()
        self._probes: dict[str, asyncio.Task[None]] = {}

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer a peer's probe. That it came through is a hint to probe that peer now."""
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
            async with asyncio.timeout(PROBE_S):
                line = await reader.readuntil(b"\n")
                if line.startswith(HELLO):
                    writer.write(HELLO + self._host.encode() + b"\n")
                    await writer.drain()
                    self._nudge(line.removeprefix(HELLO).strip().decode())
        writer.close()

    def follow(self, membership: Membership) -> None:
        """Reports about this membership from now on; keeps what is known of hosts that stay."""
        if self._membership is not None and membership.version <= self._membership.version:
            return
        before = self._membership.addresses if self._membership else {}
        self._membership = membership
        others = {host: at for host, at in membership.addresses.items() if host != self._host}
        for host in [host for host in self._probes if before.get(host) != others.get(host)]:
            self._probes.pop(host).cancel()
            self._reached.discard(host)
            self._tried.discard(host)
        self._nudges = {host: self._nudges.get(host) or asyncio.Event() for host in others}
        for host in others.keys() - self._probes.keys():
            self._probes[host] = asyncio.create_task(self._watch_peer(host, *others[host]))
        self._changed.set()

    def close(self) -> None:
        for probe in self._probes.values():
            probe.cancel()

    async def report(self) -> None:
        """Write one report when every peer was tried, then one for every change, for ever."""
        last_report: ReachReport | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            membership = self._membership
            if membership is None or len(self._tried) < len(self._nudges):
                continue
            if len(self._reached) < len(self._nudges):
                await asyncio.sleep(SETTLE_S)
            current = self._current(membership)
            if current == last_report or membership is not self._membership:
                continue
            try:
                await self._publish(current)
                last_report = current
            except BackendError:
                await asyncio.sleep(RETRY_S)
                self._changed.set()

    def _current(self, membership: Membership) -> ReachReport:
        missing = sorted(set(self._nudges) - self._reached)
        return ReachReport(
            host=self._host,
            membership=membership.version,
            reached=len(self._reached),
            unreached=len(missing),
            named=missing[:MAX_NAMED],
        )

    async def _watch_peer(self, peer: str, address: str, port: int) -> None:
        nudge = self._nudges[peer]
        while True:
            async with self._slots:
                pause = COMPANY_S if peer in self._reached else self._retry_s
                is_reached = await probe(self._host, peer, address, port, pause)
            is_news = is_reached != (peer in self._reached) or peer not in self._tried
            self._tried.add(peer)
            (self._reached.add if is_reached else self._reached.discard)(peer)
            if is_news:
                self._changed.set()
            pause = RECHECK_S if is_reached else self._retry_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await nudge.wait()
            nudge.clear()

    @property
    def _retry_s(self) -> float:
        return RETRY_S + RETRY_MORE_S * (len(self._nudges) - len(self._reached))

    def _nudge(self, peer: str) -> None:
        if peer in self._nudges and peer not in self._reached:
            self._nudges[peer].set()


async def probe(host: str, peer: str, address: str, port: int, company_s: float) -> bool:
    """Whether that very peer answers there: another program on its port does not count.

    The kernel sends a lost packet again only after a second, so while one try hangs another
    begins every `company_s`.
    """
    pending: set[asyncio.Task[bool]] = set()
    try:
        for _ in range(max(round(PATIENCE_S / company_s), 1)):
            pending.add(asyncio.create_task(_greet(host, peer, address, port)))
            done, pending = await asyncio.wait(
                pending, timeout=company_s, return_when=asyncio.FIRST_COMPLETED
            )
            if done:
                return any(task.result() for task in done)
        return False
    finally:
        for task in pending:
            task.cancel()


async def _greet(host: str, peer: str, address: str, port: int) -> bool:
    writer = None
    try:
        reader, writer = await asyncio.open_connection(address, port)
        writer.write(HELLO + host.encode() + b"\n")
        return await reader.readuntil(b"\n") == HELLO + peer.encode() + b"\n"
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        return False
    finally:
        if writer is not None:
            writer.close()


async def run(host: str, address: str, endpoint: str, folder: str = FABRIC_DIR) -> None:
    """Listen on `address` and meet the others at `endpoint` until cancelled."""
    async with EtcdKeys(endpoint) as keys:

        async def publish(report: ReachReport) -> None:
            await keys.put(f"{folder}/reports/{host}", encode(report).decode())

        agent = Agent(host, publish)
        server = await asyncio.start_server(agent.answer, address, 0, backlog=1024)
        listen_address = server.sockets[0].getsockname()[:2]
        async with server, asyncio.TaskGroup() as tasks:
            tasks.create_task(agent.report())
            await _follow_membership(
                keys, folder, agent, f"{folder}/hosts/{host}", encode(listen_address)
            )


async def _follow_membership(
    keys: EtcdKeys, folder: str, agent: Agent, own: str, listen_address: bytes
) -> None:
    """Keep this host's address in etcd, and the agent on the newest membership, for ever.

    Both are checked again when nothing has come for a while: an etcd that was replaced is empty and
    would report no change.
    """
    membership, retry = f"{folder}/membership", Retry(RETRY_S, MAX_RETRY_S)
    while True:
        try:
            if await keys.get(own) != listen_address.decode():
                await keys.put(own, listen_address.decode())
            values, index = await keys.list(membership)
            value = values.get(membership)
            retry.has_worked()
            is_idle = False
            while not is_idle:
                if value is not None:
                    _follow(agent, value)
                change = await keys.next_change(membership, index)
                is_idle = change is None
                if change is not None:
                    value, index = change.value, change.version
        except BackendError:
            await asyncio.sleep(retry.pause_s() or 0.0)


def _follow(agent: Agent, value: str) -> None:
    with contextlib.suppress(ValidationError):  # not written by us
        agent.follow(decode(value, Membership))


@click.command()
@click.option("--host", envvar="NODE_NAME", required=True, help="Name of this host.")
@click.option("--address", required=True, help="Where this host's peers reach it.")
@click.option("--etcd", envvar="ATOLL_MESH_ENDPOINT", required=True, help="host:port of etcd.")
@click.option("--folder", default=FABRIC_DIR, help="Of the training, in that etcd.")
def main(host: str, address: str, etcd: str, folder: str) -> None:
    """Report which peers this host can reach, until stopped."""
    if split_endpoint(etcd) is None:
        raise click.UsageError(f"--etcd: {etcd!r}: expected host:port, or in ATOLL_MESH_ENDPOINT")
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_until_stopped(run(host, address, etcd, folder)))


async def _until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until SIGTERM: process 1 of a container ignores signals it does not handle."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await task


if __name__ == "__main__":
    main(prog_name="python -m atoll.mesh.fabric")
