"""The one writer of charts: curves as characters for a terminal, and as SVG. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from atoll.core.text import format_bytes

Points = Sequence[tuple[int, float]]  # of the link bench: bytes of a message, Gbit/s
Ticks = Sequence[tuple[float, str]]  # values of an axis, and how they are written

PALETTE = ("#1259bd", "#a00f2f", "#04796a", "#935a00", "#6b3fa0", "#4c5561", "#0a58b5", "#8a4b08")
SIZE = (720, 400)  # of a chart in pixels: as wide as a page of text
_LEFT, _TOP, _RIGHT, _BOTTOM = 64, 44, 16, 40  # margins; a label of 8 characters fits on the left
SPARK_SIZE = (100, 20)  # a curve within a line of text

_BRAILLE = 0x2800
# The bit of each dot in a cell of two by four.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))

MIN_RATE = 1e-9  # Gbit/s; a logarithm needs something above 0
MAX_DECADES = 6  # below, a rate is drawn at the foot of the chart


class Curve(NamedTuple):
    """One line. A gap is where `ys` is not finite. Points that have `notes` are dots."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    notes: Sequence[str] = ()


class Frame(NamedTuple):
    """The ranges that are drawn."""

    left: float
    right: float
    bottom: float
    top: float

    def position(self, x: float, y: float, width: int, height: int) -> tuple[int, int]:
        """Column and row, from the top left. What is below the frame is drawn at its foot."""
        column = (x - self.left) / (self.right - self.left) * (width - 1)
        row = (self.top - max(y, self.bottom)) / (self.top - self.bottom) * (height - 1)
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
    for line in _lines(curve, frame, width, height):
        dots.append(line[0])
        for before, here in zip(line, line[1:], strict=False):
            dots += [here] if here[0] < before[0] else _between(before, here)
    return dots


def _lines(curve: Curve, frame: Frame, width: int, height: int) -> list[list[tuple[int, int]]]:
    """The positions of a curve's points, in pieces that have no gap."""
    lines: list[list[tuple[int, int]]] = [[]]
    for x, y in zip(curve.xs, curve.ys, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            lines[-1].append(frame.position(x, y, width, height))
        elif lines[-1]:
            lines.append([])
    return [line for line in lines if line]


def _between(one: tuple[int, int], other: tuple[int, int]) -> list[tuple[int, int]]:
    steps = max(abs(other[0] - one[0]), abs(other[1] - one[1]), 1)
    return [
        (
            round(one[0] + (other[0] - one[0]) * at / steps),
            round(one[1] + (other[1] - one[1]) * at / steps),
        )
        for at in range(steps + 1)
    ]


def draw_svg(
    curves: Sequence[Curve],
    title: str,
    x_label: str,
    size: tuple[int, int] = SIZE,
    *,
    y_label: str = "",
    frame: Frame | None = None,
    x_ticks: Ticks | None = None,
    y_ticks: Ticks | None = None,
) -> str:
    """The curves as an SVG document, with a title and a legend.

    Without ticks the ends of an axis are labelled; without a frame it is that of the points.
    """
    width, height = size
    inner = (width - _LEFT - _RIGHT, height - _TOP - _BOTTOM)
    foot = height - _BOTTOM
    title = _printable(title)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-labelledby="title" font-family="system-ui,sans-serif" font-size="12">',
        f'<title id="title">{escape(title)}</title>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>',
        _text(_LEFT + inner[0] // 2, height - 6, x_label, "middle"),
        _text(_LEFT - 6, _TOP - 12, y_label, "end"),
    ]
    frame = frame or frame_of(curves)
    if frame is not None:
        if x_ticks is None:
            x_ticks = [(frame.left, _short(frame.left)), (frame.right, _short(frame.right))]
        if y_ticks is None:
            y_ticks = [(frame.bottom, _short(frame.bottom)), (frame.top, _short(frame.top))]
        for x, text in x_ticks:
            at = _LEFT + frame.position(x, frame.bottom, inner[0] + 1, 1)[0]
            parts.append(f'<path d="M{at} {_TOP}V{foot}" stroke="#ddd"/>')
            parts.append(_text(at, foot + 18, text, "middle"))
        for y, text in y_ticks:
            at = _TOP + frame.position(frame.left, y, 1, inner[1] + 1)[1]
            parts.append(f'<path d="M{_LEFT} {at}H{width - _RIGHT}" stroke="#ddd"/>')
            parts.append(_text(_LEFT - 6, at + 4, text, "end"))
        axes = f"M{_LEFT} {_TOP}V{foot}H{width - _RIGHT}"
        parts.append(f'<path d="{axes}" fill="none" stroke="#777"/>')
        for at, curve in enumerate(curves):
            colour = PALETTE[at % len(PALETTE)]
            lines = _lines(curve, frame, inner[0] + 1, inner[1] + 1)
            lines = [[(_LEFT + x, _TOP + y) for x, y in line] for line in lines]
            parts.append(_path(lines, colour))
            parts += [
                f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}">'
                f"<title>{escape(note)}</title></circle>"
                for (x, y), note in zip(itertools.chain(*lines), curve.notes, strict=False)
            ]
            legend = _text(width - _RIGHT, _TOP + 14 * (at + 1), curve.label, "end", colour)
            parts.append(legend if curve.label else "")
    return "\n".join([*filter(None, parts), "</svg>"]) + "\n"


