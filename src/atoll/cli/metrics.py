"""`atoll metrics`: what ranks reported, as a table, as CSV and as a curve."""

from __future__ import annotations

import csv
import math
import shutil
import sys
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from atoll.cli.options import json_option, name_argument, since_option

if TYPE_CHECKING:
    from atoll.sdk.columns import MetricTable


AXES = ("step", "time")
SVG_SIZE = (960, 540)  # 16:9, as wide as a column of text on most pages
MAX_LINES = 24  # a higher curve shows no more: a Braille cell has four rows


@click.command()
@name_argument
@click.argument("metrics", metavar="[METRIC]...", nargs=-1)
@click.option(
    "--rank", "ranks", type=click.IntRange(min=0), multiple=True, help="Print these ranks only."
)
@since_option("metrics")
@click.option("--csv", "is_csv", is_flag=True, help="Print every row as CSV.")
@click.option("--plot", "is_plotted", is_flag=True, help="Draw the curve of one METRIC.")
@click.option(
    "--svg",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the curve of one METRIC to this file.",
)
@click.option(
    "--x",
    "axis",
    type=click.Choice(AXES),
    default="step",
    help="Horizontal axis of the curve.",
    show_default=True,
)
@json_option
def metrics(
    name: str,
    metrics: tuple[str, ...],
    ranks: tuple[int, ...],
    since: str | None,
    is_csv: bool,
    is_plotted: bool,
    svg: Path | None,
    axis: str,
    is_json: bool,
) -> None:
    """Print or plot the metrics of a training.

    Ranks report them with atoll.report. Without a METRIC, all of them; as text one line for each,
    with its newest value.
    """
    from atoll.cli.output import print_json
    from atoll.cli.trainings import parse_time
    from atoll.sdk.client import Client

    is_curve = is_plotted or svg is not None
    if is_curve + is_csv + is_json > 1:
        raise click.UsageError("expected one of --csv, --json and --plot")
    if is_curve and len(metrics) != 1:
        raise click.UsageError("--plot and --svg: expected one METRIC, such as loss")
    after = None if since is None else parse_time(since, time.time())
    table = Client().get(name).metrics(metrics or None, after)
    if ranks:
        table = select_ranks(table, ranks)
    if is_curve:
        _draw(name, metrics[0], table, axis, svg)
    elif is_json:
        print_json(dict(table))
    elif is_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    else:
        print(_overview(table))


def select_ranks(table: MetricTable, ranks: Sequence[int]) -> MetricTable:
    rows = [row for row, rank in enumerate(table["rank"]) if rank in ranks]
    for name, column in table.items():
        table[name] = [column[row] for row in rows]
    return table


def _overview(table: MetricTable) -> str:
    from atoll.cli.output import table as format_table
    from atoll.core.escape import escape_control

    lines = []
    for name in dict.fromkeys(table["name"]):
        rows = [row for row, each in enumerate(table["name"]) if each == name]
        newest = max(rows, key=lambda row: table["at"][row])
        step = table["step"][newest]
        lines.append(
            [
                escape_control(name),
                f"{table['value'][newest]:.6g}",
                "-" if step is None else str(step),
                f"{min(table['min'][row] for row in rows):.6g}",
                f"{max(table['max'][row] for row in rows):.6g}",
                str(len({table["rank"][row] for row in rows})),
                str(sum(table["count"][row] for row in rows)),
            ]
        )
    if not lines:
        return "nothing reported yet: call atoll.report(step=…, loss=…) in the ranks"
    text = format_table(["NAME", "LAST", "STEP", "MIN", "MAX", "RANKS", "POINTS"], lines)
    if table.skipped:
        text += f"\n{table.skipped} more metrics were reported and not stored: there are too many"
    if table.missed:
        text += f"\n{table.missed} batches of metrics were lost before they were stored"
    return text


def _draw(name: str, metric: str, table: MetricTable, axis: str, path: Path | None) -> None:
    from atoll.core.escape import escape_control

    curves = curves_of(table, axis)
    if not curves:
        raise click.ClickException(
            f"{name} has reported no {escape_control(metric)!r}: "
            f"'atoll metrics {name}' lists what it has"
        )
    title = f"{escape_control(metric)} of {name}"
    if path is not None:
        path.write_text(draw_svg(curves, title, axis, SVG_SIZE))
        print(path)
        return
    size = shutil.get_terminal_size((100, 24))
    print(title)
    print(draw(curves, size.columns, min(size.lines - 3, MAX_LINES), axis))


def curves_of(table: MetricTable, axis: str) -> list[Curve]:
    """One curve for each rank; the time is in seconds since the first point."""
    start = min(table["at"], default=0.0)
    by_rank: dict[tuple[int, int], tuple[list[float], list[float]]] = {}
    rows = zip(
        table["rank"], table["process"], table["step"], table["at"], table["value"], strict=True
    )
    for rank, process, step, at, value in rows:
        x = at - start if axis == "time" else step
        if x is not None:
            xs, ys = by_rank.setdefault((rank, process), ([], []))
            xs.append(x)
            ys.append(value)
    return [
        Curve(f"rank {rank}" if not process else f"rank {rank}.{process}", xs, ys)
        for (rank, process), (xs, ys) in sorted(by_rank.items())
    ]


_BRAILLE = 0x2800
# The bit of each dot in a cell of two by four.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
PALETTE = ("#1259bd", "#a00f2f", "#04796a", "#935a00", "#6b3fa0", "#4c5561", "#0a58b5", "#8a4b08")


