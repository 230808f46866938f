"""What the manifest of a round says, as the control plane keeps it and shows it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from atoll.agent.metrics import report_round
from atoll.core.rounds import ReportedRound, RoundCost, RoundFacts
from atoll.diloco.allreduce.keys import parse_upload
from atoll.diloco.allreduce.layout import Layout
from atoll.diloco.allreduce.manifest import Manifest
from atoll.diloco.allreduce.note import MemberNote
from atoll.diloco.probe import read_bad
from atoll.diloco.replica_config import fragment_run
from atoll.diloco.reports import RoundReport

log = logging.getLogger("atoll.diloco")

# So many members tell the manifest; if all did, a round of 1,000 replicas would take 1,000 of them.
TELLERS = 3

_FRAGMENT = re.compile(r"(.+)\.(\d+)-of-(\d+)")


def fragment_of(run: str) -> tuple[str, int, int]:
    """The run, which fragment of it, and of how many, from the name of a fragment's own run."""
    match = _FRAGMENT.fullmatch(run)
    if match is None or int(match[2]) >= int(match[3]):
        return run, 0, 1
    return match[1], int(match[2]), int(match[3])


def facts_of(manifest: Manifest, at: float | None = None) -> RoundFacts:
    run, fragment, fragments = fragment_of(manifest.run)
    members = sorted(manifest.members, key=lambda member: member.rank)
    header = [member.header for member in members if isinstance(member.header, MemberNote)]
    blamed = {name.rank for upload in manifest.blamed if (name := parse_upload(upload))}
    return RoundFacts(
        run=run,
        fragment=fragment,
        fragments=fragments,
        round=manifest.round,
        attempt=manifest.attempt,
        members=[member.rank for member in members],
        weights=[member.weight for member in members],
        missing=sorted(manifest.missing),
        blamed=sorted(blamed - {member.rank for member in members}),
        bad=[member.rank for member in members if read_bad(member.note) is not None],
        gone=[member.rank for member in members if member.has_left],
        tokens=sum(each.tokens for each in header),
        steps=max((each.steps for each in header), default=0),
        parameters=_parameters(manifest.layout),
        at=at,
        error=manifest.error,
    )


def send_round(
    report: RoundReport,
    manifest: Manifest | None,
    rank: int,
    fragments: int,
    parameters: int,
    warnings: Sequence[str] = (),
) -> None:
    """The control plane, if there is one, learns what the round was and what it cost."""
    try:
        message = message_of(report, manifest, rank, fragments, parameters)
        report_round(msgspec.to_builtins(replace(message, warnings=list(warnings))))
    except Exception:  # it must never end a training
        log.warning("round %d is not reported", report.round, exc_info=True)


def message_of(
    report: RoundReport, manifest: Manifest | None, rank: int, fragments: int, parameters: int
) -> ReportedRound:
    """What this replica tells of a round; one without a store is alone in it."""
    cost = RoundCost(
        rank,
        report.bytes_up,
        report.bytes_down,
        report.requests,
        report.hidden_s,
        report.blocked_s,
    )
    if manifest is None:
        run = fragment_run(None, 0, 1)
        alone = RoundFacts(
            run=run,
            round=report.round,
            fragment=report.fragment,
            fragments=fragments,
            members=[rank],
            weights=[report.weight],
            parameters=parameters,
            at=time.time(),
        )
        return ReportedRound(run, report.fragment, report.round, cost, alone)
    present = sorted(member.rank for member in manifest.members if not member.has_left)
    facts = facts_of(manifest, time.time()) if rank in present[:TELLERS] else None
    return ReportedRound(fragment_of(manifest.run)[0], report.fragment, report.round, cost, facts)


@lru_cache(maxsize=32)
def _parameters(layout: bytes) -> int | None:
    if not layout:
        return None
    try:
        return Layout.unpack(layout).size
    except ValueError:
        return None
