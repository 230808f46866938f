"""Whether every host of a training can reach every other, told from their reports. Pure.

Each host's agent probes all the others and reports only whom it cannot reach, and how many it can.
So N hosts cost the controller N reports, folded one at a time, and not N² pairs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from atoll.core.mesh import MeshState
from atoll.core.model import Model

FABRIC_DIR = "atoll/fabric"  # under it: hosts/<host>, roster, reports/<host>
NAMED = 32  # hosts a report names; beyond that only their number is told
PAIRS_SHOWN = 8
DEADLINE_S = 60.0  # after which ranks are let in with what there is


def agent_name(rank: int, host: str) -> str:
    """Of the agent beside one rank, where ranks have one each: `rank-3@gpu-7`."""
    return f"rank-{rank}@{host}"


def host_of(agent: str) -> str:
    """The host an agent speaks for; one that speaks for a host alone is named as it is."""
    return agent.rpartition("@")[2]


class HostRoster(Model, frozen=True):
    """The hosts that must reach each other, and where each one's agent listens."""

    version: int
    addresses: dict[str, tuple[str, int]]


class ReachReport(Model, frozen=True):
    """What one host's agent can say of a roster; the newest one counts."""

    host: str
    roster: int
    reached: int
    unreached: int = 0
    named: list[str] = []  # the first few of the unreached


class MeshVerdict(NamedTuple):
    state: MeshState
    message: str


class Fabric:
    """Reports folded so far. Folding one costs its own length, judging costs the bad ones'."""

    def __init__(self, roster: HostRoster | None = None) -> None:
        self._roster = roster
        self._heard: set[str] = set()
        self._bad: dict[str, ReachReport] = {}

    @property
    def roster(self) -> HostRoster | None:
        return self._roster

    def enlist(self, roster: HostRoster) -> None:
        """From now on this roster counts, and reports on an older one do not."""
        if self._roster is None or roster.version > self._roster.version:
            self.__init__(roster)  # type: ignore[misc]

    def fold(self, report: ReachReport) -> None:
        roster = self._roster
        if roster is None or report.roster != roster.version:
            return
        if report.host not in roster.addresses:
            return
        others = len(roster.addresses) - 1
        # Silence about a peer is not reaching it: an agent that has only begun is not done.
        if report.reached >= others:
            self._heard.add(report.host)
            self._bad.pop(report.host, None)
        else:
            self._heard.add(report.host)
            self._bad[report.host] = report

    @property
    def is_whole(self) -> bool:
        """Every host has reported, and reached every other."""
        roster = self._roster
        return roster is not None and not self._bad and len(self._heard) == len(roster.addresses)

    def judge(self, *, is_overdue: bool, missing: Collection[str] = ()) -> MeshVerdict:
        """Ready if whole; otherwise Pending, or Degraded once the deadline has passed.

        `missing` are hosts not on the roster yet, as their agents have not come up.
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
        silent = sorted(set(self._roster.addresses) - self._heard)
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
