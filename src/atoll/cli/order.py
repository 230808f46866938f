"""In which order `ps` lists trainings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import click

from atoll.core.escape import escape_control
from atoll.core.metrics import LatestMetric
from atoll.core.status import Training
from atoll.sdk import flows
from atoll.sdk.client import Client

# What a training itself has. Every other word is the name of a series.
FIELDS: dict[str, Callable[[Training, float], Any]] = {
    "age": lambda training, now: now - training.created_at,
    "name": lambda training, now: training.name,
    "phase": lambda training, now: training.status.phase.value,
    "ran": lambda training, now: training.status.ran_for(now) or -1.0,
    "ready": lambda training, now: training.status.world.ready,
}


def ordered(
    client: Client, trainings: list[Training], sort: str | None
) -> tuple[list[Training], dict[str, LatestMetric]]:
    """The trainings in that order, and by uid the figures that it went by."""
    name, is_down = (sort or "age").removeprefix("-"), (sort or "").startswith("-")
    newest_first = sorted(trainings, key=lambda training: -training.created_at)
    if not name:
        raise click.BadParameter("expected a name", param_hint="--sort")
    if name in FIELDS:
        now, key = time.time(), FIELDS[name]
        return sorted(newest_first, key=lambda each: key(each, now), reverse=is_down), {}
    newest_metrics = {
        metric.uid: metric for metric in client.run(flows.newest_metrics([name])).items
    }
    if trainings and not any(training.uid in newest_metrics for training in trainings):
        raise click.ClickException(
            f"--sort: no training has reported {escape_control(name)!r}: expected "
            f"{', '.join(FIELDS)} or the name of a series ('atoll series NAME' lists them)"
        )
    return by_metric(newest_first, newest_metrics, is_down=is_down), newest_metrics


def by_metric(
    trainings: list[Training], newest_metrics: Mapping[str, LatestMetric], *, is_down: bool
) -> list[Training]:
    """The least first. Those whose figure is no number, and those without one, are last."""

    def key(training: Training) -> tuple[int, float]:
        metric = newest_metrics.get(training.uid)
        if metric is None:
            return 2, 0.0
        value = float(metric.value)
        if math.isnan(value):
            return 1, 0.0
        return 0, -value if is_down else value

    return sorted(trainings, key=key)
