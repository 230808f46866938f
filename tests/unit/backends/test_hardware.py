"""Which hardware holds a rank, from the table of a service."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.backends.hardware import gpu_for, rows
from atoll.core.errors import ValidationError
from atoll.core.spec import Resources

TABLE = [
    *rows("A100", 40, {1: "a-40", 8: "a-40x8"}),
    *rows("A100", 80, {8: "a-80x8"}),
    *rows("T4", 16, {1: "t", 4: "tx4"}),
]


@pytest.mark.parametrize(
    ("needs", "usual", "name"),
    [
        ({}, "A100", None),
        ({"gpu_count": 1}, None, None),
        ({"gpu_count": 1}, "T4", "t"),
        ({"gpu_count": 2, "gpu_models": ["a100"]}, None, "a-40x8"),
        ({"gpu_count": 1, "gpu_models": ["A100"], "min_gpu_memory_gb": 41}, None, "a-80x8"),
        ({"gpu_count": 5, "gpu_models": ["T4", "A100"]}, None, "a-40x8"),
        ({"gpu_count": 1, "gpu_models": ["T4", "A100"], "min_gpu_memory_gb": 20}, None, "a-40"),
    ],
)
def test_the_first_that_fits(needs: dict[str, Any], usual: str | None, name: str | None) -> None:
    assert gpu_for(Resources(**needs), TABLE, "Acme", usual) == name


@pytest.mark.parametrize(
    ("needs", "words"),
    [
        ({"gpu_models": ["T4"]}, "gpu_models: .*expected gpu_count above 0 too"),
        ({"gpu_count": 1, "gpu_models": ["A10"]}, "gpu_models: 'A10' .*did you mean 'A100'"),
        ({"gpu_count": 1, "gpu_models": ["X"]}, "Acme has no such GPU: expected one of A100, T4"),
        ({"gpu_count": 9, "gpu_models": ["T4", "A100"]}, "gpu_count: 9 .*at most 8 T4 or A100"),
        (
            {"gpu_count": 1, "gpu_models": ["T4"], "min_gpu_memory_gb": 17},
            "min_gpu_memory_gb: 17 .*no T4 of Acme has so much",
        ),
    ],
)
def test_what_the_service_lacks_is_named(needs: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        gpu_for(Resources(**needs), TABLE, "Acme")
