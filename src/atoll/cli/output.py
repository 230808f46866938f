"""Output of commands: tables and sentences for people, JSON with stable keys for programs."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from atoll.cli.terminal import PHASE_COLOURS, Coloured, paint, wants_colour
from atoll.core.describe import (
    TAIL_LINES,
    describe_attempt,
    describe_end,
    describe_others,
    describe_ranks,
)
from atoll.core.executors import executor_problem
from atoll.core.metrics import LatestMetric
from atoll.core.phase import ConditionType, Phase
from atoll.core.ranks import has_replica_per_rank
from atoll.core.rounds import TrainingWithRounds, describe_counts
from atoll.core.select import Sort
from atoll.core.settings import GROUP, describe_settings, setting_text
from atoll.core.status import AttemptStatus, BenchStatus, Event, RankExit, RankStatus, Training
from atoll.core.text import escape_control, format_duration

_INTERNAL_FIELDS = (
    "discardedAttempts",
    "failing",
    "failingMessage",
    "desiredAt",
    "isReleased",
    "gateOpenedAt",
)


# Conditions that the report on the end of a training repeats.
END_REPORT = (
    ConditionType.WARNINGS,
    ConditionType.COMPLETE,
    ConditionType.SUCCEEDED,
    ConditionType.FAILED,
    ConditionType.CANCELLED,
)


def print_json(value: Any) -> None:
    """Print one line and flush it: a reader of a stream waits for it."""
    print(msgspec.json.encode(full(value)).decode(), flush=True)


def full(value: Any) -> Any:
    """The value as on the wire, but with every key: unset fields are null."""
    if isinstance(value, msgspec.Struct):
        fields = msgspec.structs.fields(value)
        return {f.encode_name: full(getattr(value, f.name)) for f in fields}
    if isinstance(value, dict):
        return {key: full(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [full(item) for item in value]
    return value


def training_json(training: Training) -> dict[str, Any]:
    """One training as one flat object: identity, status, world and spec."""
    spec, status = full(training.spec), full(training.status)
    for name in _INTERNAL_FIELDS:
        status.pop(name, None)
    source = training.spec.source
    spec["source"] = None if source is None else {"kind": source.kind, "filename": source.filename}
    return {
        "name": training.display_name,
        "namespace": training.namespace,
        "uid": training.uid,
        "generation": training.generation,
        "resourceVersion": training.resource_version,
        "createdAt": training.created_at,
        **status,
        "world": world_json(training),
        "labels": training.spec.labels,
        "settings": training.settings,
        "rounds": full(getattr(training, "rounds", None)),
        "spec": spec,
    }


def world_json(training: Training) -> dict[str, Any]:
    """`ready` as observed, the rest from the spec: a scale shows at once."""
    world: dict[str, Any] = full(training.world)
    return world


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are as wide as needed; colours do not count as width.

    No cell can break it: control characters are printed as text.
    """
    lines = [[*header], *([*map(_safe, row)] for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell + " " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


def _safe(cell: str) -> str:
    return cell if isinstance(cell, Coloured) else escape_control(cell)


def _width(cell: str) -> int:
    return len(cell) if "\x1b" not in cell else len(cell.split("m", 1)[1].removesuffix("\x1b[0m"))


def phase_cell(training: Training) -> str:
    phase = training.status.phase.value or "new"
    colour = PHASE_COLOURS.get(phase)
    cell = paint(phase, colour, wants_colour(sys.stdout)) if colour else phase
    if where := executor_problem(training):
        cell = Coloured(f"{cell} (executor {where.removeprefix('Executor').lower()})")
    return cell


def ready_cell(training: Training) -> str:
    return f"{training.status.world.ready}/{training.spec.world_size.target}"


def ran_cell(training: Training, now: float) -> str:
    seconds = training.status.ran_for(now)
    return "-" if seconds is None else format_duration(seconds)


def format_time(at: float) -> str:
    """Local time; with the date when it is not today's."""
    then = time.localtime(at)
    today = time.localtime()[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M:%S", then)


def command_text(training: Training) -> str:
    """The command of a training, on one line."""
    import shlex

    spec = training.spec
    if spec.source is not None:
        return escape_control(f"<{spec.source.kind} {spec.source.filename}>")
    return escape_control(shlex.join([*(spec.command or ()), *spec.args]))


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def count_of(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def print_note(text: str) -> None:
    """Print a message of atoll to stderr; the output of ranks goes to stdout."""
    print(f"atoll: {escape_control(text)}", file=sys.stderr, flush=True)


PS = ("NAME", "PHASE", "READY", "RAN", "AGE", "COMMAND")
RANKS = ("RANK", "PHASE", "HOST", "PID", "RESTARTS", "RAN", "MESSAGE")
EXITS = ("RANK", "EXIT", "REASON", "RESTARTS", "COLLATERAL")
ATTEMPTS = ("RANK", "ATTEMPT", "STARTED", "RAN", "HOST", "END")
EVENTS = ("TIME", "TYPE", "REASON", "MESSAGE")


def ps_table(trainings: list[Training]) -> str:
    """With one row for each group, where its first training would be."""
    return table(
        PS,
        [
            _ps_row(each[0]) if not name else _group_row(name, each)
            for name, each in _by_group(trainings)
        ],
    )


def _by_group(trainings: Sequence[Training]) -> list[tuple[str, list[Training]]]:
    """Groups and their trainings; what is in no group is alone, under no name."""
    groups: dict[str, list[Training]] = {}
    for training in trainings:
        name = training.spec.labels.get(GROUP)
        groups.setdefault(f"group {name}" if name else training.uid, []).append(training)
    return [(each[0].spec.labels.get(GROUP, ""), each) for each in groups.values()]


def _group_row(name: str, trainings: Sequence[Training]) -> tuple[str, ...]:
    phases = Counter(training.status.phase.value or "new" for training in trainings)
    counts = ", ".join(f"{count} {phase}" for phase, count in sorted(phases.items()))
    ready = sum(training.status.world.ready for training in trainings)
    target = sum(training.spec.world_size.target for training in trainings)
    age = format_duration(max(0.0, time.time() - min(each.created_at for each in trainings)))
    opened = f"{count_of(len(trainings), 'training')}: atoll ps --group {shlex_quote(name)}"
    return name, counts, f"{ready}/{target}", "-", age, opened


def shlex_quote(text: str) -> str:
    import shlex  # imported here: it loads slowly

    return shlex.quote(text)


def ps_json(training: Training, metrics: Mapping[str, LatestMetric]) -> dict[str, Any]:
    values = {name: full(metric) for name, metric in metrics.items()}
    return training_json(training) | ({"metrics": values} if values else {})


def experiment_table(
    trainings: Sequence[Training],
    metrics: Mapping[str, Mapping[str, LatestMetric]],
    sort: Sort | None = None,
    *,
    has_settings: bool,
) -> str:
    """One row for each training, with a column for each metric and each setting that varies."""
    columns = dict(zip(PS[:-1], zip(*map(_ps_row, trainings), strict=True), strict=False))
    if has_settings:
        for name in varied_settings(trainings):
            columns[_heading(name)] = tuple(_setting_cell(each, name) for each in trainings)
    names = dict.fromkeys(name for each in metrics.values() for name in each)
    for name in names:
        for kind in ("last", sort.kind) if sort and sort.name == name else ("last",):
            heading = _heading(name if kind == "last" else f"{kind} {name}")
            columns[heading] = tuple(
                metric_cell(metrics.get(each.uid, {}).get(name), kind) for each in trainings
            )
    if not has_settings:
        columns[PS[-1]] = tuple(_ps_row(each)[-1] for each in trainings)
    header = tuple(columns) or PS
    return table(header, list(zip(*columns.values(), strict=True)) if trainings else [])


def _heading(name: str) -> str:
    return escape_control(name).upper()


def varied_settings(trainings: Sequence[Training]) -> list[str]:
    """Names of settings that are not the same in all of these trainings; of one, all."""
    settings = [training.settings for training in trainings]
    names = dict.fromkeys(name for each in settings for name in each)
    first = settings[0] if settings else {}
    return [
        name
        for name in names
        if len(settings) == 1 or any(each.get(name) != first.get(name) for each in settings)
    ]


def _setting_cell(training: Training, name: str) -> str:
    value = training.settings.get(name)
    return "-" if value is None else shorten(setting_text(value), 30)


def metric_cell(metric: LatestMetric | None, kind: str = "last") -> str:
    if metric is None:
        return "-"
    value = {"min": metric.min, "max": metric.max}.get(kind, metric.value)
    return f"{float(value):.6g}"


def _ps_row(training: Training) -> tuple[str, ...]:
    from shutil import get_terminal_size  # imported here: it loads slowly

    now, width = time.time(), max(get_terminal_size((120, 24)).columns // 2, 30)
    return (
        training.display_name,
        phase_cell(training),
        ready_cell(training),
        ran_cell(training, now),
        format_duration(max(0.0, now - training.created_at)),
        shorten(command_text(training), width),
    )


def _rounds(training: Training, now: float) -> list[str]:
    """How far the outer rounds are, and since when nothing moved."""
    summary = training.rounds if isinstance(training, TrainingWithRounds) else None
    if summary is None:
        return []
    lines = [summary.message]
    if summary.tokens:
        lines.append(f"{summary.tokens:.6g} tokens")
    if summary.moved_at is not None:
        moved = format_duration(max(0.0, now - summary.moved_at))
        lines.append(f"the last one at {format_time(summary.moved_at)}, {moved} ago")
    if summary.source == "reports":
        lines.append("as the replicas report")
    return lines


def status_text(training: Training) -> str:
    status, size, now = training.status, training.spec.world_size, time.time()
    lines = [
        f"{training.display_name}  {phase_cell(training)}  {ready_cell(training)} ready",
        f"  world     min {size.min}, target {size.target}, max {size.max}",
        f"  command   {shorten(command_text(training), 200)}",
        f"  created   {format_time(training.created_at)}, ran {ran_cell(training, now)}",
    ]
    if labels := training.spec.labels:
        lines.append(f"  labels    {escape_control(describe_settings(labels))}")
    if settings := training.settings:
        text = shorten(escape_control(describe_settings(settings)), 1000)
        lines.append(f"  settings  {text}")
    if status.message and not status.phase.is_terminal:
        lines.append(f"  now       {escape_control(status.message)}")
    lines += [f"  rounds    {line}" for line in _rounds(training, now)]
    for condition in status.conditions:
        is_in_report = status.phase.is_terminal and condition.type in END_REPORT
        if condition.status == "True" and condition.message and not is_in_report:
            lines.append(f"  condition {condition.type}: {escape_control(condition.message)}")
    if status.phase.is_terminal:
        first, *details = end_report(training).split("\n")
        lines += [f"  end       {first.removeprefix(training.display_name + ' ')}"]
        lines += [f"          {line}" for line in details]
        if status.rank_exits:
            lines += ["", exits_table(training)]
    elif status.ranks:
        lines += ["", ranks_table(training, now)]
    return "\n".join(lines)


def ranks_table(training: Training, now: float) -> str:
    rows = [
        (
            str(r.rank),
            r.phase,
            r.node or "-",
            str(r.pid) if r.pid and r.is_alive else "-",
            str(r.restarts),
            alive_for(r, now),
            r.message,
        )
        for r in training.status.ranks
    ]
    return table(RANKS, rows)


def alive_for(rank: RankStatus, now: float) -> str:
    if rank.started_at is None or not rank.is_alive:
        return "-"
    return format_duration(max(0.0, now - rank.started_at))


def attempts_table(attempts: Sequence[AttemptStatus], now: float) -> str:
    rows = [
        (
            str(one.rank),
            str(one.attempt),
            "-" if one.started_at is None else format_time(one.started_at),
            _attempt_ran(one, now),
            one.host or "-",
            _attempt_end(one),
        )
        for one in attempts
    ]
    return table(ATTEMPTS, rows)


def _attempt_ran(one: AttemptStatus, now: float) -> str:
    if one.started_at is None:
        return "-"
    until = now if one.ended_at is None else one.ended_at
    return format_duration(max(0.0, until - one.started_at))


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
    return table(EXITS, rows)


def _exit_cell(ended: RankExit) -> str:
    code = "unknown" if ended.exit_code is None else str(ended.exit_code)
    return f"{code} {ended.signal}" if ended.signal else code


def bench_text(name: str, diagnostics: BenchStatus) -> str:
    from atoll.core.chart import link_bars

    message, result = escape_control(diagnostics.message or diagnostics.phase), diagnostics.result
    if result is None:
        return f"{name}: no result: {message}"
    rows = {
        "bus bandwidth, p10": (result.busbw_gbps_p10, "Gbit/s"),
        "bus bandwidth, p50": (result.busbw_gbps_p50, "Gbit/s"),
        "bus bandwidth, p90": (result.busbw_gbps_p90, "Gbit/s"),
        "algorithm bandwidth, p50": (result.algbw_gbps_p50, "Gbit/s"),
        "latency at 1 MiB": (result.latency_us_at_1mib, "us"),
    }
    lines = [f"{name}: {message}"]
    for label, (value, unit) in rows.items():
        lines.append(f"  {label:<26}{'not measured' if value is None else f'{value:.3g} {unit}'}")
    return "\n".join([*lines, link_bars(result.points).rstrip("\n")])


def events_table(events: Sequence[Event]) -> str:
    rows = [
        (
            format_time(event.at),
            event.type,
            event.reason,
            event.message + (f" ({event.count} times)" if event.count > 1 else ""),
        )
        for event in events
    ]
    return table(EVENTS, rows)


def world_text(training: Training) -> str:
    """`ready 4/4 (min 2), 1 restart`."""
    status, size = training.status, training.spec.world_size
    is_stopping = bool(status.failing) or status.reason == "Cancelling"
    phase = "stopping" if is_stopping else status.phase.value or "stored"
    text = f"{phase} {status.world.ready}/{size.target}"
    if size.min != size.target:
        text += f" (min {size.min})"
    restarts = sum(rank.restarts for rank in status.ranks)
    lost = [r.rank for r in status.ranks if r.phase == "Failed"]
    waits = [f"rank {r.rank} {r.message}" for r in status.ranks if r.phase == "Pending"]
    if restarts:
        text += f", {count_of(restarts, 'restart')}"
    if lost:
        text += f", lost: {describe_ranks(lost)}"
    if executor_problem(training):
        text += f", {escape_control(status.message)}"
    elif waits and not is_stopping and not waits[0].endswith((" ", " starting")):
        text += f", {escape_control(waits[0])}"
    return text


def participation_lines(training: Training) -> list[str]:
    """In how many outer rounds each rank took part, if not all were in every one."""
    summary = training.rounds if isinstance(training, TrainingWithRounds) else None
    if summary is None or not has_replica_per_rank(training, len(summary.ranks)):
        return []
    counts = dict.fromkeys(range(training.spec.world_size.target), 0)
    counts |= {each.rank: each.rounds for each in summary.ranks}
    if set(counts.values()) == {summary.rounds}:
        return []
    return [f"rounds taken part in, of {summary.rounds}: {describe_counts(counts)}"]


def end_report(training: Training, *, has_tail: bool = True) -> str:
    """How a training ended, and for a failure the other failed ranks and the last lines."""
    cause = training.status.root_cause
    lines = [describe_end(training)]
    lines += [f"  warning: {escape_control(warning)}" for warning in training.status.warnings]
    lines += [f"  {line}" for line in participation_lines(training)]
    if training.status.phase is not Phase.FAILED or cause is None:
        return "\n".join(lines)
    lines += [f"  {line}" for line in describe_others(training.status)]
    if not has_tail:
        pass
    elif cause.log_tail:
        lines.append(f"  last lines of rank {cause.rank}:")
        lines += [f"  | {escape_control(line)}" for line in cause.log_tail[-TAIL_LINES:]]
    else:
        lines.append(f"  rank {cause.rank} printed nothing")
    if cause.stack:
        lines.append(f"  where rank {cause.rank} was:")
        lines += [f"  | {escape_control(line)}" for line in cause.stack]
    return "\n".join(lines)
