"""What the operator counts, and what it leaves when it stops leading."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from atoll.controller.loop import Pass
from atoll.core.errors import NotFound, Permanent
from atoll.operator import run
from atoll.server.gauges import Gauges
from atoll.server.serving import listen
from tests.unit.kubernetes.kube import pod, running

NEAR = pod(0, running())
NEAR["status"]["hostIP"] = "127.0.0.1"


class Passing:
    """A controller that makes one pass, in which it sees a rank on a node, and waits."""

    def __init__(self, store: Any, executors: Any, *, clock: Any, on_pass: Any, **_: Any) -> None:
        self._executors = executors
        self._on_pass = on_pass

    async def run(self) -> None:
        self._executors["kubernetes"]._hosts.follow(("default", "a"), [NEAR])
        self._on_pass(Pass(("default", "a"), 0.0, 0.25))
        await asyncio.Event().wait()


def test_the_passes_of_the_operator_are_in_its_metrics_and_leave_no_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def idle(*_: Any) -> None:
        await asyncio.Event().wait()

    async def check() -> bytes:
        gauges = Gauges()
        cluster: Any = object()
        leading = asyncio.create_task(run._lead(cluster, None, {"image": "x"}, gauges))
        while b"atoll_reconcile_seconds_count 1.0" not in gauges.exposition()[0]:
            assert not leading.done(), leading
            await asyncio.sleep(0)
        leading.cancel()
        await asyncio.wait({leading})
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return gauges.exposition()[0]

    monkeypatch.setattr(run, "Controller", Passing)
    monkeypatch.setattr(run, "keep_swept", idle)
    assert b"atoll_reconcile_seconds_sum 0.25" in asyncio.run(check())


def test_where_an_operator_answers_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POD_IP", raising=False)
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        assert run._address("127.0.0.1", listening) == f"127.0.0.1:{port}"
        assert run._address("0.0.0.0", listening) == ""
        monkeypatch.setenv("POD_IP", "fd00::7")
        assert run._address("0.0.0.0", listening) == f"[fd00::7]:{port}"


def test_work_beside_the_controller_that_fails_is_begun_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [NotFound("secret", "x"), ExceptionGroup("", [OSError("disk")]), KeyError("bug")]

    async def work() -> None:
        if failures:
            raise failures.pop(0)

    monkeypatch.setattr(run, "RETRY_S", 0.0)
    asyncio.run(run._again("series", work))
    assert failures == []
    assert all(word in caplog.text for word in ("secret 'x' not found", "disk", "bug"))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Permanent, match="--data"), run._folder(tmp_path / "file" / "data"):
        pass
    with run._folder(None) as folder:
        assert folder.is_dir()
    assert not folder.exists()
