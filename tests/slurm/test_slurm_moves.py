"""What ranks under real Slurm daemons report, use, and whether they move."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.controller.informer import Informer
from atoll.metrics.collect import Collector
from atoll.metrics.store import MetricStore
from atoll.rounds.follow import metrics_uri_of
from tests.slurm.conftest import Lab
from tests.support.slurm_cluster import SlurmCluster, needs_slurm

pytestmark = [needs_slurm, pytest.mark.slurm]

SOURCES = Path(__file__).parents[2] / "src"
REPORT = "import atoll\nfor step in range(20): atoll.report(step=step, loss=1 / (step + 1))"
# Rank 1 waits, without a trace, for somebody to write to the pipe; rank 0 goes on printing.
STILL = """
if [ $RANK = 1 ]; then read word < {folder}/pipe; echo $word; fi
while [ ! -e {folder}/end ]; do echo on; sleep 0.5; done
"""


def play(cluster: SlurmCluster, folder: Path, body: Callable[[Lab, MetricStore], Any]) -> None:
    """The test beside a controller that hears of what ranks report."""

    async def story() -> None:
        lab, metric_store = Lab(cluster, folder), MetricStore(folder / "series.db")
        collector = Collector(metric_store, metrics_uri_of({"slurm": lab.executor}))
        informer = Informer(lab.store)
        reading = asyncio.gather(informer.run(), collector.run(informer))
        try:
            await lab.play(
                lambda _: body(lab, metric_store), idle_s=metric_store.idle_tracker.idle_s
            )
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    asyncio.run(story())


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


def test_ranks_report_and_are_measured(cluster: SlurmCluster, tmp_path: Path) -> None:
    async def body(lab: Lab, metric_store: MetricStore) -> None:
        script = f"PYTHONPATH={SOURCES} {sys.executable} -c '{REPORT}'; sleep 1"
        training = await lab.create(lab.spec(script, ranks=2))
        over = await lab.until_over(training)
        assert over.status.phase == "succeeded", over.status
        await until(lambda: metric_store.is_finished(training.uid))
        lengths = {one.rank: len(one.series) for one in metric_store.series(training.uid, ["loss"])}
        assert lengths == {0: 20, 1: 20}
        assert "machine/memory" in {one.name for one in metric_store.series(training.uid)}
        assert metric_store.missed(training.uid) == 0

    play(cluster, tmp_path, body)


def test_a_rank_that_does_not_move_is_told_of_until_it_does(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    async def body(lab: Lab, metric_store: MetricStore) -> None:
        os.mkfifo(tmp_path / "pipe")
        training = await lab.create(lab.spec(STILL, ranks=2, stall_s=8.0))
        await lab.until(training, lambda t: 1 in t.status.stalled, within_s=120)
        (tmp_path / "pipe").write_text("go\n")
        await lab.until(training, lambda t: 1 not in t.status.stalled, within_s=120)
        (tmp_path / "end").touch()
        over = await lab.until_over(training)
        assert over.status.phase == "succeeded", over.status
        events = list(await lab.store.events(training.key))[::-1]
        told = [e.reason for e in events if e.reason in ("RankStalled", "RankMoves")]
        assert told[:2] == ["RankStalled", "RankMoves"]

    play(cluster, tmp_path, body)
