"""The outer step on rows: torch's numbers, whatever the parts it is taken in."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.diloco.round.outer import OuterRows
from atoll.diloco.terms import OuterTerms


def test_any_parts_in_any_order_give_the_bits_of_one_step() -> None:
    means = np.random.default_rng(0).standard_normal((4, 200_001)).astype(np.float32)
    whole, parts = (OuterRows(200_001, OuterTerms(0.7, 0.9)) for _ in range(2))
    for round, mean in enumerate(means):
        whole.step(round, 0, mean)
        for start in (150_000, 0, 70_000):
            stop = {150_000: 200_001, 0: 70_000, 70_000: 150_000}[start]
            parts.step(round, start, mean[start:stop])
    for name, row in whole.rows.items():
        assert np.array_equal(row, parts.rows[name])


def test_the_numbers_are_those_of_torch() -> None:
    torch = pytest.importorskip("torch")
    means = np.random.default_rng(0).standard_normal((5, 1000)).astype(np.float32)
    rows = OuterRows(1000, OuterTerms(0.7, 0.9))
    parameter = torch.nn.Parameter(torch.zeros(1000))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for round, mean in enumerate(means):
        rows.step(round, 0, mean)
        parameter.grad = torch.from_numpy(mean.copy())
        optimizer.step()
    np.testing.assert_allclose(rows.values, parameter.detach().numpy(), rtol=0, atol=5e-6)


def test_schedules_count_the_turns_of_a_fragment() -> None:
    terms = OuterTerms(((0, 1.0), (1, 0.5)), 0.0)
    rows = OuterRows(1, terms, fragments=3)
    ones = np.ones(1, np.float32)
    rows.step(2, 0, ones)
    assert rows.values[0] == -1.0
    rows.step(5, 0, ones)
    assert rows.values[0] == -1.5
