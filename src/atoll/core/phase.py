"""The phase machine: one table of rules, first match wins, and finality as its only memory."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from atoll.core.reasons import PhaseReason


class Phase(StrEnum):
    """Where a training is. `""` before the first status."""

    NONE = ""
    PENDING = "pending"
    READY = "ready"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL


TERMINAL = frozenset({Phase.SUCCEEDED, Phase.FAILED, Phase.CANCELLED})

# The promise to clients; terminal phases have no way out.
EDGES: dict[Phase, frozenset[Phase]] = {
    Phase.NONE: frozenset({Phase.PENDING, Phase.READY}) | TERMINAL,
    Phase.PENDING: frozenset({Phase.READY}) | TERMINAL,
    Phase.READY: frozenset({Phase.PENDING}) | TERMINAL,
    Phase.SUCCEEDED: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.CANCELLED: frozenset(),
}


class Tally(NamedTuple):
    """A world counted: all that the phase depends on."""

    min: int
    wanted: int  # ranks of the target that have not failed for good
    ready: int  # of those, running or exited 0
    succeeded: int  # of those, exited 0
    alive: int  # processes of any rank not known to be gone
    is_failing: bool  # a decision to fail was taken; ranks are being stopped
    is_cancelling: bool
    is_gate_open: bool


class Rule(NamedTuple):
    when: Callable[[Tally], bool]
    phase: Phase
    reason: str


class Verdict(NamedTuple):
    phase: Phase
    reason: str


# Row order is policy. A training ends only when nothing of it is alive, so a terminal phase
# means that every exit is known and no process is left. The last row always matches.
RULES = (
    Rule(lambda t: t.is_failing and t.alive == 0, Phase.FAILED, PhaseReason.RANK_FAILED),
    Rule(
        lambda t: t.succeeded == t.wanted and t.wanted >= t.min and t.alive == 0 and t.is_gate_open,
        Phase.SUCCEEDED,
        PhaseReason.ALL_RANKS_EXITED,
    ),
    Rule(lambda t: t.is_cancelling and t.alive == 0, Phase.CANCELLED, PhaseReason.CANCEL_REQUESTED),
    Rule(lambda t: t.is_failing, Phase.PENDING, PhaseReason.FAILING),
    Rule(lambda t: t.is_cancelling, Phase.PENDING, PhaseReason.CANCELLING),
    Rule(lambda t: t.ready >= t.min, Phase.READY, PhaseReason.QUORUM_REACHED),
    Rule(lambda t: not t.is_gate_open, Phase.PENDING, PhaseReason.WAITING_FOR_CAPACITY),
    Rule(lambda t: True, Phase.PENDING, PhaseReason.BELOW_MINIMUM),
)


def advance(current: Phase, tally: Tally) -> Verdict | None:
    """The verdict after `tally`, or None where `current` is terminal and nothing may change."""
    if current.is_terminal:
        return None
    rule = next(rule for rule in RULES if rule.when(tally))
    return Verdict(rule.phase, rule.reason)


def diagram() -> str:
    """The machine as a Mermaid state diagram, printed from the table."""
    lines = ["stateDiagram-v2"]
    for start, ends in EDGES.items():
        for end in sorted(ends):
            lines.append(f"    {start or '[*]'} --> {end}")
    lines += [f"    {phase} --> [*]" for phase in sorted(TERMINAL)]
    return "\n".join(lines)
