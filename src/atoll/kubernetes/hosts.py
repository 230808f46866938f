"""Which nodes have stopped answering, told in seconds; the cluster takes the best part of a minute.

It is only told, not acted on: a node that is cut off from us alone still runs its ranks, and a
second copy of them would be worse than a late one.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Collection, Iterable
from typing import Any

from atoll.core.ports import Key
from atoll.kubernetes.pod import Pod

Json = dict[str, Any]

CONNECT_S = 1.5
AGAIN_S = 1.0
# The kernel asks an idle connection every second and gives up after three answers are missing.
KEEPALIVE = (
    (socket.SO_KEEPALIVE, socket.SOL_SOCKET, 1),
    (socket.TCP_KEEPIDLE, socket.IPPROTO_TCP, 1),
    (socket.TCP_KEEPINTVL, socket.IPPROTO_TCP, 1),
    (socket.TCP_KEEPCNT, socket.IPPROTO_TCP, 3),
)


class Hosts:
    """One idle connection to each node's kubelet. `notify` hears of trainings it matters to.

    A node that never answered is not called silent: it may be out of our reach by design.
    """

    def __init__(self, port: int | None, notify: Callable[[Key], None]) -> None:
        self._port = port
        self._notify = notify
        self._of: dict[Key, frozenset[str]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._silent: set[str] = set()

    def follow(self, key: Key, pods: Iterable[Json]) -> Collection[str]:
        """These are the pods of the training now. The addresses of silent nodes are returned."""
        found = (p for p in map(Pod, pods) if "running" in p.state)
        addresses = frozenset(p.address for p in found if p.address)
        if self._port is None or self._of.get(key, frozenset()) == addresses:
            return self._silent
        self._of[key] = addresses
        if not addresses:
            del self._of[key]
        wanted = frozenset[str]().union(*self._of.values())
        for gone in self._tasks.keys() - wanted:
            self._tasks.pop(gone).cancel()
            self._silent.discard(gone)
        for new in wanted - self._tasks.keys():
            self._tasks[new] = asyncio.create_task(self._ask(new, self._port))
        return self._silent

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _ask(self, address: str, port: int) -> None:
        has_answered = False
        while True:
            writer = None
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(address, port)
                has_answered = True
                self._mark(address, is_silent=False)
                for option, level, value in KEEPALIVE:
                    writer.get_extra_info("socket").setsockopt(level, option, value)
                await reader.read(1)  # until it is closed, or the kernel has given it up
            except (ConnectionRefusedError, ConnectionResetError):
                has_answered = True  # by the machine, though the kubelet is away
                self._mark(address, is_silent=False)
            except OSError:  # a timeout is one too
                if has_answered:
                    self._mark(address, is_silent=True)
            finally:
                if writer is not None:
                    with contextlib.suppress(OSError):
                        writer.close()
            await asyncio.sleep(AGAIN_S)

    def _mark(self, address: str, *, is_silent: bool) -> None:
        if is_silent == (address in self._silent):
            return
        (self._silent.add if is_silent else self._silent.discard)(address)
        for key, addresses in self._of.items():
            if address in addresses:
                self._notify(key)
