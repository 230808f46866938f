"""The outer step on rows by name: torch's numbers, any rule, whatever parts it is taken in."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import ValidationError
from atoll.diloco import DiLoCo
from atoll.diloco.model import split
from atoll.diloco.outer import (
    RULES,
    Floats,
    OuterConfig,
    OuterRows,
    OuterTurn,
    read_by_round,
    read_rule,
    show,
    value_at,
)

RAMP = ((2, 0.5), (6, 0.9))
SHAPES = st.lists(
    st.lists(st.integers(1, 7), max_size=3).map(tuple).map(lambda shape: shape), min_size=1
)


class Adam:
    """An outer optimiser of a program: this class is all that it takes."""

    name = "own-adam"
    state = ("first", "second")

    def step(self, rows: Mapping[str, Floats], gradient: Floats, turn: OuterTurn) -> None:
        first, second = rows["first"], rows["second"]
        first += np.float32(0.1) * (gradient - first)
        second += np.float32(0.001) * (gradient * gradient - second)
        mean = first / np.float32(1 - 0.9 ** (turn.number + 1))
        square = second / np.float32(1 - 0.999 ** (turn.number + 1))
        values = rows["values"]
        values -= np.float32(turn.lr) * mean / (np.sqrt(square) + np.float32(1e-8))


def test_an_outer_optimiser_with_two_rows_of_state_is_one_class() -> None:
    means = np.random.default_rng(0).standard_normal((6, 1000)).astype(np.float32)
    rows = OuterRows(1000, OuterConfig(0.05, rule=read_rule(Adam())))
    assert set(rows.rows) == {"values", "first", "second"}
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.Adam([parameter], lr=0.05)
    for round, mean in enumerate(means):
        rows.step(round, 0, mean)
        parameter.grad = torch.from_numpy(mean.copy())
        optimizer.step()
    np.testing.assert_allclose(rows.values, parameter.detach().numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_named", [False, True])
def test_a_run_keeps_every_row_of_its_outer_optimiser(
    is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten rounds in one life and in two have the same bits, with a rule of two rows."""
    rule: Any = Adam()
    if is_named:
        monkeypatch.setitem(RULES, rule.name, rule)
        rule = rule.name

    def train(uri: str, steps: int, outer: Any = rule) -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        where: dict[str, Any] = {"uri": uri, "rank": 0, "world_size": 1, "outer_lr": 0.01}
        with DiLoCo(model, inner, sync_every=1, outer=outer, **where) as diloco:
            for _ in range(steps):
                at = diloco.step
                x = torch.randn(4, 3, generator=torch.Generator().manual_seed(at))
                model(x).square().mean().backward()
                inner.step()
                inner.zero_grad()
            return diloco.global_parameters()

    one, two = (f"memory:///{uuid.uuid4()}" for _ in range(2))
    complete = train(one, 10)
    train(two, 4)
    parts = train(two, 6)
    assert all(np.array_equal(complete[name], parts[name]) for name in complete)
    with pytest.raises(ValidationError, match="outer: 'nesterov'.*began with 'own-adam'"):
        train(two, 1, "nesterov")


@pytest.mark.parametrize(("lr", "beta"), [(0.7, 0.9), (1.0, 0.0), (0.4, 0.5)])
def test_ten_steps_are_those_of_torch_sgd_with_nesterov(lr: float, beta: float) -> None:
    rng = np.random.default_rng(0)
    ours = OuterRows(100_000, OuterConfig(lr, beta))
    ours.values[:] = rng.standard_normal(100_000)
    theirs = torch.nn.Parameter(torch.from_numpy(ours.values.copy()))
    optimizer = torch.optim.SGD([theirs], lr=lr, momentum=beta, nesterov=beta > 0)
    for round in range(10):
        gradient = rng.standard_normal(100_000).astype(np.float32)
        theirs.grad = torch.from_numpy(gradient)
        optimizer.step()
        ours.step(round, 0, gradient)
    np.testing.assert_allclose(ours.values, theirs.detach().numpy(), rtol=0, atol=2e-6)


def test_any_parts_in_any_order_give_the_bits_of_one_step() -> None:
    means = np.random.default_rng(0).standard_normal((4, 200_001)).astype(np.float32)
    whole, parts = (OuterRows(200_001, OuterConfig(0.7, 0.9)) for _ in range(2))
    for round, mean in enumerate(means):
        whole.step(round, 0, mean)
        for start in (150_000, 0, 70_000):
            stop = {150_000: 200_001, 0: 70_000, 70_000: 150_000}[start]
            parts.step(round, start, mean[start:stop])
    for name, row in whole.rows.items():
        assert np.array_equal(row, parts.rows[name])


