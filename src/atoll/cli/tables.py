"""Trainings as tables for people."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from shutil import get_terminal_size

from atoll.cli import show
from atoll.cli.report import end_report
from atoll.core.describe import describe_attempt
from atoll.core.escape import escape_control
from atoll.core.metrics import LatestMetric
from atoll.core.rounds import ShownTraining
from atoll.core.status import AttemptStatus, Event, RankExit, RankStatus, Training
from atoll.core.warnings import CONDITION as WARNINGS

PS = ("NAME", "PHASE", "READY", "RAN", "AGE", "COMMAND")
RANKS = ("RANK", "PHASE", "HOST", "RESTARTS", "RAN", "MESSAGE")
EXITS = ("RANK", "EXIT", "REASON", "RESTARTS", "COLLATERAL")
ATTEMPTS = ("RANK", "ATTEMPT", "STARTED", "RAN", "HOST", "END")
EVENTS = ("TIME", "TYPE", "REASON", "MESSAGE")


def ps_table(
    trainings: list[Training], newest_metrics: Mapping[str, LatestMetric] | None = None
) -> str:
    """With a column for the figure that they are sorted by, if there is one."""
    names = {metric.name for metric in (newest_metrics or {}).values()}
    if len(names) != 1 or newest_metrics is None:
        return show.table(PS, _ps_rows(trainings))
    header = [*PS[:-1], escape_control(names.pop()).upper(), PS[-1]]
    rows = [
        (*row[:-1], metric_cell(newest_metrics.get(training.uid)), row[-1])
        for training, row in zip(trainings, _ps_rows(trainings), strict=True)
    ]
    return show.table(header, rows)


def metric_cell(metric: LatestMetric | None) -> str:
    return "-" if metric is None else f"{float(metric.value):.6g}"


def _ps_rows(trainings: list[Training]) -> list[tuple[str, ...]]:
    now, width = time.time(), max(get_terminal_size((120, 24)).columns // 2, 30)
    return [
        (
            t.name,
            show.phase_cell(t),
            show.ready_cell(t),
            show.ran_cell(t, now),
            show.duration(max(0.0, now - t.created_at)),
            show.shortened(show.command_text(t), width),
        )
        for t in trainings
    ]


def _rounds(training: Training, now: float) -> list[str]:
    """How far the outer rounds are, and since when nothing moved."""
    summary = training.rounds if isinstance(training, ShownTraining) else None
    if summary is None:
        return []
    lines = [summary.words]
    if summary.tokens:
        lines.append(f"{summary.tokens:.6g} tokens seen")
    if summary.moved_at is not None:
        moved = show.duration(max(0.0, now - summary.moved_at))
        lines.append(f"the last one at {show.clock(summary.moved_at)}, {moved} ago")
    if summary.source == "reports":
        lines.append("as the replicas report")
    return lines


def status_text(training: Training) -> str:
    status, size, now = training.status, training.spec.world_size, time.time()
    lines = [
        f"{training.name}  {show.phase_cell(training)}  {show.ready_cell(training)} ready",
        f"  world     min {size.min}, target {size.target}, max {size.max}",
        f"  command   {show.shortened(show.command_text(training), 200)}",
        f"  created   {show.clock(training.created_at)}, ran {show.ran_cell(training, now)}",
    ]
    if status.message and not status.phase.is_terminal:
        lines.append(f"  now       {escape_control(status.message)}")
    lines += [f"  rounds    {line}" for line in _rounds(training, now)]
    for condition in status.conditions:
        is_told = condition.type == WARNINGS and status.phase.is_terminal  # by the end report
        if condition.status == "True" and condition.message and not is_told:
            lines.append(f"  condition {condition.type}: {escape_control(condition.message)}")
    if status.phase.is_terminal:
        first, *rest = end_report(training).split("\n")
        lines += [f"  end       {first.removeprefix(training.name + ' ')}"]
        lines += [f"          {line}" for line in rest]
        if status.rank_exits:
            lines += ["", exits_table(training)]
    elif status.ranks:
        lines += ["", ranks_table(training, now)]
    return "\n".join(lines)


def ranks_table(training: Training, now: float) -> str:
    rows = [
        (str(r.rank), r.phase, r.node or "-", str(r.restarts), alive_for(r, now), r.message)
        for r in training.status.ranks
    ]
    return show.table(RANKS, rows)


def alive_for(rank: RankStatus, now: float) -> str:
    if rank.started_at is None or not rank.is_alive:
        return "-"
    return show.duration(max(0.0, now - rank.started_at))


def attempts_table(attempts: Sequence[AttemptStatus], now: float) -> str:
    rows = [
        (
            str(one.rank),
            str(one.attempt),
            "-" if one.started_at is None else show.clock(one.started_at),
            _attempt_ran(one, now),
            one.host or "-",
            _attempt_end(one),
        )
        for one in attempts
    ]
    return show.table(ATTEMPTS, rows)


def _attempt_ran(one: AttemptStatus, now: float) -> str:
    if one.started_at is None:
        return "-"
    until = now if one.ended_at is None else one.ended_at
    return show.duration(max(0.0, until - one.started_at))


def _attempt_end(one: AttemptStatus) -> str:
    if one.ended_at is None:
        return "running" if one.started_at is not None else "-"
    return describe_attempt(one)


def exits_table(training: Training) -> str:
    rows = [
        (
            str(ended.rank),
            _exit_cell(ended),
            ended.termination_reason,
            str(ended.restart_count),
            "yes" if ended.collateral else "-",
        )
        for ended in training.status.rank_exits
    ]
    return show.table(EXITS, rows)


def _exit_cell(ended: RankExit) -> str:
    code = "unknown" if ended.exit_code is None else str(ended.exit_code)
    return f"{code} {ended.signal}" if ended.signal else code


def events_table(events: Sequence[Event]) -> str:
    rows = [
        (
            show.clock(event.at),
            event.type,
            event.reason,
            event.message + (f" ({event.count} times)" if event.count > 1 else ""),
        )
        for event in events
    ]
    return show.table(EVENTS, rows)
