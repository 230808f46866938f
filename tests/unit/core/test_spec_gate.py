"""When ranks may start: the rule that every executor shares."""

from __future__ import annotations

import pytest

from atoll.core.spec import WorldSize, may_start

# (ranks able to start, whether the start grace is over, whether they may)
CASES = [
    (4, False, True),
    (5, False, True),
    (3, False, False),
    (3, True, True),
    (2, True, True),
    (1, True, False),
    (0, True, False),
]


@pytest.mark.parametrize(("able", "is_grace_over", "expected"), CASES)
def test_all_together_or_min_after_the_grace(
    able: int, is_grace_over: bool, expected: bool
) -> None:
    world = WorldSize(min=2, target=4, max=8)
    assert may_start(able, world, is_grace_over=is_grace_over) is expected