def test_momentum_by_round_is_that_of_torch_set_each_round() -> None:
    ours, rng = OuterRows(8, OuterConfig(0.7, RAMP)), np.random.default_rng(0)
    theirs = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.5, nesterov=True)
    for number in range(9):
        gradient = rng.standard_normal(8).astype(np.float32)
        optimizer.param_groups[0]["momentum"] = value_at(RAMP, number)
        theirs.grad = torch.from_numpy(gradient)
        optimizer.step()
        ours.step(number, 0, gradient)
    np.testing.assert_allclose(ours.values, theirs.detach().numpy(), rtol=0, atol=1e-5)


def test_the_rule_sgd_is_that_of_torch() -> None:
    ours = OuterRows(8, OuterConfig(0.5, 0.9, RULES["sgd"]))
    theirs = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([theirs], lr=0.5, momentum=0.9)
    for round in range(5):
        theirs.grad = torch.arange(8.0)
        optimizer.step()
        ours.step(round, 0, np.arange(8, dtype=np.float32))
    np.testing.assert_allclose(ours.values, theirs.detach().numpy(), rtol=1e-6)


def test_schedules_count_the_turns_of_a_fragment() -> None:
    rows = OuterRows(1, OuterConfig(((0, 1.0), (1, 0.5)), 0.0), fragments=3)
    ones = np.ones(1, np.float32)
    rows.step(2, 0, ones)
    assert rows.values[0] == -1.0
    rows.step(5, 0, ones)
    assert rows.values[0] == -1.5


def test_lr_one_without_momentum_lands_on_the_mean_of_the_replicas() -> None:
    ours = OuterRows(3, OuterConfig(1.0, 0.0))
    ours.values[:] = [1, 2, 3]
    replicas = np.array([[2, 2, 2], [4, 0, 3]], np.float32)
    ours.step(0, 0, (ours.values - replicas).mean(axis=0))
    assert ours.values.tolist() == [3, 1, 2.5]


def test_a_run_keeps_its_settings_and_names_others() -> None:
    run = OuterConfig(0.7, RAMP, preset="muloco")
    assert run.take(run.text) == run
    assert OuterConfig(is_open=True).take(run.text)[:4] == run[:4]
    for config, message in (
        (OuterConfig(0.7, 0.9), "outer_momentum: 0.9.*0.5 at round 2, 0.9 at round 6"),
        (OuterConfig(0.6, RAMP), "outer_lr: 0.6"),
        (OuterConfig(0.7, RAMP, preset="diloco"), "preset: 'diloco'.*began with 'muloco'"),
        (OuterConfig(0.7, RAMP, Adam()), "outer: 'own-adam'.*'nesterov'"),
    ):
        with pytest.raises(ValidationError, match=message):
            config.take(run.text)


def test_a_rule_of_a_program_is_known_by_its_name() -> None:
    text = OuterConfig(rule=Adam()).text
    assert OuterConfig(rule=Adam()).take(text).rule.name == "own-adam"
    with pytest.raises(ValidationError, match="outer: None.*'own-adam'"):
        OuterConfig(is_open=True).take(text)
    for bad in ("lion", 3):
        with pytest.raises(ValidationError, match="outer"):
            read_rule(bad)  # type: ignore[arg-type]


def test_a_value_by_round_is_a_line_between_its_points() -> None:
    assert [value_at(RAMP, number) for number in (0, 2, 4, 6, 99)] == [0.5, 0.5, 0.7, 0.9, 0.9]
    assert value_at(0.3, 5) == 0.3
    assert show(RAMP) == "0.5 at round 2, 0.9 at round 6"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([(0, 0.5), (0, 0.6)], "a round after 0"),
        ([(0, 1.5)], "outer_momentum"),
        ([(-1, 0.5)], r"\(round, value\)"),
        ([0.5], r"\(round, value\)"),
        ([], "expected a number"),
        ("0.9", "outer_momentum"),
    ],
)
def test_a_value_by_round_that_does_not_fit_is_named(value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        read_by_round("outer_momentum", value, 1)


@settings(max_examples=100, deadline=None)
@given(shapes=SHAPES, parts=st.integers(1, 6))
def test_every_parameter_is_in_exactly_one_fragment(
    shapes: list[tuple[int, ...]], parts: int
) -> None:
    named = [(f"p{at}", shape) for at, shape in enumerate(shapes)]
    if parts > len(named):
        with pytest.raises(ValidationError, match="at most"):
            split(named, parts)
        return
    fragments = split(named, parts)
    spans = [span for each in fragments for span in each.spans]
    assert sorted((span.name, span.shape) for span in spans) == sorted(named)
    for each in fragments:
        edges = [(span.start, span.stop) for span in each.spans]
        assert [start for start, _ in edges] == [0, *(stop for _, stop in edges[:-1])]
        assert each.size == edges[-1][1]


def test_fragments_of_a_transformer_are_about_equal() -> None:
    layer = [(256, 768), (768,), (256, 256), (256,), (256, 1024), (1024,), (1024, 256), (256,)]
    named = [(f"{at}", shape) for at, shape in enumerate([(256, 256), *layer * 6])]
    sizes = [each.size for each in split(named, 4)]
    assert max(sizes) / min(sizes) < 1.1
