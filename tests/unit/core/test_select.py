"""Lists are filtered and sorted by label, setting and metric."""

from __future__ import annotations

import math
from typing import Any

import pytest

from atoll.core.errors import ValidationError
from atoll.core.select import Selection, parse_requirement, parse_sort
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Training


def training(name: str, created_at: float = 0.0, **changes: Any) -> Training:
    size = WorldSize(min=1, target=1, max=1)
    spec = TrainingSpec(name=name, command=["true"], world_size=size, **changes)
    return Training(namespace="n", uid=name, spec=spec, created_at=created_at)


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("lr", 0.1, True),
        ("lr", None, False),
        ("lr=0.10", 0.1, True),
        ("lr=1", 0.1, False),
        ("lr!=1", 0.1, True),
        ("lr!=1", None, True),
        ("lr<0.2", 0.1, True),
        ("lr<=0.1", 0.1, True),
        ("lr>0.1", 0.1, False),
        ("lr>=0.1", 0.1, True),
        ("lr>0", None, False),
        ("lr>0", "adam", False),
        ("opt=adam", "adam", True),
        ("opt=adam", "sgd", False),
        ("opt=", "", True),
        ("team=01", "01", True),
        ("fast=true", True, True),
        ("fast=false", True, False),
        ("name=a=b", "a=b", True),
    ],
)
def test_a_requirement_holds(text: str, value: Any, holds: bool) -> None:
    assert parse_requirement("setting", text).holds(value) is holds


@pytest.mark.parametrize("text", ["", "=1", "<", " >3"])
def test_a_requirement_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="setting"):
        parse_requirement("setting", text)


@pytest.mark.parametrize("text", ["", "-", "setting:", "min:"])
def test_a_sort_without_a_name_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="sort"):
        parse_sort("sort", text)


def names(selection: Selection, trainings: list[Training], metrics: Any = None) -> list[str]:
    values = metrics or {}
    matching = [each for each in trainings if selection.matches(each, values)]
    return [each.name for each in selection.order(matching, values, 100.0)]


def test_all_requirements_must_hold() -> None:
    trainings = [
        training("a", labels={"team": "x"}, settings={"lr": 0.1}),
        training("b", labels={"team": "x"}, settings={"lr": 0.3}),
        training("c", labels={"team": "y"}, settings={"lr": 0.1}),
    ]
    metrics = {("a", "last", "loss"): 3.0, ("a", "min", "loss"): 1.0, ("b", "last", "loss"): 1.5}
    assert names(Selection.parse(labels=["team=x"]), trainings) == ["a", "b"]
    assert names(Selection.parse(labels=["team=x"], settings=["lr<=0.1"]), trainings) == ["a"]
    assert names(Selection.parse(metrics=["loss<2"]), trainings, metrics) == ["b"]
    assert names(Selection.parse(metrics=["min:loss<2"]), trainings, metrics) == ["a"]
    with pytest.raises(ValidationError, match="loss<2"):
        Selection.parse(metrics=["loss"])


@pytest.mark.parametrize(
    "given",
    [{"metrics": ["loss<"]}, {"metrics": ["loss<low"]}, {"settings": ["lr>high"]}],
    ids=str,
)
def test_a_condition_that_cannot_hold_is_refused(given: Any) -> None:
    (text,) = next(iter(given.values()))
    with pytest.raises(ValidationError, match=f"'{text}' is not valid: expected a"):
        Selection.parse(**given)


def test_the_newest_is_first_unless_another_order_is_wanted() -> None:
    trainings = [training("old", 1.0), training("new", 9.0)]
    assert names(Selection.parse(), trainings) == ["new", "old"]
    assert names(Selection.parse(sort="age"), trainings) == ["new", "old"]
    assert names(Selection.parse(sort="-age"), trainings) == ["old", "new"]
    assert names(Selection.parse(sort="name"), trainings) == ["new", "old"]


@pytest.mark.parametrize(
    ("sort", "order"),
    [
        ("loss", ["a", "b", "i", "n", "none"]),
        ("-loss", ["i", "b", "a", "n", "none"]),
        ("setting:lr", ["b", "a", "n", "i", "none"]),
        ("-setting:lr", ["n", "a", "b", "i", "none"]),
    ],
)
def test_what_has_no_value_is_last_in_either_direction(sort: str, order: list[str]) -> None:
    losses = {"b": 2.0, "a": 1.0, "n": math.nan, "i": math.inf}
    metrics = {(uid, "last", "loss"): value for uid, value in losses.items()}
    settings = {"a": 0.2, "b": 0.1, "n": "text"}
    trainings = [
        training(name, at, settings={"lr": settings[name]} if name in settings else {})
        for at, name in enumerate(("none", "i", "n", "b", "a"))
    ]
    assert names(Selection.parse(sort=sort), trainings, metrics) == order


def test_a_setting_is_found_with_dashes_or_underscores() -> None:
    trainings = [training("a", settings={"batch-size": 8})]
    assert names(Selection.parse(settings=["batch_size=8"]), trainings) == ["a"]
