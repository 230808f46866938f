"""The settings of a sweep: names that say what runs, and arguments that fit."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.core.checks import check_name
from atoll.core.errors import ValidationError
from atoll.core.settings import dns_label
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Training
from atoll.sdk.sweep import DistributedFunction, Sweep, SweepRow, distributed, jobs_of
from atoll.sdk.training import DistributedTraining


def train(lr: float, depth: int = 2, *, tag: str = "") -> float:
    return lr * depth


def another(lr: float) -> float:
    return lr


def names(settings: list[dict[str, Any]], function: Any = train, name: Any = None) -> list[str]:
    return [job.name for job in jobs_of(function, settings, name)]


def test_a_name_is_that_of_the_call() -> None:
    one, two = names([{"lr": 0.1}, {"lr": 0.2}])
    assert one.startswith("train-lr0.1-")
    assert one != two
    assert names([{"lr": 0.2}, {"lr": 0.1}]) == [two, one]
    assert names([{"lr": 1}]) != names([{"lr": 1.0}])
    assert names([{"lr": 0.1}], another) != names([{"lr": 0.1}], name="another")
    for each in names([{"lr": 0.1}], lambda lr: lr) + names([{"lr": 0.1}], name="a" * 52):
        check_name("name", dns_label(each))


def test_a_setting_that_is_listed_twice_runs_twice() -> None:
    assert len(set(names([{"lr": 0.1}] * 3))) == 3


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ([{"lr": 0.1}, {"rl": 0.1}], r"settings\[1\].*missing a required argument: 'lr'"),
        ([{"lr": 0.1, "x": 1}], r"settings\[0\].*unexpected keyword argument 'x'"),
        ([{"lr": "0.1"}], r"settings\[0\]\.lr: '0.1' is not valid: expected float"),
        ([{"lr": 1, "depth": 2.5}], r"settings\[0\]\.depth: 2.5 is not valid: expected int"),
        ([{"lr": True}], r"settings\[0\]\.lr: True"),
        ([3], r"settings\[0\]: 3 is not valid: expected a dict of arguments"),
    ],
)
def test_arguments_that_do_not_fit_are_named(settings: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        jobs_of(train, settings, None)


def test_no_column_of_the_table_takes_the_place_of_another() -> None:
    """A function may have an argument `name`, and return what it was called with."""
    spec = TrainingSpec(name="t", world_size=WorldSize(min=1, target=1, max=1), command=["true"])
    client: Any = None
    handle = DistributedTraining(client, Training(namespace="n", uid="u", spec=spec))
    row = SweepRow({"lr": 1, "name": "exp"}, {"lr": 0.5, "error": 2}, "failed: x", handle)
    table = Sweep([row]).table()
    assert {name: column[0] for name, column in table.items() if name != "seconds"} == {
        "lr": 1, "name": "exp", "result.lr": 0.5, "error": 2, "result": row.result, "phase": "",
        "training.error": "failed: x", "training.name": "t",
    }  # fmt: skip
    assert str(Sweep([row])).splitlines()[0].split() == [
        *("lr", "name", "result.lr", "error", "phase", "training.name", "seconds"),
        "training.error",
    ]


def test_a_distributed_function_is_called_here_or_checked_before_it_is_sent() -> None:
    made = distributed(world_size=2, gpu_count=1)(train)
    assert made(0.5) == made.local(lr=0.5) == 1.0
    assert made.__name__ == "train"
    with pytest.raises(ValidationError, match=r"arguments.lr: 'x' is not valid: expected float"):
        made.deploy(lr="x")
    with pytest.raises(ValidationError, match="unexpected keyword argument"):
        made.deploy(0.1, bogus=1)
    assert isinstance(distributed(train), DistributedFunction)
    assert made.with_options(gpu_count=2).options == {"world_size": 2, "gpu_count": 2}


def test_options_that_are_none_are_refused_where_they_are_written() -> None:
    with pytest.raises(ValidationError, match="did you mean 'world_size'"):
        distributed(wold_size=2)(train)  # type: ignore[call-overload]
    with pytest.raises(ValidationError, match="the function is what runs"):
        distributed(command=["true"])(train)
