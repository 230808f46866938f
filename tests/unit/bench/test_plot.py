"""The plot of a bench: text for a terminal, and SVG that an XML parser accepts."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.bench.plot import HEIGHT, WIDTH, plot_svg, plot_text, size_text
from atoll.cli.trainings import status
from atoll.core.errors import ValidationError

POINTS = [(4096, 0.5), (65536, 5.0), (1 << 20, 9.4)]
SVG = "{http://www.w3.org/2000/svg}"


def dots(svg: str) -> list[tuple[int, int]]:
    """Where the points are; all of them within the picture."""
    found = [
        (int(dot.attrib["cx"]), int(dot.attrib["cy"]))
        for dot in ElementTree.fromstring(svg).iter(f"{SVG}circle")
    ]
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in found)
    return found


def test_a_faster_point_is_drawn_higher_and_a_larger_one_further_right() -> None:
    xs, ys = zip(*dots(plot_svg(POINTS)), strict=True)
    assert list(xs) == sorted(set(xs))
    assert list(ys) == sorted(set(ys), reverse=True)


def test_the_picture_can_be_read_aloud() -> None:
    root = ElementTree.fromstring(plot_svg(POINTS, "a <-> b"))
    assert (root.attrib["role"], root.findtext(f"{SVG}title")) == ("img", "a <-> b")
    said = [dot.findtext(f"{SVG}title") for dot in root.iter(f"{SVG}circle")]
    assert said == ["4 KiB: 0.5 Gbit/s", "64 KiB: 5 Gbit/s", "1 MiB: 9.4 Gbit/s"]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(0, 1e6)), max_size=12), st.text())
def test_any_points_make_a_picture(points: list[tuple[int, float]], title: str) -> None:
    assert len(dots(plot_svg(sorted(points), title))) == sum(rate > 1e-9 for _, rate in points)
    assert plot_text(sorted(points), title)


@pytest.mark.parametrize("name", ["link.png", "link", "svg"])
def test_a_plot_is_an_svg_file(name: str, tmp_path: Path) -> None:
    asked = CliRunner().invoke(status, ["a-training", "--bench", "--svg", str(tmp_path / name)])
    assert isinstance(asked.exception, ValidationError)
    assert "ends in .svg" in str(asked.exception)


def test_text_has_a_line_for_each_size_and_the_longest_bar_is_the_fastest() -> None:
    lines = plot_text(POINTS, "a <-> b").splitlines()
    assert lines[0] == "a <-> b"
    assert [line.count("█") for line in lines[1:]] == [3, 32, 60]
    assert lines[-1].strip().endswith("9.4 Gbit/s")
    assert plot_text([]) == "nothing was measured\n"


@pytest.mark.parametrize(
    ("size", "text"), [(512, "512 B"), (4096, "4 KiB"), (1 << 26, "64 MiB"), (1 << 31, "2 GiB")]
)
def test_sizes(size: int, text: str) -> None:
    assert size_text(size) == text
