"""Bandwidth against message size, as text for a terminal and as SVG. Pure: points in, plot out.

Both axes of the picture are logarithmic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

Points = Sequence[tuple[int, float]]  # bytes, Gbit/s

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 70, 24, 44, 56
MAX_DECADES, MIN_RATE = 6, 1e-9
STYLE = (
    "text{font:13px sans-serif;fill:#1e1e1e}.end{text-anchor:end}.mid{text-anchor:middle}"
    ".grid{stroke:#ddd}.axis{stroke:#1e1e1e}.line{fill:none;stroke:#1f5fbf;stroke-width:2}"
    ".dot{fill:#1f5fbf}"
)


def plot_text(points: Points, title: str = "", width: int = 60) -> str:
    """One bar for each size; the longest is the fastest."""
    if not points:
        return "nothing was measured\n"
    top = max(rate for _, rate in points) or 1.0
    lines = [title] if title else []
    for size, rate in points:
        bar = "█" * max(round(rate / top * width), 1)
        lines.append(f"{size_text(size):>8} {bar} {rate:.3g} Gbit/s")
    return "\n".join(lines) + "\n"


def plot_svg(points: Points, title: str = "") -> str:
    """The same as a scalable picture, with a title and a tooltip for each point."""
    title = _printable(title) or "bandwidth against message size"
    low, high = _decades([rate for _, rate in points if rate > MIN_RATE])
    sizes = [size for size, _ in points] or [1, 2]
    first, last = math.log2(min(sizes)), max(math.log2(max(sizes)), math.log2(min(sizes)) + 1)

    def x(size: float) -> int:
        share = (math.log2(size) - first) / (last - first)
        return LEFT + round(share * (WIDTH - LEFT - RIGHT))

    def y(rate: float) -> int:
        share = (math.log10(rate) - low) / (high - low)
        return HEIGHT - BOTTOM - round(share * (HEIGHT - TOP - BOTTOM))

    foot = HEIGHT - BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-labelledby="title"><title id="title">{escape(title)}</title>',
        f"<style>{STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 24, title),
        _text(LEFT - 8, TOP - 8, "Gbit/s", "end"),
        _text((LEFT + WIDTH - RIGHT) // 2, HEIGHT - 12, "message size", "mid"),
    ]
    for rate in (10.0**power for power in range(low, high + 1)):
        parts.append(_line("grid", LEFT, y(rate), WIDTH - RIGHT, y(rate)))
        parts.append(_text(LEFT - 8, y(rate) + 4, f"{rate:g}", "end"))
    for size in sizes[:: max(1, len(sizes) // 8)]:
        parts.append(_line("grid", x(size), TOP, x(size), foot))
        parts.append(_text(x(size), foot + 20, size_text(size), "mid"))
    parts.append(_line("axis", LEFT, TOP, LEFT, foot))
    parts.append(_line("axis", LEFT, foot, WIDTH - RIGHT, foot))
    # A value below the lowest decade is drawn at its bottom.
    dots = [
        (x(size), min(y(rate), foot), f"{size_text(size)}: {rate:.3g} Gbit/s")
        for size, rate in points
        if rate > MIN_RATE
    ]
    coordinates = " ".join(f"{ax},{ay}" for ax, ay, _ in dots)
    parts.append(f'<polyline class="line" points="{coordinates}"/>')
    parts += [
        f'<circle class="dot" cx="{ax}" cy="{ay}" r="4"><title>{what}</title></circle>'
        for ax, ay, what in dots
    ]
    return "\n".join((*parts, "</svg>")) + "\n"


def _text(x: int, y: int, text: str, at: str = "") -> str:
    kind = f' class="{at}"' if at else ""
    return f'<text{kind} x="{x}" y="{y}">{escape(text)}</text>'


def _line(kind: str, ax: int, ay: int, bx: int, by: int) -> str:
    return f'<line class="{kind}" x1="{ax}" y1="{ay}" x2="{bx}" y2="{by}"/>'


def _printable(text: str) -> str:
    """The text without characters that XML cannot hold."""
    return "".join(char for char in text if char.isprintable())


def size_text(size: float) -> str:
    """`4 KiB`, `64 MiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:g} {unit}"
        size /= 1024
    return f"{size:g} GiB"


def _decades(rates: Sequence[float]) -> tuple[int, int]:
    if not rates:
        return 0, 1
    high = math.ceil(math.log10(max(rates)))
    low = max(math.floor(math.log10(min(rates))), high - MAX_DECADES)
    return low, max(high, low + 1)
