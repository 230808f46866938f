"""Figures in pages come from `bench/results`: `python -m tools.figures` fills them in.

A page has `<!--= server/status reads/reads/s ,.0f-->3,517<!--/-->`: a file of results, the keys to
the figure, and its format. A key may have slashes of its own; `100*.1f` is a hundred times the
figure. A table of `tools/tables.py` is between `<!--# name-->` and `<!--/#-->`.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from tools.tables import TABLES, quality_svg

ROOT = Path(__file__).parents[1]
FIGURE = re.compile(
    r"<!--= (?P<place>[^>]+) (?:(?P<times>\d+)\*)?(?P<format>[^\s>-]+)-->[^<]*<!--/-->"
)
TABLE = re.compile(r"<!--# (?P<name>\w+)-->\n.*?<!--/#-->", re.S)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str) -> str:
    """The text with every figure as it is in the results. Raises KeyError for one that is not."""

    def fill(match: re.Match[str]) -> str:
        value = look_up(match["place"]) * int(match["times"] or 1)
        mark = match[0].partition("-->")[0]
        return f"{mark}-->{value:{match['format']}}<!--/-->"

    text = TABLE.sub(
        lambda at: f"<!--# {at['name']}-->\n\n{TABLES[at['name']]()}\n\n<!--/#-->", text
    )
    return FIGURE.sub(fill, text)


def look_up(place: str) -> float:
    name, _, rest = place.partition("/")
    results = json.loads((ROOT / "bench/results" / f"{name}.json").read_text())
    return float(_below(results, rest, place))


def _below(value: Any, rest: str, place: str) -> Any:
    if not rest:
        return value
    if isinstance(value, list):
        first, _, later = rest.partition("/")
        return _below(value[int(first)], later, place)
    for key in sorted(value, key=len, reverse=True) if isinstance(value, dict) else ():
        if rest == key or rest.startswith(f"{key}/"):
            return _below(value[key], rest[len(key) + 1 :], place)
    raise KeyError(f"bench/results has no {place!r}: nothing is called {rest!r} there")


PICTURES = {ROOT / "docs/images/quality.svg": quality_svg}


def main() -> None:
    for picture, draw in PICTURES.items():
        picture.write_text(draw())
    for page in pages():
        text = page.read_text()
        if (made := filled(text)) != text:
            page.write_text(made)
            sys.stdout.write(f"{page.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
