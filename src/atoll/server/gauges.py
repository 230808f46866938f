"""The Prometheus metrics of `/metrics`, computed from the informer at a scrape.

prometheus_client is imported at the first scrape: most local control planes are never scraped.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from atoll.controller.informer import Informer
from atoll.core.phase import Phase
from atoll.core.status import Training

LABELS = ["namespace", "training"]
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


MAX_TRAININGS = 200  # the newest active ones: Prometheus pays for every series
# Gauges of one training: name, help, and the value at a time.
TRAINING_GAUGES: tuple[tuple[str, str, Callable[[Training, float], float]], ...] = (
    (
        "ready",
        "Whether the training is ready: 1 or 0.",
        lambda training, now: training.status.phase is Phase.READY,
    ),
    ("ranks_ready", "Ranks that are ready.", lambda training, now: training.status.world.ready),
    (
        "ranks_target",
        "Target number of ranks.",
        lambda training, now: training.spec.world_size.target,
    ),
    (
        "ranks_min",
        "Minimum number of ranks.",
        lambda training, now: training.spec.world_size.min,
    ),
    (
        "ranks_stalled",
        "Stalled ranks, where a stall timeout is set.",
        lambda training, now: len(training.status.stalled),
    ),
    (
        "ranks_failed",
        "Ranks that failed for good.",
        lambda training, now: sum(rank.phase == "Failed" for rank in training.status.ranks),
    ),
    ("restarts", "Restarts of ranks.", lambda training, now: _restarts(training)),
    (
        "age_seconds",
        "Seconds since the training was created.",
        lambda training, now: max(0.0, now - training.created_at),
    ),
)
METRIC_GAUGES = (
    ("loss", "Newest loss of the lowest rank that reports one."),
    ("tokens", "Newest token count of the lowest rank that reports one."),
    ("round", "Newest committed outer round."),
    ("weights_version", "Newest version of the weights that it publishes or follows."),
    ("weights_behind", "Versions that its slowest follower of weights lacks."),
    ("weights_lag_seconds", "Age of the oldest version that its slowest follower lacks."),
)

# The metrics of REPORTED of a training that are known, by its uid.
NewestMetrics = Callable[[str], Mapping[str, float]]


class Gauges:
    """Trainings by phase, ranks by phase, restarts, and how long reconciling took."""

    def __init__(self, informer: Informer) -> None:
        self._informer = informer
        self._restarts: dict[str, int] = {}  # of each active training
        self.restarts = 0
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def record_pass(self, seconds: float) -> None:
        """Records how long one pass of the controller over one training took."""
        self._buckets[bisect.bisect_left(BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    async def follow(self) -> None:
        """Counts restarts until it is cancelled."""
        async for update in self._informer.updates():
            before = self._restarts.pop(update.uid, 0)
            if update.training is None:
                continue
            now = _restarts(update.training)
            if not update.is_listed:
                self.restarts += max(0, now - before)
            if not update.is_removed:
                self._restarts[update.uid] = now

    def exposition(
        self,
        namespace: str | None = None,
        newest_metrics: NewestMetrics = lambda uid: {},
        now: float = 0.0,
    ) -> tuple[bytes, str]:
        """The text and its content type: totals of all, and the trainings of a namespace."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
        from prometheus_client.core import CollectorRegistry

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(lambda: self.families()))
        if namespace is not None:
            registry.register(
                _Collector(lambda: self.training_families(namespace, newest_metrics, now))
            )
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def training_families(
        self, namespace: str, newest_metrics: NewestMetrics, now: float
    ) -> Iterator[Any]:
        """Gauges of each training of the namespace that is not over, but of no more than
        `MAX_TRAININGS`."""
        from prometheus_client.core import GaugeMetricFamily

        active = [
            training
            for training in list(self._informer.active.values())  # the event loop changes it
            if training.namespace == namespace and not training.status.phase.is_terminal
        ]
        active.sort(key=lambda training: training.created_at, reverse=True)
        newest = active[:MAX_TRAININGS]
        yield GaugeMetricFamily(
            "atoll_trainings_without_gauges",
            f"Active trainings beyond the {MAX_TRAININGS} newest.",
            len(active) - len(newest),
        )
        for name, text, value_of in TRAINING_GAUGES:
            family = GaugeMetricFamily(f"atoll_training_{name}", text, labels=LABELS)
            for training in newest:
                family.add_metric(training.key, value_of(training, now))
            yield family
        metrics = [(training.key, newest_metrics(training.uid)) for training in newest]
        for name, text in METRIC_GAUGES:
            family = GaugeMetricFamily(f"atoll_training_{name}", text, labels=LABELS)
            for key, newest_values in metrics:
                if name in newest_values:  # what is not known is absent
                    family.add_metric(key, newest_values[name])
            yield family

    def families(self) -> Iterator[Any]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        trainings = GaugeMetricFamily("atoll_trainings", "Trainings by phase.", labels=["phase"])
        active = list(self._informer.active.values())  # the event loop changes it meanwhile
        phases = Counter(training.status.phase.value or "new" for training in active)
        phases.update(each.phase for each in list(self._informer.settled.values()))
        _fill(trainings, ("new", "pending", "ready", "succeeded", "failed", "cancelled"), phases)
        yield trainings
        ranks = GaugeMetricFamily(
            "atoll_ranks", "Ranks of active trainings by phase.", labels=["phase"]
        )
        by_phase = Counter[str](
            rank.phase
            for training in active
            if not training.status.phase.is_terminal
            for rank in training.status.ranks
        )
        _fill(ranks, ("Pending", "Running", "Succeeded", "Failed", "Stopped"), by_phase)
        yield ranks
        yield CounterMetricFamily(
            "atoll_rank_restarts", "Restarts of ranks since the server started.", self.restarts
        )
        buckets, so_far = [], 0
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self._buckets, strict=True):
            so_far += count
            buckets.append((bound, so_far))
        yield HistogramMetricFamily(
            "atoll_reconcile_seconds",
            "Duration of one reconcile pass over one training.",
            buckets=buckets,
            sum_value=self._sum_s,
        )


class _Collector:
    def __init__(self, families: Callable[[], Iterator[Any]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Any]:
        return self._families()


def _fill(family: Any, labels: Iterable[str], counts: Mapping[str, int]) -> None:
    for label in labels:
        family.add_metric([label], counts[label])


def _restarts(training: Training) -> int:
    status = training.status
    return sum(rank.restarts for rank in (*status.ranks, *status.removed_ranks))
