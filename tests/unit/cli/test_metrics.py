"""Curves are drawn in the room there is, with gaps and without markup from ranks."""

from __future__ import annotations

import math
from xml.etree import ElementTree

from atoll.cli.metrics import Curve, draw, draw_svg

FALLING = Curve("rank 0", [0.0, 1.0, 2.0, 3.0], [4.0, 3.0, math.nan, 1.0])


def test_a_falling_curve_falls_and_fits() -> None:
    text = draw([FALLING], 40, 10, "step")
    rows = text.split("\n")
    assert len(rows) <= 10
    assert max(map(len, rows)) <= 40
    assert rows[0].strip().startswith("4│")
    assert rows[-3].strip().startswith("1│")
    dotted = [row.split("│", 1)[1] for row in rows if "│" in row]
    first = [at for at, char in enumerate(dotted[0]) if char not in "\u2800 "]
    last = [at for at, char in enumerate(dotted[-1]) if char not in "\u2800 "]
    assert max(first) < min(last)


def test_one_point_and_none_are_drawn_without_trouble() -> None:
    assert "\u2800" < max(draw([Curve("a", [5.0], [7.0])], 40, 10, "step"))
    assert draw([Curve("a", [1.0], [math.inf])], 40, 10, "step") == "nothing to draw"


def test_svg_is_well_formed_and_names_are_text() -> None:
    text = draw_svg(
        [FALLING._replace(label="<script>x</script>")], "loss & <b>", "step", (400, 300)
    )
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert "<script>" not in text
    paths = [each for each in root.iter() if each.tag.endswith("path")]
    assert paths[-1].attrib["d"].count("M") == 2, "a gap stays a gap"
