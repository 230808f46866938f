"""`bench="on-start"` under the real controller and local executor."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from tests.support.in_process import plane

from atoll.core.spec import BenchSpec, WorldSize
from atoll.core.status import Training

WAIT = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.02)\n"


def spec(tmp_path: Path, **bench: Any) -> dict[str, Any]:
    return {
        "name": "t",
        "command": [sys.executable, "-c", WAIT, str(tmp_path / "go")],
        "world_size": WorldSize(min=2, target=2, max=2),
        "stop_grace_s": 0.2,
        "bench": BenchSpec(mode="on-start", **bench),
    }


def is_measured(training: Training) -> bool:
    return training.status.bench.phase == "Succeeded"


def test_measured_beside_the_ranks_and_kept_after_the_end(tmp_path: Path) -> None:
    async def scene() -> None:
        async with plane(tmp_path) as here:
            training = await here.create(**spec(tmp_path))
            ready = await here.until(training, lambda t: t.status.phase == "ready")
            assert ready.status.bench.phase in ("Pending", "Running", "Succeeded")
            now = await here.until(training, is_measured)
            result = now.status.bench.result
            assert result is not None
            host = here.executor._host
            assert (result.probe_node_a, result.probe_node_b) == (host, host)
            assert result.is_worker_pair
            assert f"{host} with itself" in now.status.bench.message
            assert now.status.world.ready == 2
            (tmp_path / "go").touch()
            over = await here.until(training, lambda t: t.status.is_released)
            assert over.status.phase == "succeeded"
            assert over.status.bench.result == result

    asyncio.run(scene())


def test_a_floor_no_link_reaches_stops_the_training_before_a_rank_runs(tmp_path: Path) -> None:
    async def scene() -> None:
        async with plane(tmp_path) as here:
            training = await here.create(**spec(tmp_path, require_gbps=100_000.0))
            now = await here.until(training, lambda t: t.status.phase.is_terminal)
            assert (now.status.phase, now.status.reason) == ("failed", "LinkTooSlow")
            assert "bench_require_gbps=100000" in now.status.message
            assert now.status.rank_exits == []
            assert await here.logs(training) == []

    asyncio.run(scene())


def test_a_floor_that_is_met_lets_the_ranks_start(tmp_path: Path) -> None:
    (tmp_path / "go").touch()

    async def scene() -> None:
        async with plane(tmp_path) as here:
            training = await here.create(**spec(tmp_path, require_gbps=0.001))
            now = await here.until(training, lambda t: t.status.phase.is_terminal)
            assert now.status.phase == "succeeded"
            assert now.status.bench.phase == "Succeeded"
            assert now.status.bench.completed_at is not None
            assert now.status.started_at is not None
            assert now.status.started_at >= now.status.bench.completed_at

    asyncio.run(scene())