class Curve(NamedTuple):
    """One line. A gap is where `ys` is not finite."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]


class Frame(NamedTuple):
    """The ranges that are drawn."""

    left: float
    right: float
    bottom: float
    top: float

    def position(self, x: float, y: float, width: int, height: int) -> tuple[int, int]:
        """Column and row, from the top left."""
        column = (x - self.left) / (self.right - self.left) * (width - 1)
        row = (self.top - y) / (self.top - self.bottom) * (height - 1)
        return round(column), round(row)


def frame_of(curves: Sequence[Curve]) -> Frame | None:
    """None if nothing can be drawn."""
    points = [
        (x, y)
        for curve in curves
        for x, y in zip(curve.xs, curve.ys, strict=True)
        if math.isfinite(x) and math.isfinite(y)
    ]
    if not points:
        return None
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return Frame(*_widen(min(xs), max(xs)), *_widen(min(ys), max(ys)))


def _widen(low: float, high: float) -> tuple[float, float]:
    if low < high:
        return low, high
    half = abs(low) / 2 or 0.5
    return low - half, high + half


def draw(curves: Sequence[Curve], width: int, height: int, x_label: str) -> str:
    """The curves in so many columns and rows of characters."""
    frame = frame_of(curves)
    if frame is None:
        return "nothing to draw"
    labels = [_short(frame.top), _short(frame.bottom)]
    margin = max(map(len, labels)) + 1
    columns, rows = max(8, width - margin - 1), max(3, height - 2)
    cells = [[0] * columns for _ in range(rows)]
    for curve in curves:
        for column, row in _dots(curve, frame, columns * 2, rows * 4):
            cells[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
    lines = []
    for at, line in enumerate(cells):
        label = labels[0] if at == 0 else labels[1] if at == rows - 1 else ""
        lines.append(f"{label:>{margin}}│" + "".join(chr(_BRAILLE + cell) for cell in line))
    left, right = _short(frame.left), _short(frame.right)
    lines.append(" " * margin + "└" + "─" * columns)
    gap = max(1, columns - len(left) - len(right) - len(x_label) - 1)
    lines.append(" " * (margin + 1) + f"{left} {x_label}{' ' * gap}{right}")
    return "\n".join(line.rstrip() for line in lines)


def _dots(curve: Curve, frame: Frame, width: int, height: int) -> list[tuple[int, int]]:
    """Every dot of a curve, with those between its points."""
    dots: list[tuple[int, int]] = []
    before: tuple[int, int] | None = None
    for x, y in zip(curve.xs, curve.ys, strict=True):
        if not (math.isfinite(x) and math.isfinite(y)):
            before = None
            continue
        here = frame.position(x, y, width, height)
        if before is None or here[0] < before[0]:
            dots.append(here)
        else:
            dots += _between(before, here)
        before = here
    return dots


def _between(one: tuple[int, int], other: tuple[int, int]) -> list[tuple[int, int]]:
    steps = max(abs(other[0] - one[0]), abs(other[1] - one[1]), 1)
    return [
        (
            round(one[0] + (other[0] - one[0]) * at / steps),
            round(one[1] + (other[1] - one[1]) * at / steps),
        )
        for at in range(steps + 1)
    ]


def draw_svg(curves: Sequence[Curve], title: str, x_label: str, size: tuple[int, int]) -> str:
    """The curves as an SVG document, with a title and a legend."""
    width, height = size
    left, top, right, bottom = 64, 36, 16, 40
    frame = frame_of(curves)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui,sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{left}" y="20" font-size="15">{escape(title)}</text>',
    ]
    if frame is not None:
        inner = (width - left - right, height - top - bottom)
        parts.append(
            f'<path d="M{left} {top}V{height - bottom}H{width - right}" fill="none" '
            'stroke="#7d8794"/>'
        )
        for text, y in ((_short(frame.top), top + 4), (_short(frame.bottom), height - bottom)):
            parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{text}</text>')
        base = height - bottom + 18
        parts.append(f'<text x="{left}" y="{base}">{_short(frame.left)}</text>')
        parts.append(
            f'<text x="{width - right}" y="{base}" text-anchor="end">{_short(frame.right)}</text>'
        )
        middle = left + inner[0] // 2
        parts.append(f'<text x="{middle}" y="{base}" text-anchor="middle">{escape(x_label)}</text>')
        for at, curve in enumerate(curves):
            colour = PALETTE[at % len(PALETTE)]
            path = _path(curve, frame, (left, top), inner)
            parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
            parts.append(
                f'<text x="{width - right}" y="{top + 14 * (at + 1)}" text-anchor="end" '
                f'fill="{colour}">{escape(curve.label)}</text>'
            )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _path(curve: Curve, frame: Frame, origin: tuple[int, int], inner: tuple[int, int]) -> str:
    text, is_down = [], False
    for x, y in zip(curve.xs, curve.ys, strict=True):
        if not (math.isfinite(x) and math.isfinite(y)):
            is_down = False
            continue
        column, row = frame.position(x, y, inner[0] + 1, inner[1] + 1)
        text.append(f"{'L' if is_down else 'M'}{origin[0] + column} {origin[1] + row}")
        is_down = True
    return "".join(text)


def _short(value: float) -> str:
    return f"{value:.4g}"
