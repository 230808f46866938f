"""Whoever asks for series has what ranks have written by then."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from atoll.agent.metrics import MetricWriter, batch_of
from atoll.core.phase import Phase
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Status, Training
from atoll.metrics.collect import Collector
from atoll.metrics.store import MetricStore
from atoll.server.handlers.metrics import MetricsQuery, metrics
from atoll.server.http.operations import ApiCall
from atoll.store.sqlite import MemoryStore


def test_what_nobody_has_read_yet_is_read_for_who_asks(tmp_path: Path) -> None:
    metric_store, folder = MetricStore(tmp_path / "db"), tmp_path / "metrics"
    folder.mkdir()
    lines = [
        batch_of(MetricWriter(0, 1, 0, "a"), n, {"loss": [[1.0, n, 0.5]]}, 0) for n in range(1, 41)
    ]
    (folder / "0.1.0.a.000000").write_bytes(b"".join(lines))
    Collector(metric_store, lambda _: folder.as_uri())  # it is between two of its looks
    spec = TrainingSpec(name="t", command=["true"], world_size=WorldSize(min=1, target=1, max=1))
    over = Training(namespace="n", uid="u", spec=spec, status=Status(phase=Phase.SUCCEEDED))

    async def ask() -> Any:
        store = MemoryStore()
        await store.create(over)
        plane: Any = SimpleNamespace(store=store, metrics=metric_store)
        request: Any = None
        call = ApiCall(plane, request, "n", "t", MetricsQuery(), None)
        return msgspec.json.decode((await metrics(call)).body)

    (loss,) = asyncio.run(ask())["items"]
    assert loss["step"] == list(range(1, 41))
