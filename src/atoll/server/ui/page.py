"""The data of a training's page. Its size is bounded, however many ranks there are."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from atoll.core.clock import Now
from atoll.core.describe import (
    describe_attempt,
    describe_cause,
    describe_exit,
    describe_ranks,
    is_stopped_by_atoll,
    ranks_with_same_failure,
    waiting_lines,
)
from atoll.core.executors import LOCAL
from atoll.core.model import Model
from atoll.core.phase import describe_reason
from atoll.core.ranks import attempts_of
from atoll.core.settings import MAX_DISPLAY_CHARS, parse_value, setting_text
from atoll.core.spec import BenchSpec, TrainingSpec
from atoll.core.status import (
    AttemptStatus,
    Condition,
    Exit,
    RankExit,
    RankStatus,
    Resize,
    Status,
    Training,
    WorldPoint,
    usage,
)
from atoll.core.text import escape_control, format_duration
from atoll.server.http.operations import redact
from atoll.server.ui.rows import TrainingRow, row_of

# The Python code and the shell command that start the same training again. Pure.
#
# Values of environment variables may be secrets: the code reads them from the environment of the
# person who runs it.

# Flags of `atoll run` by option of `deploy_distributed`; a test holds them to the command itself.
FLAGS = {
    "max_restarts": "--max-restarts",
    "deadline_s": "--deadline",
    "rendezvous_backend": "--rendezvous",
    "rendezvous_uri": "--uri",
    "run_id": "--run-id",
    "bench": "--bench",
    "bench_require_gbps": "--bench-require-gbps",
    "bench_placement": "--bench-placement",
    "executor": "--executor",
    "image": "--image",
    "cpu": "--cpu",
    "memory": "--memory",
    "gpu_count": "--gpus",
    "working_dir": "--workdir",
    "start_grace_s": "--start-grace",
    "stop_grace_s": "--stop-grace",
    "ttl_seconds": "--ttl",
    "stall_s": "--stall-timeout",
    "stall_restart": "--stall-restart",
    "mesh": "--mesh",
}
SECTIONS = {"resources": "", "rendezvous": "rendezvous_"}
# Fields without an option of their own: the name, what runs, and what the user does not set.
_NOT_OPTIONS = (
    "name",
    "display_name",
    "world_size",
    "command",
    "args",
    "source",
    "code",
    "bench",
    "cancel",
    *SECTIONS,
)


class Variable:
    """An environment variable, read where the code runs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"os.environ[{self.name!r}]"


def options_of(spec: TrainingSpec) -> dict[str, Any]:
    """The options of `deploy_distributed` that differ from their defaults, and what runs."""
    options: dict[str, Any] = {"command": spec.command, "world_size": spec.world_size}
    if spec.args:
        options["args"] = spec.args
    for section, prefix in SECTIONS.items():
        options |= _changed(getattr(spec, section), prefix)
    if spec.bench.mode != BenchSpec().mode:
        bench = _changed(spec.bench, "bench_")
        options |= {"bench": bench.pop("bench_mode"), **bench}
    changed = _changed(spec, "")
    options |= {name: value for name, value in changed.items() if name not in _NOT_OPTIONS}
    for name in ("env", "nccl_env"):
        if name in options:
            options[name] = {variable: Variable(variable) for variable in options[name]}
    if spec.code is None and spec.executor not in (None, LOCAL):
        options["code"] = False
    return options


def _changed(part: Any, prefix: str) -> dict[str, Any]:
    """The fields that differ from their defaults."""
    defaults = zip(part.__struct_fields__[::-1], part.__struct_defaults__[::-1], strict=False)
    usual = {name: getattr(default, "factory", lambda d=default: d)() for name, default in defaults}
    fields = {name: getattr(part, name) for name in part.__struct_fields__}
    return {
        prefix + name: value
        for name, value in fields.items()
        if name not in usual or value != usual[name]
    }


