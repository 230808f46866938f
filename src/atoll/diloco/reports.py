"""What the rounds of a replica cost and say: to its script, and to the control plane."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from atoll.agent.metrics import report_round
from atoll.core.errors import ValidationError
from atoll.core.rounds import ReportedRound, RoundCost, RoundFacts
from atoll.diloco.outer import OuterConfig
from atoll.diloco.round.effects import Offer
from atoll.diloco.round.objects import Manifest, Member
from atoll.diloco.times import PeriodTimes
from atoll.objectstore import Traffic

log = logging.getLogger("atoll.diloco")

# So many members tell the manifest; if all did, a round of 1,000 replicas would take 1,000 of them.
TELLERS = 3
_TOTALS = ("bytes_up", "bytes_down", "requests", "hidden_s", "blocked_s")


class RoundReport(NamedTuple):
    """What one round of a fragment cost, and which ranks were in it."""

    round: int
    fragment: int
    members: tuple[int, ...]
    weight: float
    bytes_up: int
    bytes_down: int
    requests: int
    hidden_s: float  # the store worked while the model trained
    blocked_s: float  # the model did not train
    steps: int = 0  # of this replica since the round before
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    is_ramp: bool = False  # a plain average of the warm-up
    train_s: float = 0.0  # of the steps since the round before, outside of rounds
    data_s: float | None = None  # the part of it that went into reading data; None if unknown


def make_report(
    manifest: Manifest,
    offer: Offer,
    used: Traffic,
    hidden_s: float,
    blocked_s: float,
    outer: OuterConfig,
    times: PeriodTimes,
) -> RoundReport:
    turn = outer.turn_at(manifest.round // manifest.fragments)
    return RoundReport(
        manifest.round // manifest.fragments,
        manifest.round % manifest.fragments,
        tuple(each.rank for each in manifest.members if read_bad(each.sums) is None),
        offer.weight,
        used.bytes_up,
        used.bytes_down,
        used.requests,
        hidden_s=hidden_s,
        blocked_s=blocked_s,
        steps=offer.steps,
        outer_lr=1.0 if turn is None else turn.lr,
        outer_momentum=0.0 if turn is None else turn.momentum,
        is_ramp=turn is None,
        train_s=times.train_s,
        data_s=times.data_s,
    )


def read_bad(sums: Mapping[str, str]) -> int | None:
    """The first parameter of a member's pseudo-gradient that is not finite."""
    text = sums.get("bad", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


class RoundReports:
    """The last reports, and totals of all of them."""

    def __init__(self, on_round: Callable[[RoundReport], None] | None) -> None:
        if on_round is not None and not callable(on_round):
            raise ValidationError("on_round", on_round, "expected a function of a RoundReport")
        self.last: deque[RoundReport] = deque(maxlen=10_000)
        names = ("rounds", *_TOTALS, "ramp_rounds", "ramp_bytes")
        self.totals = dict.fromkeys(names, 0.0)
        self._on_round = on_round

    def add(self, report: RoundReport) -> None:
        self.last.append(report)
        self.totals["rounds"] += 1
        for name in _TOTALS:
            self.totals[name] += getattr(report, name)
        if report.is_ramp:
            self.totals["ramp_rounds"] += 1
            self.totals["ramp_bytes"] += report.bytes_up + report.bytes_down
        log.info("%s", report)
        if self._on_round:
            self._on_round(report)


def facts_of(manifest: Manifest, run: str, at: float | None = None) -> RoundFacts:
    """What the manifest of a round says, as the control plane keeps it and shows it."""
    members, fragments = manifest.members, manifest.fragments
    return RoundFacts(
        run=run,
        fragment=manifest.round % fragments,
        fragments=fragments,
        round=manifest.round // fragments,
        members=[member.rank for member in members],
        weights=[member.weight for member in members],
        missing=sorted(manifest.missing),
        rejected=sorted({each.rank for each in manifest.refused}),
        bad=[member.rank for member in members if read_bad(member.sums) is not None],
        leaving=[member.rank for member in members if member.has_left],
        sizes=[_size_of(member, manifest.size) for member in members],
        tokens=sum(member.tokens for member in members),
        steps=max((member.steps for member in members), default=0),
        parameters=manifest.size or None,
        at=at,
    )


def _size_of(member: Member, values: int) -> int:
    """Bytes of an upload: codecs of fixed length need not tell them."""
    return sum(map(sum, member.sections)) or 4 * values


def send_round(
    report: RoundReport,
    manifest: Manifest,
    run: str,
    rank: int,
    process: int = 0,
    warnings: Sequence[str] = (),
) -> None:
    """The control plane, if there is one, learns what the round cost; the first process of some
    members also tells it the manifest."""
    try:
        cost = RoundCost(
            rank,
            report.bytes_up,
            report.bytes_down,
            report.requests,
            report.hidden_s,
            report.blocked_s,
            process,
            report.steps,
            report.train_s,
            report.data_s,
        )
        present = [member.rank for member in manifest.present]
        is_told = not process and rank in present[:TELLERS]
        facts = facts_of(manifest, run, time.time()) if is_told else None
        identity = (run, report.fragment, report.round)
        message = ReportedRound(*identity, cost, facts, warnings=list(warnings))
        report_round(msgspec.to_builtins(message))
    except Exception:  # it must never end a training
        log.warning("round %d is not reported", report.round, exc_info=True)


def announce(run: str, step: int, number: int, rank: int, *, is_end: bool = False) -> None:
    """Prints where a run resumes, or that it is at its end: once for a training, and for each
    replica that was restarted. On stderr, whatever the replica does with its own logging."""
    if rank == 0 or int(os.environ.get("ATOLL_ATTEMPT") or 0) > 0:
        message = f"resumed {run} at step {step}, round {number}"
        if is_end:
            message = f"{run} is already at its end (step {step}, round {number})"
        sys.stderr.write(f"atoll: {message}\n")
        sys.stderr.flush()
