"""What a sweep tries, when it stops a training, and what it starts next."""

from __future__ import annotations

import math
from typing import Any

import pytest

from atoll.core.errors import ValidationError
from atoll.core.settings import dns_label
from atoll.sdk.search import (
    Range,
    StopRule,
    combine,
    grid,
    parse_file,
    parse_space,
    render_command,
    sample,
    setting_names,
    to_start,
)


def test_a_grid_has_every_combination_once() -> None:
    space = parse_space(["lr=0.1,0.3", "opt=adam, sgd", "fast=true"])
    assert grid(space) == [
        {"lr": 0.1, "opt": "adam", "fast": True},
        {"lr": 0.1, "opt": "sgd", "fast": True},
        {"lr": 0.3, "opt": "adam", "fast": True},
        {"lr": 0.3, "opt": "sgd", "fast": True},
    ]


def test_a_range_needs_samples_which_are_the_same_each_time() -> None:
    space = parse_space(["lr=1e-4..1e-1:log", "width=32..64", "drop=0..0.5", "opt=adam,sgd"])
    with pytest.raises(ValidationError, match="expected --samples with a range"):
        grid(space)
    drawn = sample(space, 50, seed=3)
    assert drawn == sample(space, 50, seed=3) != sample(space, 50, seed=4)
    assert len({str(each) for each in drawn}) == 50
    assert all(1e-4 <= float(each["lr"]) <= 1e-1 for each in drawn)
    assert all(type(each["width"]) is int and 32 <= each["width"] <= 64 for each in drawn)
    assert all(0 <= float(each["drop"]) <= 0.5 for each in drawn)
    # Equal odds for each decade: a third of them are below 1e-3.
    assert 8 <= sum(float(each["lr"]) < 1e-3 for each in drawn) <= 26


def test_samples_of_lists_alone_end_where_there_are_no_more() -> None:
    assert len(sample(parse_space(["lr=1,2"]), 10, seed=0)) == 2


@pytest.mark.parametrize(
    "text", ["lr", "lr=", "=1", "lr=1,,2", "lr=2..1", "lr=a..b", "lr=0..1:log"]
)
def test_values_that_cannot_be_tried_are_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="--set"):
        parse_space([text])
    with pytest.raises(ValidationError, match="expected lr once"):
        parse_space(["lr=1", "lr=2"])


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("a.csv", "lr,opt\n0.1,adam\n0.3,sgd\n"),
        ("a.jsonl", '{"lr": 0.1, "opt": "adam"}\n\n{"lr": 0.3, "opt": "sgd"}\n'),
        ("a.json", '[{"lr": 0.1, "opt": "adam"}, {"lr": 0.3, "opt": "sgd"}]'),
    ],
)
def test_settings_are_read_from_a_file(path: str, text: str) -> None:
    expected = [{"lr": 0.1, "opt": "adam"}, {"lr": 0.3, "opt": "sgd"}]
    assert parse_file(path, text) == expected
    assert combine(expected, grid(parse_space(["width=1,2"])))[1] == {**expected[0], "width": 2}


@pytest.mark.parametrize(
    ("path", "text"),
    [("a.json", "lr: 1"), ("a.json", "[1]"), ("a.csv", "lr,opt\n1\n"), ("a.json", '{"lr": [1]}')],
)
def test_a_file_that_has_no_settings_is_refused_by_name(path: str, text: str) -> None:
    with pytest.raises(ValidationError, match=path):
        parse_file(path, text)


def test_a_row_without_all_values_is_refused_with_those_it_has() -> None:
    with pytest.raises(ValidationError, match=r"row 2: \['3'\] is not valid: expected as many"):
        parse_file("a.csv", "lr,opt\n1,2\n3\n")


@pytest.mark.parametrize(
    ("command", "settings", "rendered"),
    [
        ("t.py", {"lr": 10.0, "n": -2}, "t.py --lr=10.0 --n=-2"),
        ("t.py x={x}", {"x": 1 / 3, "lr": 2 / 3}, f"t.py x={1 / 3!r} --lr={2 / 3!r}"),
        ("t.py", {"fast": True, "slow": False}, "t.py --fast"),
        ("t.py lr={lr} --c x{lr}y", {"lr": 0.1, "n": 1}, "t.py lr=0.1 --c x0.1y --n=1"),
        ("t.py --a={a} b={b}", {"a": True, "b": False}, "t.py --a=True b=False"),
        # A folder for each: the script needs the value as well.
        ("t.py --out=runs/{lr}", {"lr": 0.1}, "t.py --out=runs/0.1 --lr=0.1"),
        ("t.py --out lr{lr}-n{n} -n {n}", {"lr": 0.1, "n": 2}, "t.py --out lr0.1-n2 -n 2 --lr=0.1"),
        ('t.py {"lr":{lr},"n":[{n}]}', {"lr": 0.1, "n": 2}, 't.py {"lr":0.1,"n":[2]}'),
    ],
)
def test_settings_become_arguments(command: str, settings: Any, rendered: str) -> None:
    assert render_command(command.split(), settings) == rendered.split()


def test_names_say_the_settings_and_are_unique_as_labels() -> None:
    settings = [{"lr": 0.1, "opt": "a/b"}, {"lr": 0.1, "opt": "a b"}, {"text": "x" * 500}]
    names = setting_names("exp", settings)
    assert names[0] == "exp-lr0.1-opta-b"
    assert len({dns_label(name) for name in names}) == 3
    assert setting_names("exp", settings[:1]) == names[:1]


@pytest.mark.parametrize(
    ("rule", "value", "step", "holds"),
    [
        ("loss>5@500", 6.0, 500, True),
        ("loss>5@500", 6.0, 499, False),
        ("loss>5@500", 6.0, None, False),
        ("loss>5@500", 5.0, 900, False),
        ("loss>5", 6.0, None, True),
        ("loss>5@500", math.nan, 500, True),
        ("loss>5@500", math.inf, 500, True),
        ("acc<=0.1@10", 0.1, 10, True),
        ("eval/loss>=1e-3", 1e-3, 0, True),
    ],
)
def test_a_stop_rule_holds(rule: str, value: float, step: int | None, holds: bool) -> None:
    parsed = StopRule.parse(rule)
    assert parsed.holds(value, step) is holds
    assert StopRule.parse(str(parsed)) == parsed


@pytest.mark.parametrize("text", ["loss", "loss>", "loss>high", ">5", "", "loss>5@x"])
def test_a_stop_rule_that_says_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValidationError, match="--stop-when"):
        StopRule.parse(text)


def test_the_next_jobs_start_in_order_and_never_too_many() -> None:
    jobs = ["a", "b", "c", "d"]
    assert to_start(jobs, set(), 0, 2) == ["a", "b"]
    assert to_start(jobs, {0, 1}, 1, 2) == ["c"]
    assert to_start(jobs, {0, 1}, 2, 2) == []
    assert to_start(jobs, {0, 2}, 0, 9) == ["b", "d"]
    assert to_start(jobs, {0, 1, 2, 3}, 0, 2) == []


def test_a_range_is_of_whole_numbers_only_if_both_ends_are() -> None:
    assert parse_space(["n=1..3"])["n"] == Range(1, 3)
    assert isinstance(parse_space(["n=1.0..3"])["n"].low, float)  # type: ignore[union-attr]
