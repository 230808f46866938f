"""What the compare page makes of commands, specs and series."""

from __future__ import annotations

from atoll.metrics.series import Series, point_of
from atoll.server.ui.compare import best_of, flatten, program_of


def test_the_program_of_a_command_is_compared_without_its_flags() -> None:
    words = ["python", "train.py", "--lr", "0.1", "--width=64", "opt.name=adam", "-v", "-3"]
    assert program_of(words) == ["python", "train.py"]


def test_nested_fields_of_a_spec_have_a_path() -> None:
    spec = {"worldSize": {"min": 1}, "env": {"A": "x"}, "ports": [1, 2], "gpus": None}
    assert flatten(spec) == {
        "worldSize.min": "1",
        "env.A": "x",
        "ports": "1 2",
        "gpus": "null",
    }


def test_the_best_loss_is_the_least_and_the_best_accuracy_the_largest() -> None:
    series = Series()
    for at, value in enumerate((3.0, 1.0, 2.0)):
        series.add(point_of((at, at, value)), 0, 100)
    assert best_of("val/loss", series.columns) == 1.0
    assert best_of("accuracy", series.columns) == 3.0
    assert best_of("train_runtime", series.columns) == 1.0
    assert best_of("samples_per_seconds", series.columns) == 3.0
