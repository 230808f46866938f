"""Whether every host of a training can reach every other, by the reports of their agents. Pure.

The agent of a host probes all other hosts and reports how many it reaches, and by name only those
it does not. So N hosts cost the controller N reports, folded one at a time, and not N² pairs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from atoll.core.mesh import MeshState
from atoll.core.model import Model

FABRIC_DIR = "atoll/fabric"  # under it: hosts/<host>, membership, reports/<host>
MAX_NAMED = 32  # hosts that a report names; of more it gives only the number
MAX_PAIRS = 8
DEADLINE_S = 60.0  # after which ranks are let in with what there is


def agent_name(rank: int, host: str) -> str:
    """The name of the agent beside one rank, where each rank has its own: `rank-3@gpu-7`."""
    return f"rank-{rank}@{host}"


def host_of(agent: str) -> str:
    """The host of an agent; an agent that is alone on its host has the host's name."""
    return agent.rpartition("@")[2]


class Membership(Model, frozen=True):
    """The hosts that must reach each other, and the address of each one's agent."""

    version: int
    addresses: dict[str, tuple[str, int]]


class ReachReport(Model, frozen=True):
    """The report of one host's agent about a membership; its newest report counts."""

    host: str
    membership: int
    reached: int
    unreached: int = 0
    named: list[str] = []  # the first few of the unreached


class MeshVerdict(NamedTuple):
    state: MeshState
    message: str


class Fabric:
    """The reports so far. Folding one in costs its length, judging costs that of the bad ones."""

    def __init__(self, membership: Membership | None = None) -> None:
        self._membership = membership
        self._reporters: set[str] = set()
        self._bad: dict[str, ReachReport] = {}

    @property
    def membership(self) -> Membership | None:
        return self._membership

    def enlist(self, membership: Membership) -> None:
        """Replaces the membership; reports on an older one no longer count."""
        if self._membership is None or membership.version > self._membership.version:
            self.__init__(membership)  # type: ignore[misc]

    def fold(self, report: ReachReport) -> None:
        """Adds the report, unless it is about another membership or from a host outside it."""
        membership = self._membership
        if membership is None or report.membership != membership.version:
            return
        if report.host not in membership.addresses:
            return
        others = len(membership.addresses) - 1
        self._reporters.add(report.host)
        # A peer that a report does not mention is not reached: the agent may have just begun.
        if report.reached >= others:
            self._bad.pop(report.host, None)
        else:
            self._bad[report.host] = report

    @property
    def is_complete(self) -> bool:
        """Every host has reported, and reached every other."""
        if self._membership is None or self._bad:
            return False
        return len(self._reporters) == len(self._membership.addresses)

    def judge(self, *, is_overdue: bool, missing: Collection[str] = ()) -> MeshVerdict:
        """Ready if whole; otherwise Pending, or Degraded once the deadline has passed.

        `missing` are hosts that are not members yet, as their agents have not come up.
        """
        if self.is_complete and not missing:
            return MeshVerdict(MeshState.READY, "")
        state = MeshState.DEGRADED if is_overdue else MeshState.PENDING
        return MeshVerdict(state, self._message(sorted(missing)))

    def _message(self, missing: list[str]) -> str:
        if missing:
            return f"not all hosts have come up: no agent on {_few(missing)}"
        if self._membership is None:
            return "not all hosts have come up"
        parts = []
        if self._bad:
            parts.append(f"cannot talk: {self._pairs()}")
        silent = sorted(set(self._membership.addresses) - self._reporters)
        if silent:
            parts.append(f"no word from {_few(silent)}")
        return "; ".join(parts)

    def _pairs(self) -> str:
        """Each pair once; `a -> b` where only that direction is known to fail."""
        ways = {(host, peer) for host, bad in self._bad.items() for peer in bad.named}
        pairs = []
        for a, b in sorted(ways):
            if (b, a) not in ways:
                pairs.append(f"{a} -> {b}")
            elif a < b:
                pairs.append(f"{a} <-> {b}")
        unnamed = sum(bad.unreached - len(bad.named) for bad in self._bad.values())
        more = max(len(pairs) - MAX_PAIRS, 0) + unnamed
        return ", ".join(pairs[:MAX_PAIRS]) + (f" and {more} more" if more else "")


def _few(hosts: list[str]) -> str:
    more = len(hosts) - MAX_PAIRS
    return ", ".join(hosts[:MAX_PAIRS]) + (f" and {more} more" if more > 0 else "")