def python_of(spec: TrainingSpec, name: str) -> str:
    """A call of `deploy_distributed`; empty if the client sent the code itself."""
    if spec.source is not None:
        return ""
    lines = [f"    {option}={_literal(value)}," for option, value in options_of(spec).items()]
    call = ["training = atoll.Client().deploy_distributed(", f"    {name!r},", *lines, ")"]
    needs_os = any(isinstance(value, dict) for value in options_of(spec).values())
    return "\n".join([*(["import os"] if needs_os else []), "import atoll", "", *call])


def _literal(value: Any) -> str:
    """A Python literal; structs of the spec are names of `atoll`."""
    return f"atoll.{value!r}" if hasattr(value, "__struct_fields__") else repr(value)


def shell_of(spec: TrainingSpec, name: str) -> str:
    """A call of `atoll run`; empty if that has no option for some field of the spec."""
    if spec.source is not None:
        return ""
    options, size = options_of(spec), spec.world_size
    command = [*options.pop("command"), *options.pop("args", ())]
    del options["world_size"]
    argv = ["--name", name, "-n", str(size.target)]
    argv += ["--min", str(size.min), "--max", str(size.max)]
    if options.pop("code", True) is False:
        argv.append("--no-code")
    for variable in options.pop("env", ()):
        argv += ["--env", variable]
    for package in options.pop("pip_packages", ()):
        argv += ["--pip", package]
    for label, text in options.pop("labels", {}).items():
        argv += ["--label", f"{label}={text}"]
    for setting, value in options.pop("settings", {}).items():
        if parse_value(setting_text(value)) != value:
            return ""
        argv += ["--set", f"{setting}={setting_text(value)}"]
    for option, value in options.items():
        if option not in FLAGS:
            return ""
        argv += [FLAGS[option]] if value is True else [FLAGS[option], str(value)]
    # A terminal would act on pasted control characters instead of passing them on.
    text = "".join([*argv, *command]).replace("\n", "").replace("\t", "")
    if escape_control(text) != text:
        return ""
    return shlex.join(["atoll", "run", *argv, "--", *command])


MAX_LINES = 128  # twice what the page draws as lanes; larger worlds are sent as one letter a rank
MAX_ODD_LINES = 50  # rows of a table that people still read
MAX_ENTRIES = 8  # of the timeline: they fit beside the cause without scrolling
RESIZES = 20  # marks that a chart can show side by side
PLAIN_ENDS = ("Completed", "Error")  # the exit code says the same
LETTERS = {"Pending": "P", "Running": "R", "Succeeded": "S", "Failed": "F", "Stopped": "C"}


class EarlierAttempt(Model, frozen=True, omit_defaults=False):
    """An attempt of a rank that has a successor."""

    attempt: int
    started_at: float | None
    ended_at: float | None
    message: str


class RankLine(Model, frozen=True, omit_defaults=False):
    """One rank on the page."""

    rank: int
    phase: str
    host: str
    message: str
    short: str  # the message for a narrow column; empty until the rank has ended
    restarts: int
    attempt: int
    started_at: float | None
    ended_at: float | None
    is_first: bool = False  # the first rank that failed
    is_stalled: bool = False
    previous: str = ""
    previous_at: float | None = None
    earlier: list[EarlierAttempt] = []
    provider: str = ""
    region: str = ""
    unit: str = ""  # its pod, job or process
    pid: int | None = None  # while it runs


class CauseCard(Model, frozen=True, omit_defaults=False):
    """The rank that failed first, and what is known about it."""

    rank: int
    headline: str
    exit: str
    host: str
    neighbours: str  # the other ranks on that host
    before: str
    at: float | None
    tail: list[str]


class TimelineEntry(Model, frozen=True, omit_defaults=False):
    """One line of what led to the state of a training."""

    at: float
    kind: str  # running, failed, cancelled, succeeded or pending
    text: str
    is_first: bool = False


class MetricName(Model, frozen=True, omit_defaults=False):
    name: str
    ranks: int  # how many ranks report it


