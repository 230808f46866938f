"""How notebooks show trainings, worlds, exits, log lines and errors. Pure.

Text from ranks is untrusted: it is escaped, and control characters are made visible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from atoll.core.text import escape_control

if TYPE_CHECKING:
    from atoll.core.metrics import LatestMetric
    from atoll.core.status import LogLine, RankExit, RankStatus, Training, WorldStatus

T = TypeVar("T")

# As `html.escape` does; its module takes longer to import than all of this.
MARKUP = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#x27;"})

COLOURS = {
    "pending": "#935a00",
    "ready": "#1259bd",
    "succeeded": "#04796a",
    "failed": "#c0304f",
    "cancelled": "#5f6975",
}
SHAPES = {"pending": "◌", "ready": "●", "succeeded": "✓", "failed": "✕", "cancelled": "⊟"}
# A notebook keeps its output in the file: a table that fills a screen or two, not megabytes.
MAX_RANKS = 16
MAX_ROWS = 60
MAX_LINES = 500
MAX_FRAMES = 5  # of a traceback: the user's own calls, the innermost last
ALL_FRAMES = "(all frames: import sys, traceback; traceback.print_exception(sys.last_value))"
_PACKAGE = __file__.rsplit("/", 2)[0]  # the directory of atoll


class HtmlList(list[T]):
    """A list that notebooks show as a table."""

    def __init__(self, items: Iterable[T], html: Callable[[Sequence[T]], str]) -> None:
        super().__init__(items)
        self._html = html

    def _repr_html_(self) -> str:
        return self._html(self)


def text(value: object) -> str:
    """Any text as harmless markup."""
    return escape_control(str(value)).translate(MARKUP)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The cells of `rows` are markup already."""
    head = "".join(f'<th style="text-align:left">{text(cell)}</th>' for cell in header)
    body = "".join(
        "<tr>" + "".join(f'<td style="text-align:left">{cell}</td>' for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def phase_html(phase: str) -> str:
    colour = COLOURS.get(phase, "#935a00")
    shape = SHAPES.get(phase, "◌")
    return f'<span style="color:{colour};font-weight:600">{shape} {text(phase or "new")}</span>'


def world_html(world: WorldStatus) -> str:
    below = ', <b style="color:#935a00">below minimum</b>' if world.below_minimum else ""
    bounds = f"min {world.min}, max {world.max}"
    return f"<span><b>{world.ready} of {world.target}</b> ranks ready ({bounds}){below}</span>"


def exits_html(exits: Sequence[RankExit]) -> str:
    from atoll.core.describe import describe_exit, is_stopped_by_atoll

    rows = [
        (
            str(ended.rank),
            f'<span style="color:{COLOURS["failed"]}">{text(describe_exit(ended))}</span>'
            if ended.is_failure and not is_stopped_by_atoll(ended)
            else text(describe_exit(ended)),
            text(ended.host or "–"),
            str(ended.restart_count),
        )
        for ended in exits[:MAX_ROWS]
    ]
    markup = table(("rank", "end", "host", "restarts"), rows) + _more(len(exits), MAX_ROWS)
    if len(exits) == 1 and exits[0].log_tail:
        markup += lines_text_html(exits[0].log_tail)
    return markup


def lines_text_html(lines: Sequence[str]) -> str:
    return f"<pre>{chr(10).join(text(line) for line in lines)}</pre>"


def line_html(line: LogLine) -> str:
    return f"<pre><b>[{line.rank}]</b> {text(line.text)}</pre>"


def lines_html(lines: Sequence[LogLine]) -> str:
    markup = "\n".join(f"<b>[{line.rank}]</b> {text(line.text)}" for line in lines[-MAX_LINES:])
    before = len(lines) - MAX_LINES
    note = f"<p>{before:,} earlier lines are not shown</p>" if before > 0 else ""
    return f'{note}<pre style="max-height:30em;overflow:auto">{markup}</pre>'


def ranks_html(ranks: Sequence[RankStatus]) -> str:
    """Failed, waiting and restarted ranks first."""
    kinds = {"Failed": 0, "Pending": 1}
    order = sorted(ranks, key=lambda r: (kinds.get(r.phase, 2 if r.restarts else 3), r.rank))
    colours = {"Failed": COLOURS["failed"], "Pending": COLOURS["pending"]}
    rows = [
        (
            str(r.rank),
            f'<span style="color:{colours.get(r.phase, "inherit")}">{text(r.phase.lower())}</span>',
            text(r.node or "–"),
            str(r.pid) if r.pid and r.is_alive else "–",
            str(r.restarts),
            text(r.message[:200]),
        )
        for r in sorted(order[:MAX_RANKS], key=lambda r: r.rank)
    ]
    header = ("rank", "state", "host", "pid", "restarts", "message")
    return table(header, rows) + _more(len(ranks), MAX_RANKS)


def _more(count: int, most: int) -> str:
    return f"<p>and {count - most:,} more</p>" if count > most else ""


def training_html(training: Training, metrics: Sequence[LatestMetric] = ()) -> str:
    from atoll.core.describe import describe_end, describe_others, describe_status

    status = training.status
    is_over = status.phase.is_terminal
    summary = describe_end(training) if is_over else describe_status(status)
    parts = [
        f"<p><b>{text(training.display_name)}</b> {phase_html(status.phase.value)} "
        f"{text(summary)}</p>",
        f"<p>{world_html(training.world)}{''.join(map(metric_html, metrics))}</p>",
    ]
    parts += [
        f'<p style="color:{COLOURS["pending"]}"><b>Warning:</b> {text(summary)}</p>'
        for summary in status.warnings
    ]
    if status.root_cause is not None:
        parts += [f"<p>{text(line)}</p>" for line in describe_others(status)]
    if status.root_cause is not None and status.root_cause.log_tail:
        parts.append(lines_text_html(status.root_cause.log_tail))
    if is_over and status.rank_exits:
        parts.append(exits_html(status.rank_exits))
    elif status.ranks:
        parts.append(ranks_html(status.ranks))
    return f"<div>{''.join(parts)}</div>"


def metric_html(metric: LatestMetric) -> str:
    from atoll.core.chart import spark_svg

    step = "" if metric.step is None else f" at step {metric.step:,}"
    value = f"{float(metric.value):.4g}"
    return f" · {text(metric.name)} <b>{text(value)}</b>{step} {spark_svg(metric.spark)}"


def trainings_html(trainings: Sequence[Any]) -> str:
    """Of handles, as they were read last."""
    from atoll.core.describe import describe_end, describe_status

    rows = []
    for handle in trainings[:MAX_ROWS]:
        training: Training = handle.last
        status = training.status
        summary = describe_end(training) if status.phase.is_terminal else describe_status(status)
        rows.append(
            (
                f"<b>{text(training.display_name)}</b>",
                phase_html(status.phase.value),
                f"{training.world.ready}/{training.world.target}",
                text(summary[:200]),
                text(training.executor),
            )
        )
    header = ("name", "phase", "ready", "what it is doing", "where")
    return table(header, rows) + _more(len(trainings), MAX_ROWS)


def short_traceback(error: BaseException) -> list[str]:
    """Lines for `_render_traceback_`: the error, then the calls in the user's own code."""
    import traceback  # slow to import, and only needed when something failed

    hint = getattr(error, "hint", None)
    notes = [*getattr(error, "__notes__", ()), *getattr(error.__cause__, "__notes__", ())]
    lines = [*f"{type(error).__name__}: {error}".split("\n")]
    lines += [line for note in notes for line in note.split("\n")]
    if hint:
        lines.append(str(hint))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_inner(f.filename)]
    where = [
        f"  {_cell_or_path(frame.filename)}, line {frame.lineno}: {(frame.line or '').strip()}"
        for frame in frames[-MAX_FRAMES:]
    ]
    return [*map(escape_control, lines), *map(escape_control, where), ALL_FRAMES]


def _is_inner(filename: str) -> bool:
    """Whether a frame is atoll's, a library's or Python's own."""
    parts = filename.replace("\\", "/")
    return (
        filename.startswith((_PACKAGE, "<frozen"))
        or "/site-packages/" in parts
        or "/lib/python3." in parts
    )


def _cell_or_path(filename: str) -> str:
    is_cell = "ipykernel_" in filename or filename.startswith("<ipython-input")
    return "cell" if is_cell else filename
