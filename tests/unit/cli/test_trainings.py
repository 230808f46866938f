"""`atoll logs` prints lines as they come, and `atoll ps` sorts by what ranks reported."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from atoll.cli import follow, trainings
from atoll.cli.trainings import sort_by_metric
from atoll.core.metrics import LatestMetric, MetricValue
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import LogLine, Training
from atoll.sdk import wire as sdk_wire


@pytest.mark.parametrize("words", [(), ("--follow",), ("--json",)])
def test_a_line_is_printed_before_the_next_is_read(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    printed: list[str] = []
    asked: list[Any] = []

    def lines(wire: object, position: sdk_wire.LogPosition) -> Iterator[LogLine]:
        asked.append(position.request["params"])
        for number in range(3):
            assert len(printed) == number, "what was read before is printed"
            yield LogLine(rank=0, text=f"line {number}", time=None)

    spec = SimpleNamespace(world_size=SimpleNamespace(max=1))
    training = SimpleNamespace(name="t", uid="u", last=SimpleNamespace(spec=spec))
    client = SimpleNamespace(get=lambda name: training, wire=None)
    monkeypatch.setattr(trainings, "Client", lambda: client)
    monkeypatch.setattr(sdk_wire, "read_log", lines)
    monkeypatch.setattr(follow.LinePrinter, "print", lambda self, line: printed.append(line.text))
    monkeypatch.setattr("atoll.cli.trainings.print_json", lambda line: printed.append(line.text))
    done = CliRunner().invoke(trainings.logs, ["t", *words], catch_exceptions=False)
    assert done.exit_code == 0
    assert printed == ["line 0", "line 1", "line 2"]
    assert asked


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
    up = [t.name for t in sort_by_metric(trainings, newest_metrics, is_reversed=False)]
    down = [t.name for t in sort_by_metric(trainings, newest_metrics, is_reversed=True)]
    assert up == ["a", "b", "i", "n", "none"]
    assert down == ["i", "b", "a", "n", "none"]