def spark_svg(values: Sequence[object]) -> str:
    """A small curve within a line of text; what is not finite is left out."""
    points = [(at, value) for at, value in enumerate(values) if isinstance(value, int | float)]
    curve = Curve("", [at for at, _ in points], [value for _, value in points])
    frame = frame_of([curve])
    if frame is None or len(points) < 2:
        return ""
    width, height = SPARK_SIZE
    lines = _lines(curve, frame, width - 3, height - 3)
    path = _path([[(x + 2, y + 1) for x, y in line] for line in lines], PALETTE[0])
    return f'<svg width="{width}" height="{height}" style="vertical-align:middle">{path}</svg>'


def _path(lines: Sequence[Sequence[tuple[int, int]]], colour: str) -> str:
    text = "".join("M" + "L".join(f"{x} {y}" for x, y in line) for line in lines)
    return f'<path d="{text}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _text(x: int, y: int, text: str, anchor: str, colour: str = "#1e1e1e") -> str:
    text = escape(_printable(text))
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def _printable(text: str) -> str:
    """The text without characters that XML cannot hold."""
    return "".join(char for char in text if char.isprintable())


def _short(value: float) -> str:
    return f"{value:.4g}"


def link_bars(points: Points, title: str = "", width: int = 60) -> str:
    """Bandwidth against message size: one bar for each size; the longest is the fastest."""
    if not points:
        return "nothing was measured\n"
    top = max(rate for _, rate in points) or 1.0
    lines = [title] if title else []
    for size, rate in points:
        bar = "█" * max(round(rate / top * width), 1)
        lines.append(f"{format_bytes(size):>8} {bar} {rate:.3g} Gbit/s")
    return "\n".join(lines) + "\n"


def link_svg(points: Points, title: str = "") -> str:
    """The same as a picture. Both axes are logarithmic."""
    drawn = [(size, rate) for size, rate in points if rate > MIN_RATE]
    low, high = _decades([rate for _, rate in drawn])
    sizes = [math.log2(size) for size, _ in points] or [0.0, 1.0]
    frame = Frame(sizes[0], max(sizes[-1], sizes[0] + 1), low, high)
    curve = Curve(
        "",
        [math.log2(size) for size, _ in drawn],
        [math.log10(rate) for _, rate in drawn],
        [f"{format_bytes(size)}: {rate:.3g} Gbit/s" for size, rate in drawn],
    )
    return draw_svg(
        [curve],
        _printable(title) or "bandwidth against message size",
        "message size",
        y_label="Gbit/s",
        frame=frame,
        x_ticks=[(size, format_bytes(2**size)) for size in sizes[:: max(1, len(sizes) // 8)]],
        y_ticks=[(power, f"{10.0**power:g}") for power in range(low, high + 1)],
    )


def _decades(rates: Sequence[float]) -> tuple[int, int]:
    if not rates:
        return 0, 1
    high = math.ceil(math.log10(max(rates)))
    low = max(math.floor(math.log10(min(rates))), high - MAX_DECADES)
    return low, max(high, low + 1)
