"""Mermaid's state diagrams as SVG, for the site: nothing is fetched when a page is read.

Only what `core/phase.py:diagram` prints is understood: arrows between states and `[*]`.
"""

from __future__ import annotations

import re
from math import hypot
from xml.sax.saxutils import escape

BLOCK = re.compile(r"^```mermaid\n(?P<text>.*?)^```\n", re.M | re.S)
ARROW = re.compile(r"(\S+) --> (\S+)")
START = "[*]"
WIDTH, ROW, BOX, HIGH, DOT = 720, 110, 104, 36, 7
Point = tuple[float, float]


def drawn(markdown: str) -> str:
    """The page with an SVG in place of each diagram. Raises ValueError for one of another kind."""
    return BLOCK.sub(lambda block: svg(block["text"]), markdown)


def svg(text: str) -> str:
    """Three rows: where it begins, states that can be left, states that are final."""
    kind, *lines = text.strip().splitlines()
    arrows = [ARROW.fullmatch(line.strip()) for line in lines]
    if kind != "stateDiagram-v2" or None in arrows:
        raise ValueError(f"expected a state diagram of arrows alone, got {text!r}")
    edges = [(match[1], match[2]) for match in arrows if match]
    final = {start for start, end in edges if end == START}
    middle = {start for start, _ in edges} - final - {START}
    places: dict[str, Point] = {START: (WIDTH / 2, 20)}
    for y, row in ((20 + ROW, middle), (20 + 2.3 * ROW, final)):
        for at, name in enumerate(sorted(row)):
            places[name] = (WIDTH * (at + 0.5) / len(row), y)
    shapes = [_arrow(*edge, places, edges) for edge in edges if edge[1] != START]
    shapes.append(f'<circle cx="{WIDTH / 2}" cy="20" r="{DOT}" fill="currentColor"/>')
    shapes += [_box(name, places[name], name in final) for name in sorted(middle | final)]
    return (
        f'<svg viewBox="0 0 {WIDTH} {round(30 + 2.3 * ROW + HIGH)}" role="img" fill="none" '
        f'stroke="currentColor" style="max-width: {WIDTH}px" '
        f'aria-label="{escape(", ".join(f"{a} to {b}" for a, b in edges))}">'
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path d="M0 0 8 4 0 8z" fill="currentColor" stroke="none"/>'
        f"</marker></defs>{''.join(shapes)}</svg>\n"
    )


def _box(name: str, at: Point, is_final: bool) -> str:
    """A final state has a second line around it."""
    frames = ""
    for wider in (0, 4) if is_final else (0,):
        wide, high = BOX + 2 * wider, HIGH + 2 * wider
        frames += (
            f'<rect x="{at[0] - wide / 2}" y="{at[1] - high / 2}" width="{wide}" height="{high}" '
            f'rx="{6 + wider}"/>'
        )
    return (
        f'{frames}<text x="{at[0]}" y="{at[1] + 5}" text-anchor="middle" font-size="14" '
        f'fill="currentColor" stroke="none">{escape(name)}</text>'
    )


def _arrow(start: str, end: str, places: dict[str, Point], edges: list[tuple[str, str]]) -> str:
    (x1, y1), (x2, y2) = _border(places, start, end), _border(places, end, start)
    if start != START and (end, start) in edges:  # two arrows, side by side
        length = hypot(x2 - x1, y2 - y1)
        aside = ((y2 - y1) / length * 7, (x1 - x2) / length * 7)
        x1, y1, x2, y2 = x1 + aside[0], y1 + aside[1], x2 + aside[0], y2 + aside[1]
    return (
        f'<path d="M{x1:.0f} {y1:.0f} {x2:.0f} {y2:.0f}" marker-end="url(#tip)" '
        f'aria-label="{escape(start)} to {escape(end)}"/>'
    )


def _border(places: dict[str, Point], name: str, other: str) -> Point:
    """Where the line between the two middles leaves the shape of the first."""
    (x, y), (to_x, to_y) = places[name], places[other]
    dx, dy = to_x - x, to_y - y
    if name == START:
        part = (DOT + 2) / hypot(dx, dy)
    else:
        part = min(
            (BOX / 2 + 6) / abs(dx) if dx else 1.0,
            (HIGH / 2 + 6) / abs(dy) if dy else 1.0,
        )
    return x + dx * part, y + dy * part
