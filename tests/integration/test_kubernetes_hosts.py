"""Nodes that stop answering, with real sockets: a full backlog drops what it is sent."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest

from atoll.backends.kubernetes import diagnosis
from atoll.backends.kubernetes.diagnosis import NodeProbes
from atoll.backends.kubernetes.pod import Pod

KEY = ("team", "tiny")


def pod_at(address: str) -> Pod:
    running = {"name": "rank", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    status = {"hostIP": address, "containerStatuses": [running]}
    return Pod({"metadata": {"name": "p", "annotations": {}}, "status": status})


def fill(address: tuple[str, int]) -> list[socket.socket]:
    """Connections until one more would not be answered."""
    made = []
    while True:
        sock = socket.socket()
        made.append(sock)
        sock.settimeout(0.2)
        try:
            sock.connect(address)
        except TimeoutError:
            return made


def test_a_node_that_answered_and_stopped_is_silent_until_it_answers_again() -> None:
    asyncio.run(_stops_and_answers_again())


async def _stops_and_answers_again() -> None:
    told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    listener.setblocking(False)
    loop = asyncio.get_running_loop()
    hosts = NodeProbes(listener.getsockname()[1], told.put_nowait)
    with listener, contextlib.ExitStack() as closing:
        pods = [pod_at("127.0.0.1")]
        assert not hosts.follow(KEY, pods)
        async with asyncio.timeout(20):
            accepted, _ = await loop.sock_accept(listener)
            for sock in fill(listener.getsockname()):
                closing.callback(sock.close)
            accepted.close()
            assert await told.get() == KEY
            assert hosts.follow(KEY, pods) == {"127.0.0.1"}
            while hosts.follow(KEY, pods):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.2):
                        (await loop.sock_accept(listener))[0].close()
            assert await told.get() == KEY
    hosts.follow(KEY, [])
    await hosts.close()


def test_a_machine_whose_kubelet_is_away_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "AGAIN_S", 0.01)

    async def scene() -> None:
        told: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        with socket.create_server(("127.0.0.1", 0)) as closed_soon:
            address = closed_soon.getsockname()
        hosts = NodeProbes(address[1], told.put_nowait)
        hosts.follow(KEY, [pod_at("127.0.0.1")])  # refused, again and again
        with socket.create_server(address) as listener:
            listener.setblocking(False)
            async with asyncio.timeout(20):
                accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
        accepted.close()
        assert not hosts.follow(KEY, [pod_at("127.0.0.1")])
        assert told.empty()
        await hosts.close()

    asyncio.run(scene())
