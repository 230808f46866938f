"""Output of commands: tables and sentences for people, JSON with stable keys for programs."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from pathlib import PurePath
from typing import Any
from unicodedata import combining, east_asian_width

import msgspec

from atoll.cli.terminal import PHASE_COLOURS, Coloured, can_redraw, paint, wants_colour
from atoll.core.describe import (
    TAIL_LINES,
    describe_attempt,
    describe_end,
    describe_others,
    describe_ranks,
)
from atoll.core.executors import executor_problem
from atoll.core.metrics import MACHINE, LatestMetric
from atoll.core.phase import ConditionType, Phase
from atoll.core.ranks import has_replica_per_rank
from atoll.core.rounds import TrainingWithRounds, describe_counts
from atoll.core.select import AGGREGATES, Selection
from atoll.core.settings import (
    GROUP,
    MAX_LABEL_CHARS,
    Setting,
    describe_settings,
    setting_text,
)
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
    ConditionType.BELOW_MINIMUM,
    ConditionType.RANKS_LOST,
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
    """The columns of a terminal that it takes: two for a character of Chinese, none for an accent
    that is a character of its own."""
    text = cell if "\x1b" not in cell else cell.split("m", 1)[1].removesuffix("\x1b[0m")
    if text.isascii():
        return len(text)
    wide = sum(east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(map(bool, map(combining, text)))


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


MAX_SETTINGS_CHARS = 1000  # of all settings of a training: a screen
MIN_COMMAND_CHARS = 20  # the program, and a part of what it got
PS = ("NAME", "PHASE", "READY", "RAN", "AGE", "COMMAND")
RANKS = ("RANK", "PHASE", "HOST", "PID", "RESTARTS", "RAN", "MESSAGE")
EXITS = ("RANK", "EXIT", "REASON", "RESTARTS", "COLLATERAL")
ATTEMPTS = ("RANK", "ATTEMPT", "STARTED", "RAN", "HOST", "END")
EVENTS = ("TIME", "TYPE", "REASON", "MESSAGE")


def ps_table(trainings: list[Training]) -> str:
    """With one row for each group, where its first training would be."""
    rows = [
        _ps_row(each[0]) if not name else _group_row(name, each)
        for name, each in _by_group(trainings)
    ]
    return _fitting_table(dict(zip(PS, zip(*rows, strict=True), strict=True)) if rows else {})


def _fitting_table(columns: Mapping[str, Sequence[str]]) -> str:
    """The columns, of PS without any, with commands as long as the terminal is wide."""
    if PS[-1] in columns:
        before = sum(_column_width(*each) for each in columns.items() if each[0] != PS[-1])
        available = max(_terminal_columns() - before, MIN_COMMAND_CHARS)
        commands = [
            text if isinstance(text, Coloured) else shorten(text, available)
            for text in columns[PS[-1]]
        ]
        columns = {**columns, PS[-1]: commands}
    return table(tuple(columns) or PS, list(zip(*columns.values(), strict=True)))


def _column_width(heading: str, cells: Sequence[str]) -> int:
    """With the space behind it."""
    return max(map(_width, (heading, *map(_safe, cells)))) + 2


def _terminal_columns() -> int:
    from shutil import get_terminal_size  # imported here: it loads slowly

    return get_terminal_size((120, 24)).columns


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
    opened = escape_control(f"atoll ps --group {shlex_quote(name)}")
    return name, counts, f"{ready}/{target}", "-", age, Coloured(opened)  # to be typed: not cut


def shlex_quote(text: str) -> str:
    import shlex  # imported here: it loads slowly

    return shlex.quote(text)


def ps_json(training: Training, metrics: Mapping[str, LatestMetric]) -> dict[str, Any]:
    values = {name: full(metric) for name, metric in metrics.items()}
    return training_json(training) | ({"metrics": values} if values else {})


def experiment_table(
    trainings: Sequence[Training],
    metrics: Mapping[str, Mapping[str, LatestMetric]],
    selection: Selection | None = None,
    *,
    has_settings: bool,
) -> str:
    """One row for each training, with a column for each metric and each setting that varies, and
    for what the selection names.

    A terminal has the columns that it has space for, and a line that counts the others.
    """
    rows = [*map(_ps_row, trainings)]
    columns = dict(zip(PS[:-1], zip(*rows, strict=True), strict=False))
    optional: list[str] = []  # headings, those to be left out last come first
    named_settings, named_metrics = _named(selection or Selection())
    if has_settings:
        for name in dict.fromkeys((*named_settings, *varied_settings(trainings))):
            heading = _heading(name, "setting", columns)
            columns[heading] = tuple(_setting_cell(each, name) for each in trainings)
            optional += [] if name in named_settings else [heading]
    for name in dict.fromkeys(name for each in metrics.values() for name in each):
        kinds = named_metrics.get(name)
        if kinds is None and name.startswith(MACHINE):
            continue  # `atoll top` has the use of machines
        for kind in dict.fromkeys(("last", *(kinds or ()))):
            heading = _heading(name if kind == "last" else f"{kind} {name}", "last", columns)
            columns[heading] = tuple(
                metric_cell(metrics.get(each.uid, {}).get(name), kind) for each in trainings
            )
            optional += [heading] if kinds is None else []
    note = ""
    if can_redraw(sys.stdout) and (hidden := _too_wide(columns, optional)):
        columns = {heading: cells for heading, cells in columns.items() if heading not in hidden}
        note = f"\n{count_of(len(hidden), 'more column')} in a wider terminal, or with --json"
    if not has_settings:
        columns[PS[-1]] = tuple(row[-1] for row in rows)
    return _fitting_table(columns if trainings else {}) + note


def _named(selection: Selection) -> tuple[list[str], dict[str, list[str]]]:
    """Settings, and metrics with their aggregates, that its conditions and its order name."""
    settings = [each.name for each in selection.settings]
    metrics: dict[str, list[str]] = {}
    for kind, each in selection.metrics:
        metrics.setdefault(each.name, []).append(kind)
    if (sort := selection.sort) is not None and sort.kind in AGGREGATES:
        metrics.setdefault(sort.name, []).append(sort.kind)
    elif sort is not None and sort.kind == "setting":
        settings.append(sort.name)
    return settings, metrics


def _too_wide(columns: Mapping[str, Sequence[str]], optional: Sequence[str]) -> set[str]:
    """Those of the optional columns that a terminal has no space for."""
    widths = {heading: _column_width(heading, cells) for heading, cells in columns.items()}
    total = sum(widths.values()) - 2
    hidden: set[str] = set()
    for heading in reversed(optional):
        if total <= _terminal_columns():
            break
        hidden.add(heading)
        total -= widths[heading]
    return hidden


def _heading(name: str, kind: str, taken: Container[str]) -> str:
    """The name in capitals, with what it is of before it where another column has that heading: a
    program may have a setting `name`, or report the `lr` that it was given."""
    heading = escape_control(name).upper()
    while heading in taken:
        heading = f"{kind.upper()} {heading}"
    return heading


def varied_settings(trainings: Sequence[Training]) -> list[str]:
    """Names of settings that are not the same in all of these trainings, those of sweeps first; of
    one training, those that it was started with beside its command.

    What ranks report does not vary because some have not reported it.
    """
    if len(trainings) == 1:
        return [*trainings[0].spec.settings]
    values: dict[str, list[Setting]] = {
        name: [] for training in trainings for name in training.spec.settings
    }
    is_typed: set[str] = set()
    for training in trainings:
        for name, value in training.settings.items():
            values.setdefault(name, []).append(value)
            if name not in training.status.settings:
                is_typed.add(name)
    return [
        name
        for name, each in values.items()
        if any(value != each[0] for value in each)
        or (len(each) < len(trainings) and name in is_typed)
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
    now = time.time()
    return (
        name_cell(training),
        phase_cell(training),
        ready_cell(training),
        ran_cell(training, now),
        format_duration(max(0.0, now - training.created_at)),
        command_cell(training),
    )


def name_cell(training: Training) -> str:
    """The name as it was given, or the label where that would make a table too wide."""
    name = training.display_name
    return name if len(name) <= MAX_LABEL_CHARS else training.name


def command_cell(training: Training) -> str:
    """The command, without the folder of its Python: `python train.py --lr 0.1`."""
    text = command_text(training)
    first, has_more, others = text.partition(" ")
    program = PurePath(first).name
    return f"{program} {others}" if has_more and program.startswith("python") else text


def _rounds(training: Training, now: float) -> list[str]:
    """How far the outer rounds are, and since when nothing moved."""
    summary = training.rounds if isinstance(training, TrainingWithRounds) else None
    if summary is None:
        return []
    lines = [summary.message, *(each.message for each in summary.slow)]
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
        lines += _settings_lines(escape_control(describe_settings(settings)))
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


def _settings_lines(text: str) -> list[str]:
    """On one line; on a terminal broken between settings."""
    import textwrap  # imported here: it loads slowly

    width = max(_terminal_columns() - 12, 40) if can_redraw(sys.stdout) else MAX_SETTINGS_CHARS
    wrapped = textwrap.wrap(
        shorten(text, MAX_SETTINGS_CHARS), width, break_long_words=False, break_on_hyphens=False
    )
    return [f"  {'' if at else 'settings':<8}  {line}" for at, line in enumerate(wrapped)]


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
    if status.stalled and not is_stopping:
        text += f", stalled: {describe_ranks(sorted(status.stalled))}"
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
    own = {*counts, *(ended.rank for ended in training.status.rank_exits)}
    # A run that was resumed has rounds of earlier trainings, and of ranks that this one has not.
    counts |= {each.rank: each.rounds for each in summary.ranks if each.rank in own}
    if set(counts.values()) == {summary.rounds}:
        return []
    run = f"run {training.spec.run_id}: " if training.spec.run_id else ""
    return [
        f"{run}rounds that each rank took part in, of {summary.rounds}: {describe_counts(counts)}"
    ]


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
