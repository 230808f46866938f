"""Trainings in order of what they reported: numbers first, then what is none, then the rest."""

from __future__ import annotations

from atoll.cli.order import by_metric
from atoll.core.metrics import LatestMetric, MetricValue
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Training


def training(name: str) -> Training:
    size = WorldSize(min=1, target=1, max=1)
    spec = TrainingSpec(name=name, command=["true"], world_size=size)
    return Training(namespace="n", uid=name, spec=spec)


def metric(uid: str, value: MetricValue) -> LatestMetric:
    return LatestMetric(training=uid, uid=uid, name="loss", value=value, step=1, at=1.0)


def test_the_least_is_first_or_last_and_what_is_no_number_comes_after() -> None:
    values: dict[str, MetricValue] = {"b": 2.0, "a": 1.0, "n": "nan", "i": "inf"}
    newest_metrics = {uid: metric(uid, value) for uid, value in values.items()}
    trainings = [training(name) for name in ("none", "n", "i", "b", "a")]
    up = [t.name for t in by_metric(trainings, newest_metrics, is_down=False)]
    down = [t.name for t in by_metric(trainings, newest_metrics, is_down=True)]
    assert up == ["a", "b", "i", "n", "none"]
    assert down == ["i", "b", "a", "n", "none"]
