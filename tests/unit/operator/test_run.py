"""What an operator does while it leads, and what it leaves when it stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from atoll.backends.kubernetes.options import ClusterOptions
from atoll.backends.kubernetes.pod import Pod
from atoll.controller.loop import Pass
from atoll.core.errors import Permanent, Temporary
from atoll.operator import run
from atoll.operator.run import Operator
from atoll.server import background
from tests.e2e.kubernetes.control_plane import free_port
from tests.unit.backends.kubernetes.kube import pod, running
from tests.unit.operator.cluster import Objects

NEAR = pod(0, running())
NEAR["status"]["hostIP"] = "127.0.0.1"
COUNTED = b"atoll_reconcile_seconds_count 1.0"


class Passing:
    """A controller that makes one pass, in which it sees a rank on a node, and waits."""

    def __init__(self, store: Any, executors: Any, *, clock: Any, on_pass: Any, **_: Any) -> None:
        self._executors = executors
        self._on_pass = on_pass

    def wake(self, uid: str) -> None:
        pass

    async def run(self) -> None:
        self._executors["kubernetes"]._node_probes.follow(("default", "a"), [Pod(NEAR)])
        self._on_pass(Pass(("default", "a"), 0.0, 0.25))
        await asyncio.Event().wait()


class Leases(Objects):
    """A cluster with a Lease, whose trainings nobody changes."""

    namespace = "home"

    async def replace(self, kind: str, namespace: str, name: str, body: Any) -> Any:
        self.put(kind, body)
        return body

    async def close(self) -> None:
        pass


def operator(folder: Path) -> Operator:
    cluster: Any = Leases()
    return Operator(cluster, cluster, "home", None, ClusterOptions(image="x"), folder)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_the_passes_of_the_operator_are_in_its_metrics_and_leave_no_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> bytes:
        one = operator(tmp_path)
        leading = asyncio.create_task(one.lead())
        await until(lambda: leading.done() or COUNTED in one.gauges.exposition()[0])
        leading.cancel()
        await asyncio.wait({leading})
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return one.gauges.exposition()[0]

    monkeypatch.setattr(background, "Controller", Passing)
    assert b"atoll_reconcile_seconds_sum 0.25" in asyncio.run(check())


def test_a_controller_that_dies_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [Temporary("no answer"), ExceptionGroup("", [OSError("disk")]), KeyError("bug")]

    class Failing(Passing):
        async def run(self) -> None:
            if failures:
                raise failures.pop(0)
            await super().run()

    async def check() -> None:
        one = operator(tmp_path)
        leading = asyncio.create_task(one.lead())
        await until(lambda: leading.done() or COUNTED in one.gauges.exposition()[0])
        leading.cancel()
        await asyncio.wait({leading})

    monkeypatch.setattr(background, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(background, "Controller", Failing)
    asyncio.run(check())
    assert failures == []
    for word in ("'controller' died of Temporary: no answer", "OSError: disk", "KeyError: 'bug'"):
        assert word in caplog.text


def test_of_two_operators_one_is_ready_and_the_other_once_that_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share a volume: the next leader has the metrics of the last one."""
    monkeypatch.setattr(background, "Controller", Passing)
    cluster: Any = Leases()

    @contextlib.asynccontextmanager
    async def started(name: str) -> AsyncIterator[Callable[[str], Any]]:
        port = free_port()
        settings: dict[str, Any] = {"cluster": cluster, "identity": name, "data": tmp_path}
        task = asyncio.create_task(
            run.run_operator(**settings, host="127.0.0.1", port=port, lease_duration_s=2.0)
        )
        try:
            yield lambda path: status_at(f"http://127.0.0.1:{port}{path}")
        finally:
            task.cancel()
            await asyncio.wait({task})

    async def status_at(url: str) -> int:
        try:
            async with httpx2.AsyncClient(trust_env=False, timeout=60) as client:
                return (await client.get(url)).status_code
        except httpx2.TransportError:  # it does not listen yet
            return 0

    async def becomes(asked: Callable[[str], Any], path: str, status: int) -> None:
        async with asyncio.timeout(60):
            while await asked(path) != status:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def check() -> None:
        async with contextlib.AsyncExitStack() as first:
            one = await first.enter_async_context(started("one"))
            await becomes(one, "/readyz", 200)
            async with started("two") as two:
                await becomes(two, "/healthz", 200)
                assert (await two("/readyz"), await two("/v1/trainings")) == (503, 503)
                assert (await one("/readyz"), await one("/v1/trainings")) == (200, 401)
                await first.aclose()
                await becomes(two, "/readyz", 200)
                assert await two("/v1/trainings") == 401
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(check())


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Permanent, match="--data"), run._folder(tmp_path / "file" / "data"):
        pass
    with run._folder(None) as folder:
        assert folder.is_dir()
    assert not folder.exists()