class TrainingPage(Model, frozen=True, omit_defaults=False):
    row: TrainingRow
    now: float
    world_max: int
    created_at: float
    rank_seconds: float
    cause: CauseCard | None
    waiting: list[str]
    warnings: list[str]  # problems of the training that do not stop it
    timeline: list[TimelineEntry]
    tally: dict[str, int]
    ranks: list[RankLine]
    odd_ranks: int  # that failed, wait or restarted; with `cells`, `ranks` has the first of them
    cells: str  # one letter a rank, where `ranks` does not have all of them
    world: list[WorldPoint]
    conditions: list[Condition]
    resizes: list[Resize]
    metrics: list[MetricName]
    has_store: bool  # whether this control plane stores metrics
    spec: dict[str, object]
    command: str
    shell: str  # the command that starts the same training; empty where `atoll run` cannot
    python: str


def page_of(
    training: Training,
    time: Now,
    attempts: Sequence[AttemptStatus] = (),
    metrics: Sequence[MetricName] | None = (),
) -> TrainingPage:
    """`attempts` are those that have a successor. `metrics` is None where none are stored."""
    status = training.status
    lines = rank_lines(status, attempts)
    again = f"{training.display_name[: MAX_DISPLAY_CHARS - 2]}-2"
    odd, is_large = _odd_lines(lines), len(lines) > MAX_LINES
    return TrainingPage(
        row=row_of(training),
        now=time.wall,
        world_max=training.spec.world_size.max,
        created_at=training.created_at,
        rank_seconds=usage(training, time).rank_seconds,
        cause=cause_card(training),
        waiting=_waiting(status),
        warnings=[escape_control(message) for message in status.warnings],
        timeline=timeline_of(training),
        tally=_tally(status),
        ranks=odd[:MAX_ODD_LINES] if is_large else lines,
        odd_ranks=len(odd),
        cells="".join(map(_letter, lines)) if is_large else "",
        world=list(status.world_size_history),
        conditions=list(status.conditions),
        resizes=_resizes(status.world_size_history),
        metrics=list(metrics or ()),
        has_store=metrics is not None,
        spec=spec_of(training),
        command=_command(training),
        shell=shell_of(training.spec, again),
        python=python_of(training.spec, again),
    )


def _letter(line: RankLine) -> str:
    """One letter for the state of a rank; `r` is one that runs after a restart."""
    return "r" if line.phase == "Running" and line.restarts else LETTERS.get(line.phase, "?")


def _resizes(world: Sequence[WorldPoint]) -> list[Resize]:
    return [
        Resize(from_target=before.target, to_target=after.target, at=after.at)
        for before, after in pairwise(world)
        if before.target != after.target
    ][-RESIZES:]


def rank_lines(status: Status, attempts: Sequence[AttemptStatus] = ()) -> list[RankLine]:
    earlier: dict[int, list[EarlierAttempt]] = {}
    known = attempts_of(status, attempts)
    for one, after in zip(known, known[1:], strict=False):
        if after.rank == one.rank:  # else it is the newest of its rank
            earlier.setdefault(one.rank, []).append(_earlier(one))
    first = None if status.root_cause is None else status.root_cause.rank
    exits = {ended.rank: ended for ended in status.rank_exits}
    ranks = sorted((*status.ranks, *status.removed_ranks), key=lambda rank: rank.rank)
    return [
        replace(
            _line(rank, exits.get(rank.rank), is_first=rank.rank == first),
            earlier=earlier.get(rank.rank, []),
            is_stalled=rank.is_alive and rank.rank in status.stalled,
        )
        for rank in ranks
    ]


def _earlier(one: AttemptStatus) -> EarlierAttempt:
    return EarlierAttempt(
        attempt=one.attempt,
        started_at=one.started_at,
        ended_at=one.ended_at,
        message=describe_attempt(one)[:200],
    )


