"""What the operator counts, and what it leaves when it stops leading."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from atoll.controller.loop import Pass
from atoll.operator import run
from atoll.server.gauges import Gauges
from tests.unit.kubernetes.kube import pod, running

NEAR = pod(0, running())
NEAR["status"]["hostIP"] = "127.0.0.1"


class Passing:
    """A controller that makes one pass, in which it sees a rank on a node, and waits."""

    def __init__(self, store: Any, executors: Any, *, clock: Any, on_pass: Any) -> None:
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
