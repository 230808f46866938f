"""Whether every host of a training can reach every other, by the reports of their agents. Pure.

The agent of a host probes all other hosts and reports how many it reaches, and by name only those
it does not. So N hosts cost the controller N reports, folded one at a time, and not N² pairs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from atoll.core.mesh import MeshState
from atoll.core.model import Model

FABRIC_DIR = "atoll/fabric"  # under it: hosts/<host>, roster, reports/<host>
NAMED = 32  # hosts that a report names; of more it gives only the number
PAIRS_SHOWN = 8
DEADLINE_S = 60.0  # after which ranks are let in with what there is


def agent_name(rank: int, host: str) -> str:
    """The name of the agent beside one rank, where each rank has its own: `rank-3@gpu-7`."""
    return f"rank-{rank}@{host}"


def host_of(agent: str) -> str:
    """The host of an agent; an agent that is alone on its host has the host's name."""
    return agent.rpartition("@")[2]


class HostRoster(Model, frozen=True):
    """The hosts that must reach each other, and where each one's agent listens."""

    version: int
    addresses: dict[str, tuple[str, int]]


class ReachReport(Model, frozen=True):
    """What one host's agent says about a roster; its newest report counts."""

    host: str
    roster: int
    reached: int
    unreached: int = 0
    named: list[str] = []  # the first few of the unreached


class MeshVerdict(NamedTuple):
    state: MeshState
    message: str


class Fabric:
    """The reports so far. Folding one in costs its length, judging costs that of the bad ones."""

    def __init__(self, roster: HostRoster | None = None) -> None:
        self._roster = roster
        self._reporters: set[str] = set()
        self._bad: dict[str, ReachReport] = {}

    @property
    def roster(self) -> HostRoster | None:
        return self._roster

    def enlist(self, roster: HostRoster) -> None:
        """From now on this roster counts, and reports on an older one do not."""
        if self._roster is None or roster.version > self._roster.version:
            self.__init__(roster)  # type: ignore[misc]

    def fold(self, report: ReachReport) -> None:
        """Take the report into account, unless it is about another roster or by a stranger."""
        roster = self._roster
        if roster is None or report.roster != roster.version:
            return
        if report.host not in roster.addresses:
            return
        others = len(roster.addresses) - 1
        self._reporters.add(report.host)
        # A peer that a report does not mention is not reached: the agent may have just begun.
        if report.reached >= others:
            self._bad.pop(report.host, None)
        else:
            self._bad[report.host] = report

    @property
    def is_whole(self) -> bool:
        """Every host has reported, and reached every other."""
        if self._roster is None or self._bad:
            return False
        return len(self._reporters) == len(self._roster.addresses)

    def judge(self, *, is_overdue: bool, missing: Collection[str] = ()) -> MeshVerdict:
        """Ready if whole; otherwise Pending, or Degraded once the deadline has passed.

        `missing` are hosts that are not on the roster yet, as their agents have not come up.
        """
        if self.is_whole and not missing:
            return MeshVerdict(MeshState.READY, "")
        state = MeshState.DEGRADED if is_overdue else MeshState.PENDING
        return MeshVerdict(state, self._message(sorted(missing)))

    def _message(self, missing: list[str]) -> str:
        if missing:
            return f"not all hosts have come up: no agent on {_few(missing)}"
        if self._roster is None:
            return "not all hosts have come up"
        parts = []
        if self._bad:
            parts.append(f"cannot talk: {self._pairs()}")
        silent = sorted(set(self._roster.addresses) - self._reporters)
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
        more = max(len(pairs) - PAIRS_SHOWN, 0) + unnamed
        return ", ".join(pairs[:PAIRS_SHOWN]) + (f" and {more} more" if more else "")


def _few(hosts: list[str]) -> str:
    more = len(hosts) - PAIRS_SHOWN
    return ", ".join(hosts[:PAIRS_SHOWN]) + (f" and {more} more" if more > 0 else "")
