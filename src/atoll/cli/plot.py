"""Curves: with the dots of Braille characters in a terminal, and as SVG. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

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

    def place(self, x: float, y: float, width: int, height: int) -> tuple[int, int]:
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
    return Frame(*_widened(min(xs), max(xs)), *_widened(min(ys), max(ys)))


def _widened(low: float, high: float) -> tuple[float, float]:
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
        here = frame.place(x, y, width, height)
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


def svg(curves: Sequence[Curve], title: str, x_label: str, size: tuple[int, int]) -> str:
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
        column, row = frame.place(x, y, inner[0] + 1, inner[1] + 1)
        text.append(f"{'L' if is_down else 'M'}{origin[0] + column} {origin[1] + row}")
        is_down = True
    return "".join(text)


def _short(value: float) -> str:
    return f"{value:.4g}"
