"""The start gate: when the ranks of a training may start."""

from __future__ import annotations

from atoll.core.spec import WorldSize


def may_start(able: int, world: WorldSize, *, is_grace_over: bool) -> bool:
    """Whether `able` ranks are enough: all of them together, or `min` after the start grace."""
    return able >= world.target or (is_grace_over and able >= world.min)
