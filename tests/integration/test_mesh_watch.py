"""The controller's side of the gate with agents on loopback: successors, growth, a lost etcd."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from atoll.backends.local.etcd_server import EtcdServer, start_etcd, stop_etcd
from atoll.core.mesh import MeshState
from atoll.core.model import decode
from atoll.mesh import fabric
from atoll.mesh.etcd import EtcdKeys
from atoll.mesh.watch import FABRIC_DIR, Membership, MeshVerdict, MeshWatch, ReachReport, agent_name


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EtcdServer]:
    made = start_etcd(tmp_path / "etcd")
    yield made
    stop_etcd(made)


@contextlib.asynccontextmanager
async def running(*work: object) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(each) for each in work]  # type: ignore[arg-type, var-annotated]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def agents(server: EtcdServer, *hosts: str) -> list[object]:
    return [fabric.run(host, "127.0.0.1", server.endpoint) for host in hosts]


class Heard:
    """The verdicts of a watch, and waiting for one."""

    def __init__(self) -> None:
        self._verdicts: asyncio.Queue[MeshVerdict] = asyncio.Queue()
        self.tell = self._verdicts.put_nowait

    async def until(self, state: MeshState) -> MeshVerdict:
        async with asyncio.timeout(30):
            while (verdict := await self._verdicts.get()).state is not state:
                pass
        return verdict

    @property
    def is_quiet(self) -> bool:
        return self._verdicts.empty()


async def until_gate(keys: EtcdKeys, *wanted: str) -> None:
    async with asyncio.timeout(20):
        while True:
            found, index = await keys.list("basilica")
            if set(found) == {f"basilica/{key}" for key in wanted}:
                return
            await keys.next_change("basilica", index)


async def until_reported(keys: EtcdKeys, names: list[str]) -> None:
    """All of these, and no others, have said that they reach each other."""
    async with asyncio.timeout(20):
        while True:
            found, index = await keys.list(FABRIC_DIR)
            membership = decode(found[f"{FABRIC_DIR}/membership"], Membership)
            told = [decode(found[f"{FABRIC_DIR}/reports/{name}"], ReachReport) for name in names]
            is_whole = all(r.membership == membership.version and not r.unreached for r in told)
            if is_whole and set(membership.addresses) == set(names):
                return
            await keys.next_change(FABRIC_DIR, index)


def test_a_successor_knows_without_a_new_word_from_any_agent(server: EtcdServer) -> None:
    async def scene() -> None:
        async with EtcdKeys(server.endpoint) as keys:
            first, second = Heard(), Heard()
            watch = MeshWatch(keys, first.tell)
            async with running(*agents(server, "a", "b"), watch.run(["a", "b"])):
                await first.until(MeshState.READY)
            # Both agents and the first controller are gone; what they said is in etcd.
            successor = MeshWatch(keys, second.tell)
            async with running(successor.run(["a", "b"])):
                await second.until(MeshState.READY)

    asyncio.run(scene())


def test_a_host_that_joins_gets_its_key_and_the_others_keep_theirs(server: EtcdServer) -> None:
    async def scene() -> None:
        async with EtcdKeys(server.endpoint) as keys:
            heard = Heard()
            watch = MeshWatch(keys, heard.tell)
            async with running(*agents(server, "a", "b")):
                async with running(watch.run(["a", "b"])):
                    await heard.until(MeshState.READY)
                async with running(watch.run(["a", "b", "c"])):
                    verdict = await heard.until(MeshState.PENDING)
                    assert verdict.message == "not all hosts have come up: no agent on c"
                    assert set((await keys.list("basilica"))[0]) == {
                        "basilica/mesh-ready/a",
                        "basilica/mesh-ready/b",
                    }
                    async with running(*agents(server, "c")):
                        await heard.until(MeshState.READY)
                        assert await keys.get("basilica/mesh-ready/c") == "1"
                async with running(watch.run(["a"])):  # and scaled down again
                    await until_gate(keys, "mesh-ready/a")
                    assert heard.is_quiet  # one that is left of a whole mesh is no news
            await watch.clear()
            assert (await keys.list("basilica"))[0] == {}
            assert (await keys.list("atoll"))[0] == {}

    asyncio.run(scene())


def test_an_etcd_that_restarts_is_followed_again(server: EtcdServer, tmp_path: Path) -> None:
    async def scene() -> None:
        async with EtcdKeys(server.endpoint) as keys:
            heard = Heard()
            watch = MeshWatch(keys, heard.tell)
            async with running(watch.run(["a", "b"]), *agents(server, "a")):
                server.process.kill()
                server.process.wait()
                again = start_etcd(tmp_path / "etcd", leases=server.leases)
                try:
                    async with running(*agents(server, "b")):
                        await heard.until(MeshState.READY)
                finally:
                    stop_etcd(again)

    asyncio.run(scene())


def test_rubbish_under_its_keys_is_passed_over(server: EtcdServer) -> None:
    async def scene() -> None:
        async with EtcdKeys(server.endpoint) as keys:
            heard = Heard()
            for key in ("hosts/a", "membership", "reports/a", "hosts/zzz", "other"):
                await keys.put(f"atoll/fabric/{key}", "<html>")
            watch = MeshWatch(keys, heard.tell)
            async with running(watch.run(["a", "b"]), *agents(server, "a", "b")):
                await heard.until(MeshState.READY)

    asyncio.run(scene())


def test_ranks_that_share_a_host_share_its_key(server: EtcdServer) -> None:
    async def scene() -> None:
        async with EtcdKeys(server.endpoint) as keys:
            heard = Heard()
            watch = MeshWatch(keys, heard.tell)
            names = [agent_name(0, "a"), agent_name(1, "a"), agent_name(2, "b")]
            async with running(*agents(server, *names), watch.run(names)):
                await heard.until(MeshState.READY)
                await until_gate(keys, "mesh-ready/a", "mesh-ready/b")
            # One of the two on the host has ended: the other still stands behind the key.
            async with running(*agents(server, *names[1:]), watch.run(names[1:])):
                await until_reported(keys, names[1:])
                await until_gate(keys, "mesh-ready/a", "mesh-ready/b")
            assert watch.hosts == {"a", "b"}

    asyncio.run(scene())


def test_an_etcd_that_comes_back_empty_is_told_everything_again(
    server: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A watch asks an empty etcd for a change that never comes, until its time is up.
    monkeypatch.setattr(EtcdKeys.next_change, "__defaults__", (0.5,))

    async def scene() -> None:
        async with EtcdKeys(server.endpoint) as keys:
            heard, again = Heard(), Heard()
            async with running(*agents(server, "a", "b")):
                async with running(MeshWatch(keys, heard.tell).run(["a", "b"])):
                    await heard.until(MeshState.READY)
                server.process.kill()
                server.process.wait()
                empty = start_etcd(tmp_path / "other", leases=server.leases)
                try:
                    async with running(MeshWatch(keys, again.tell).run(["a", "b"])):
                        await again.until(MeshState.READY)
                        await until_gate(keys, "mesh-ready/a", "mesh-ready/b")
                finally:
                    stop_etcd(empty)

    asyncio.run(scene())


def test_in_an_etcd_of_many_trainings_each_clears_its_own(server: EtcdServer) -> None:
    async def scene() -> None:
        async with EtcdKeys(server.endpoint) as keys:
            heard, other = Heard(), Heard()
            one, two = "atoll/fabric/one", "atoll/fabric/two"
            work = [
                fabric.run("rank-0@a", "127.0.0.1", server.endpoint, one),
                fabric.run("rank-1@b", "127.0.0.1", server.endpoint, one),
                fabric.run("rank-0@b", "127.0.0.1", server.endpoint, two),
                MeshWatch(keys, heard.tell, folder=one).run(["rank-0@a", "rank-1@b"]),
                MeshWatch(keys, other.tell, folder=two).run(["rank-0@b"]),
            ]
            async with running(*work):
                await heard.until(MeshState.READY)
                await other.until(MeshState.READY)
            # By one that has never seen it run: what there is to clear is in etcd.
            await MeshWatch(keys, folder=one).clear(keep={"b"})
            await until_gate(keys, "mesh-ready/b")
            assert (await keys.list(one))[0] == {}
            assert (await keys.list(two))[0] != {}

    asyncio.run(scene())


def test_keys_of_the_gate_that_somebody_else_writes_or_deletes_are_put_right_and_told(
    server: EtcdServer,
) -> None:
    async def scene() -> None:
        async with EtcdKeys(server.endpoint) as keys:
            heard = Heard()
            watch = MeshWatch(keys, heard.tell, is_alone=True)
            async with running(watch.run(["a", "b"])):
                await until_settled(watch, 0)  # nobody has come up: there is no key
                await keys.put("basilica/mesh-ready/a", "1")
                await keys.put("basilica/mesh-ready/b/forged-as-a-directory", "1")
                await until_gate(keys)
                assert watch.foreign_writes >= 1
                async with running(*agents(server, "a", "b")):
                    await heard.until(MeshState.READY)
                    await until_gate(keys, "mesh-ready/a", "mesh-ready/b")
                    before = watch.foreign_writes
                    await keys.delete("basilica/mesh-ready/b")
                    await until_settled(watch, before + 1)
                    await until_gate(keys, "mesh-ready/a", "mesh-ready/b")
                    assert watch.verdict.state is MeshState.READY

    asyncio.run(scene())


async def until_settled(watch: MeshWatch, writes: int) -> None:
    async with asyncio.timeout(20):
        while watch.foreign_writes < writes or not watch.is_guarding:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_an_etcd_that_is_not_there_is_named_and_fails_open() -> None:
    async def scene() -> None:
        async with EtcdKeys("127.0.0.1:1") as keys:
            heard = Heard()
            async with running(MeshWatch(keys, heard.tell, deadline_s=0.3).run(["a"])):
                verdict = await heard.until(MeshState.DEGRADED)
                assert "etcd at 127.0.0.1:1" in verdict.message

    asyncio.run(scene())
