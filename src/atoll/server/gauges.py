"""The figures of `/metrics`. They follow changes in the store, so that a scrape is cheap.

prometheus_client is imported at the first scrape: most local control planes are never scraped.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from atoll.core.errors import Gone
from atoll.core.ports import Store
from atoll.core.status import Training

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class TrainingCounts(NamedTuple):
    """What one training adds to the totals."""

    phase: str
    ranks: Counter[str]
    restarts: int


class Gauges:
    """Trainings by phase, ranks by phase, restarts, and how long reconciling took."""

    def __init__(self) -> None:
        self._by_uid: dict[str, TrainingCounts] = {}
        self._phases: Counter[str] = Counter()  # totals, so that a scrape adds nothing up
        self._ranks: Counter[str] = Counter()
        self.restarts = 0
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def reconciled(self, seconds: float) -> None:
        """Records how long one pass of the controller over one training took."""
        self._buckets[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    async def follow(self, store: Store) -> None:
        """Keeps the counts up to date until it is cancelled."""
        while True:
            after = await store.version()
            self._by_uid, self._phases, self._ranks = {}, Counter(), Counter()
            for training in await store.list():
                self._count(training.uid, _counts(training))
            try:
                async for change in store.watch(after):
                    self._update(change.training, is_removed=change.is_removed)
                return
            except Gone:
                continue

    def _update(self, training: Training, *, is_removed: bool) -> None:
        before = self._by_uid.pop(training.uid, None)
        now = _counts(training)
        self.restarts += max(0, now.restarts - (before.restarts if before else 0))
        if before is not None:
            self._phases[before.phase] -= 1
            self._ranks.subtract(before.ranks)
        if not is_removed:
            self._count(training.uid, now)

    def _count(self, uid: str, counts: TrainingCounts) -> None:
        self._by_uid[uid] = counts
        self._phases[counts.phase] += 1
        self._ranks.update(counts.ranks)

    def exposition(self) -> tuple[bytes, str]:
        """The text and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
        from prometheus_client.core import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self))
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def families(self) -> Iterator[Any]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        trainings = GaugeMetricFamily("atoll_trainings", "Trainings by phase.", labels=["phase"])
        _fill(
            trainings, ("new", "pending", "ready", "succeeded", "failed", "cancelled"), self._phases
        )
        yield trainings
        ranks = GaugeMetricFamily("atoll_ranks", "Ranks by phase.", labels=["phase"])
        _fill(ranks, ("Pending", "Running", "Succeeded", "Failed", "Stopped"), self._ranks)
        yield ranks
        yield CounterMetricFamily(
            "atoll_rank_restarts", "Ranks started again since the start.", self.restarts
        )
        buckets, so_far = [], 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self._buckets, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        yield HistogramMetricFamily(
            "atoll_reconcile_seconds",
            "How long one pass over one training took.",
            buckets=buckets,
            sum_value=self._sum_s,
        )


class _Collector:
    def __init__(self, gauges: Gauges) -> None:
        self._gauges = gauges

    def collect(self) -> Iterator[Any]:
        return self._gauges.families()


def _fill(family: Any, labels: Iterable[str], counts: Counter[str]) -> None:
    for label in labels:
        family.add_metric([label], counts[label])


def _counts(training: Training) -> TrainingCounts:
    status = training.status
    every = (*status.ranks, *status.retired)
    return TrainingCounts(
        status.phase.value or "new",
        Counter(rank.phase for rank in status.ranks),
        sum(rank.restarts for rank in every),
    )
