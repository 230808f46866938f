from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from atoll.core.errors import ValidationError
from atoll.diloco.outer import Fragment, Slot, load_bytes, to_bytes
from atoll.diloco.terms import RULES, OuterTerms, read_by_round, read_rule, show, value_at

RAMP = ((2, 0.5), (6, 0.9))


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


def fragment(**terms: Any) -> Fragment:
    made = Fragment([Slot("w", (8,), 0, 8)])
    made.terms = OuterTerms(**terms)
    return made


def test_momentum_by_round_is_that_of_torch_set_each_round() -> None:
    ours, rng = fragment(lr=0.7, beta=RAMP), np.random.default_rng(0)
    theirs = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([theirs], lr=0.7, momentum=0.5, nesterov=True)
    for number in range(9):
        gradient = rng.standard_normal(8).astype(np.float32)
        optimizer.param_groups[0]["momentum"] = value_at(RAMP, number)
        theirs.grad = torch.from_numpy(gradient)
        optimizer.step()
        ours.step(gradient)
    np.testing.assert_allclose(ours.values, theirs.detach().numpy(), rtol=0, atol=1e-5)


def test_the_rule_sgd_is_that_of_torch() -> None:
    ours = fragment(lr=0.5, beta=0.9, rule=RULES["sgd"])
    theirs = torch.nn.Parameter(torch.zeros(8))
    optimizer = torch.optim.SGD([theirs], lr=0.5, momentum=0.9)
    for _ in range(5):
        theirs.grad = torch.arange(8.0)
        optimizer.step()
        ours.step(np.arange(8, dtype=np.float32))
    np.testing.assert_allclose(ours.values, theirs.detach().numpy(), rtol=1e-6)


class Half:
    """A rule of a program: half of the mean, whatever the settings."""

    name = "half"

    def step(self, values: Any, momentum: Any, gradient: Any, lr: float, beta: float) -> None:
        values -= np.float32(0.5) * gradient


def test_a_run_keeps_its_terms_and_names_others() -> None:
    saved = to_bytes(fragment(lr=0.7, beta=RAMP, preset="pier"))
    same, free = fragment(lr=0.7, beta=RAMP, preset="pier"), fragment(is_open=True)
    load_bytes(same, saved)
    load_bytes(free, saved)
    assert free.terms[:4] == same.terms[:4]
    for terms, message in (
        ({"lr": 0.7, "beta": 0.9}, "outer_momentum: 0.9.*0.5 at round 2, 0.9 at round 6"),
        ({"lr": 0.6, "beta": RAMP}, "outer_lr: 0.6"),
        ({"lr": 0.7, "beta": RAMP, "preset": "diloco"}, "preset: 'diloco'.*began with 'pier'"),
        ({"lr": 0.7, "beta": RAMP, "rule": Half()}, "outer: 'half'.*'nesterov'"),
    ):
        with pytest.raises(ValidationError, match=message):
            load_bytes(fragment(**terms), saved)


def test_a_rule_of_a_program_is_known_by_its_name() -> None:
    saved = to_bytes(fragment(rule=read_rule(Half())))
    load_bytes(fragment(rule=Half()), saved)
    with pytest.raises(ValidationError, match="outer: None.*'half'"):
        load_bytes(fragment(is_open=True), saved)
    for bad in ("adam", 3):
        with pytest.raises(ValidationError, match="outer"):
            read_rule(bad)  # type: ignore[arg-type]
