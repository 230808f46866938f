"""Charts: text for a terminal, and SVG that an XML parser accepts."""

from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cli.trainings import status
from atoll.core.chart import SIZE, Curve, draw, draw_svg, link_bars, link_svg
from atoll.core.errors import ValidationError

POINTS = [(4096, 0.5), (65536, 5.0), (1 << 20, 9.4)]
SVG = "{http://www.w3.org/2000/svg}"


def dots(svg: str) -> list[tuple[int, int]]:
    """Where the points are; all of them within the picture."""
    found = [
        (int(dot.attrib["cx"]), int(dot.attrib["cy"]))
        for dot in ElementTree.fromstring(svg).iter(f"{SVG}circle")
    ]
    assert all(0 <= x <= SIZE[0] and 0 <= y <= SIZE[1] for x, y in found)
    return found


def test_a_faster_point_is_drawn_higher_and_a_larger_one_further_right() -> None:
    xs, ys = zip(*dots(link_svg(POINTS)), strict=True)
    assert list(xs) == sorted(set(xs))
    assert list(ys) == sorted(set(ys), reverse=True)


def test_the_picture_can_be_read_aloud() -> None:
    root = ElementTree.fromstring(link_svg(POINTS, "a <-> b"))
    assert (root.attrib["role"], root.findtext(f"{SVG}title")) == ("img", "a <-> b")
    said = [dot.findtext(f"{SVG}title") for dot in root.iter(f"{SVG}circle")]
    assert said == ["4 KiB: 0.5 Gbit/s", "64 KiB: 5 Gbit/s", "1 MiB: 9.4 Gbit/s"]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(0, 1e6)), max_size=12), st.text())
def test_any_points_make_a_picture(points: list[tuple[int, float]], title: str) -> None:
    assert len(dots(link_svg(sorted(points), title))) == sum(rate > 1e-9 for _, rate in points)
    assert link_bars(sorted(points), title)


@pytest.mark.parametrize("name", ["link.png", "link", "svg"])
def test_a_plot_is_an_svg_file(name: str, tmp_path: Path) -> None:
    asked = CliRunner().invoke(status, ["a-training", "--bench", "--svg", str(tmp_path / name)])
    assert isinstance(asked.exception, ValidationError)
    assert "ends in .svg" in str(asked.exception)


def test_text_has_a_line_for_each_size_and_the_longest_bar_is_the_fastest() -> None:
    lines = link_bars(POINTS, "a <-> b").splitlines()
    assert lines[0] == "a <-> b"
    assert [line.count("█") for line in lines[1:]] == [3, 32, 60]
    assert lines[-1].strip().endswith("9.4 Gbit/s")
    assert link_bars([]) == "nothing was measured\n"


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
