"""Output of commands: tables and sentences for people, JSON with stable keys for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from atoll.cli.terminal import PHASE_COLOURS, Painted, paint, wants_colour
from atoll.core.escape import escape_control
from atoll.core.executors import absence
from atoll.core.status import Training

_NOT_SHOWN = (
    "discardedAttempts",
    "failing",
    "failingMessage",
    "desiredAt",
    "isReleased",
    "gateOpenedAt",
)


def print_json(value: Any) -> None:
    """Prints one line and flushes it: a reader of a stream waits for it."""
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
    for name in _NOT_SHOWN:
        status.pop(name, None)
    source = training.spec.source
    spec["source"] = None if source is None else {"kind": source.kind, "filename": source.filename}
    return {
        "name": training.name,
        "namespace": training.namespace,
        "uid": training.uid,
        "generation": training.generation,
        "resourceVersion": training.resource_version,
        "createdAt": training.created_at,
        **status,
        "world": world_json(training),
        "rounds": full(getattr(training, "rounds", None)),
        "spec": spec,
    }


def world_json(training: Training) -> dict[str, Any]:
    """`ready` as observed, the rest from the spec: a scale shows at once."""
    world: dict[str, Any] = full(training.world)
    return world


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are as wide as needed; colours do not count as width.

    No cell can break it: control characters are shown as text.
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
    return cell if isinstance(cell, Painted) else escape_control(cell)


def _width(cell: str) -> int:
    return len(cell) if "\x1b" not in cell else len(cell.split("m", 1)[1].removesuffix("\x1b[0m"))


def phase_cell(training: Training) -> str:
    phase = training.status.phase.value or "new"
    colour = PHASE_COLOURS.get(phase)
    cell = paint(phase, colour, wants_colour(sys.stdout)) if colour else phase
    if where := absence(training):
        cell = Painted(f"{cell} (executor {where.removeprefix('Executor').lower()})")
    return cell


def ready_cell(training: Training) -> str:
    return f"{training.status.world.ready}/{training.spec.world_size.target}"


def duration(seconds: float) -> str:
    """`0.4s`, `12s`, `3m05s`, `2h10m`, `3d04h`."""
    whole = int(seconds)
    if seconds < 10:
        return f"{seconds:.1f}s"
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole // 60 % 60:02}m"
    return f"{whole // 86_400}d{whole // 3600 % 24:02}h"


def ran_cell(training: Training, now: float) -> str:
    seconds = training.status.ran_for(now)
    return "-" if seconds is None else duration(seconds)


def clock(at: float) -> str:
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


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 0)] + "…"


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def says(text: str) -> None:
    """Prints a remark of atoll to stderr, apart from the output of the ranks."""
    print(f"atoll: {escape_control(text)}", file=sys.stderr, flush=True)
