"""Trainings as tables for people."""

from __future__ import annotations

import time
from collections.abc import Sequence
from shutil import get_terminal_size

from atoll.cli import show
from atoll.cli.report import end_report
from atoll.core.escapes import visible
from atoll.core.status import Event, RankExit, RankStatus, Training

PS = ("NAME", "PHASE", "READY", "RAN", "AGE", "COMMAND")
RANKS = ("RANK", "PHASE", "HOST", "RESTARTS", "RAN", "MESSAGE")
EXITS = ("RANK", "EXIT", "REASON", "RESTARTS", "COLLATERAL")
EVENTS = ("TIME", "TYPE", "REASON", "MESSAGE")


def ps_table(trainings: list[Training]) -> str:
    now, width = time.time(), max(get_terminal_size((120, 24)).columns // 2, 30)
    rows = [
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
    return show.table(PS, rows)


def status_text(training: Training) -> str:
    status, size, now = training.status, training.spec.world_size, time.time()
    lines = [
        f"{training.name}  {show.phase_cell(training)}  {show.ready_cell(training)} ready",
        f"  world     min {size.min}, target {size.target}, max {size.max}",
        f"  command   {show.shortened(show.command_text(training), 200)}",
        f"  created   {show.clock(training.created_at)}, ran {show.ran_cell(training, now)}",
    ]
    if status.message and not status.phase.is_terminal:
        lines.append(f"  now       {visible(status.message)}")
    for condition in status.conditions:
        if condition.status == "True" and condition.message:
            lines.append(f"  condition {condition.type}: {visible(condition.message)}")
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
        (str(r.rank), r.phase, r.node or "-", str(r.restarts), _alive_for(r, now), r.message)
        for r in training.status.ranks
    ]
    return show.table(RANKS, rows)


def _alive_for(rank: RankStatus, now: float) -> str:
    if rank.started_at is None or not rank.is_alive:
        return "-"
    return show.duration(max(0.0, now - rank.started_at))


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
