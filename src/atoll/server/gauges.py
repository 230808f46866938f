"""The figures of `/metrics`. They follow changes in the store, so that a scrape is cheap.

prometheus_client is imported at the first scrape: most local control planes are never scraped.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from atoll.core.errors import Gone
from atoll.core.ports import Key, Store
from atoll.core.status import Training

LABELS = ["namespace", "training"]
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


MOST_TRAININGS = 200  # with gauges of their own: the newest that are not over
# Gauges of one training: name, help, and which of its figures.
OF_TRAINING = (
    ("ready", "Whether the training is ready: 1 or 0.", "is_ready"),
    ("ranks_ready", "Ranks that are ready.", "ready"),
    ("ranks_target", "Ranks that are wanted.", "target"),
    ("ranks_min", "Ranks without which it is not ready.", "least"),
    ("ranks_stalled", "Ranks that do not move, where stall_s is set.", "stalled"),
    ("ranks_failed", "Ranks that are lost for good.", "failed"),
    ("restarts", "Restarts of its ranks.", "restarts"),
    ("age_seconds", "Seconds since it was stored.", "age_s"),
)
REPORTED = (
    ("loss", "The loss reported last, by the lowest rank that reports one."),
    ("tokens", "The tokens reported last, by the lowest rank that reports some."),
    ("round", "The newest outer round that is decided."),
)

# The figures of REPORTED of a training that are known, by its uid.
Reported = Callable[[str], Mapping[str, float]]


class TrainingCounts(NamedTuple):
    """What one training adds to the totals, and its own figures."""

    phase: str
    ranks: Counter[str]
    restarts: int
    key: Key
    created_at: float
    is_over: bool
    ready: int
    target: int
    least: int
    stalled: int

    @property
    def is_ready(self) -> bool:
        return self.phase == "ready"

    @property
    def failed(self) -> int:
        return self.ranks["Failed"]


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

    def exposition(
        self, namespace: str | None = None, reported: Reported = lambda uid: {}, now: float = 0.0
    ) -> tuple[bytes, str]:
        """The text and its content type: totals of all, and of a namespace each training."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
        from prometheus_client.core import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(lambda: self.families()))
        if namespace is not None:
            registry.register(_Collector(lambda: self.own(namespace, reported, now)))
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def own(self, namespace: str, reported: Reported, now: float) -> Iterator[Any]:
        """Gauges of each training of the namespace that is not over, but of no more than
        `MOST_TRAININGS`."""
        from prometheus_client.core import GaugeMetricFamily

        active = [
            (uid, counts)
            for uid, counts in self._by_uid.items()
            if counts.key[0] == namespace and not counts.is_over
        ]
        active.sort(key=lambda pair: pair[1].created_at, reverse=True)
        shown = active[:MOST_TRAININGS]
        yield GaugeMetricFamily(
            "atoll_trainings_without_gauges",
            f"Trainings that are not over, beyond the {MOST_TRAININGS} newest.",
            len(active) - len(shown),
        )
        for name, text, field in OF_TRAINING:
            family = GaugeMetricFamily(f"atoll_training_{name}", text, labels=LABELS)
            for _, counts in shown:
                age_s = max(0.0, now - counts.created_at)
                value = age_s if field == "age_s" else getattr(counts, field)
                family.add_metric(counts.key, value)
            yield family
        figures = [(counts.key, reported(uid)) for uid, counts in shown]
        for name, text in REPORTED:
            family = GaugeMetricFamily(f"atoll_training_{name}", text, labels=LABELS)
            for key, known in figures:
                if name in known:  # what is not known is absent
                    family.add_metric(key, known[name])
            yield family

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
    def __init__(self, families: Callable[[], Iterator[Any]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        return self._families()


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
        training.key,
        training.created_at,
        status.phase.is_terminal,
        status.world.ready,
        training.spec.world_size.target,
        training.spec.world_size.min,
        len(status.stalled),
    )