def _line(rank: RankStatus, ended: RankExit | None, *, is_first: bool) -> RankLine:
    final = ended if ended is not None else rank.exit
    at = None if final is None else final.ended_at if isinstance(final, RankExit) else final.at
    message = escape_control(rank.message) if final is None else describe_exit(final)
    return RankLine(
        rank=rank.rank,
        phase=rank.phase,
        host=rank.node or "",
        message=message[:300],
        short="" if final is None else _short(final),
        restarts=rank.restarts,
        attempt=rank.attempt,
        started_at=rank.started_at,
        ended_at=at,
        is_first=is_first,
        provider=rank.provider or "",
        region=rank.region or "",
        unit=rank.pod_name,
        pid=rank.pid if rank.is_alive else None,
        previous="" if rank.previous_exit is None else describe_exit(rank.previous_exit)[:200],
        previous_at=None if rank.previous_exit is None else rank.previous_exit.at,
    )


def _short(ended: Exit | RankExit) -> str:
    """`exit 137 OOMKilled`, `exit 0`."""
    if isinstance(ended, RankExit):
        code, reason = ended.exit_code, ended.termination_reason
    else:
        code, reason = ended.code, ended.reason
    if code is None:
        return "end unknown"
    detail = "" if reason in PLAIN_ENDS else reason or ""
    return escape_control(f"exit {code} {detail}".strip())[:40]


def _odd_lines(lines: Sequence[RankLine]) -> list[RankLine]:
    """Ranks that failed, wait or restarted, in this order."""

    def order(line: RankLine) -> tuple[bool, int, int]:
        kinds = {"Failed": 0, "Pending": 1}
        return not line.is_first, kinds.get(line.phase, 2 if line.restarts else 3), line.rank

    odd = [line for line in lines if line.phase in ("Failed", "Pending") or line.restarts]
    return sorted(odd, key=order)


def cause_card(training: Training) -> CauseCard | None:
    status, cause = training.status, training.status.root_cause
    if cause is None:
        return None
    why = escape_control(describe_reason(cause.termination_reason, cause.message))
    headline = f"Rank {cause.rank}: {why}" if why else f"Rank {cause.rank} {describe_exit(cause)}"
    if len(ranks_with_same_failure(status)) > 1:
        headline = _capital(describe_cause(status))
    code = "unknown" if cause.exit_code is None else str(cause.exit_code)
    parts = [code, cause.signal or "", cause.termination_reason]
    times = cause.restart_count
    after = f"; after {times} restart{'' if times == 1 else 's'}" if times else ""
    ranks = (*status.ranks, *status.removed_ranks)
    neighbours = [
        r.rank for r in ranks if cause.host and r.node == cause.host and r.rank != cause.rank
    ]
    return CauseCard(
        rank=cause.rank,
        headline=headline,
        exit=f"{', '.join(part for part in parts if part)}{after}",
        host=cause.host or "",
        neighbours=describe_ranks(neighbours) if neighbours else "",
        before=_before(status, cause),
        at=cause.ended_at,
        tail=[escape_control(line) for line in (*cause.log_tail, *cause.stack)],
    )


def _before(status: Status, cause: RankExit) -> str:
    resize = status.last_resize
    if resize is not None and cause.ended_at is not None and resize.at <= cause.ended_at:
        span = format_duration(cause.ended_at - resize.at)
        return f"scaled {resize.from_target} → {resize.to_target}, {span} earlier"
    if cause.started_at is not None and cause.ended_at is not None:
        return f"it had run for {format_duration(cause.ended_at - cause.started_at)}"
    return ""


def timeline_of(training: Training) -> list[TimelineEntry]:
    """What led to the present state, in order, as at most `MAX_ENTRIES` entries and one more."""
    status = training.status
    lines: list[TimelineEntry] = []
    if status.started_at is not None:
        size = training.spec.world_size.target
        text = f"The first of {size} ranks started" if size > 1 else "Rank 0 started"
        lines.append(TimelineEntry(at=status.started_at, kind="running", text=text))
    if status.last_resize is not None:
        resize = status.last_resize
        text = f"Scaled {resize.from_target} → {resize.to_target}"
        lines.append(TimelineEntry(at=resize.at, kind="running", text=text))
    restarted = [r for r in status.ranks if r.previous_exit is not None]
    for message, ranks in _group_by_message(
        [(describe_exit(r.previous_exit), r.rank) for r in restarted if r.previous_exit]
    ):
        at = min(r.previous_exit.at for r in restarted if r.rank in ranks and r.previous_exit)
        text = f"{_who(ranks, message)}, and {'was' if len(ranks) == 1 else 'were'} started again"
        lines.append(TimelineEntry(at=at, kind="failed", text=text))
    cause, similar = status.root_cause, set(ranks_with_same_failure(status))
    if cause is not None and cause.ended_at is not None:
        text = f"Rank {cause.rank} {describe_exit(cause)}"
        if len(similar) > 1:
            text = _capital(describe_cause(status))
        lines.append(TimelineEntry(at=cause.ended_at, kind="failed", text=text, is_first=True))
    others = [e for e in status.rank_exits if e.rank not in similar]
    for kind, ended in (
        ("failed", [e for e in others if e.is_failure and not is_stopped_by_atoll(e)]),
        ("cancelled", [e for e in others if is_stopped_by_atoll(e)]),
        ("succeeded", [e for e in others if not e.is_failure]),
    ):
        exits = [("" if kind == "cancelled" else describe_exit(e), e.rank) for e in ended]
        for message, ranks in _group_by_message(exits):
            times = [e.ended_at for e in ended if e.rank in set(ranks) and e.ended_at is not None]
            if times:
                text = _who(ranks, message or "was stopped by atoll")
                lines.append(TimelineEntry(at=min(times), kind=kind, text=text))
    lines.sort(key=lambda line: line.at)
    if len(lines) > MAX_ENTRIES:
        first = next((at for at, line in enumerate(lines) if line.is_first), len(lines) - 1)
        begin = max(0, min(first - MAX_ENTRIES // 2, len(lines) - MAX_ENTRIES))
        dropped = len(lines) - MAX_ENTRIES
        lines = lines[begin : begin + MAX_ENTRIES]
        more = f"and {dropped} more: see the events"
        lines.append(TimelineEntry(at=lines[-1].at, kind="pending", text=more))
    return lines


def _who(ranks: Sequence[int], message: str) -> str:
    """`Rank 3 was killed`, `Ranks 3-5 were killed`."""
    if len(ranks) > 1 and message.startswith("was "):
        message = f"were {message.removeprefix('was ')}"
    return f"{_capital(describe_ranks(ranks))} {message}"


def _group_by_message(pairs: Sequence[tuple[str, int]]) -> list[tuple[str, list[int]]]:
    groups: dict[str, list[int]] = {}
    for message, rank in pairs:
        groups.setdefault(message, []).append(rank)
    return list(groups.items())


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _waiting(status: Status) -> list[str]:
    """What ranks wait for: each message once, with the ranks that wait."""
    return [] if status.phase.is_terminal else [*map(_capital, waiting_lines(status.ranks))]


def _tally(status: Status) -> dict[str, int]:
    if not status.rank_exits:
        return dict(Counter(rank.phase.lower() for rank in status.ranks))
    kinds = [_kind_of_exit(ended) for ended in status.rank_exits]
    return {
        "failed": sum(kind == "failed" for kind in kinds),
        "stopped by atoll": sum(kind == "stopped" for kind in kinds),
        "exited 0": sum(kind == "exited" for kind in kinds),
        "unknown": sum(kind == "unknown" for kind in kinds),
    }


def _kind_of_exit(ended: RankExit) -> str:
    if is_stopped_by_atoll(ended):
        return "stopped"
    if ended.exit_code is None:
        return "unknown"
    return "failed" if ended.is_failure else "exited"


def spec_of(training: Training) -> dict[str, Any]:
    import msgspec

    spec: dict[str, Any] = msgspec.to_builtins(redact(training).spec)
    return spec


def _command(training: Training) -> str:
    import shlex

    spec = training.spec
    if spec.source is not None:
        return escape_control(f"<{spec.source.kind} {spec.source.filename}>")
    return escape_control(shlex.join([*(spec.command or ()), *spec.args]))
