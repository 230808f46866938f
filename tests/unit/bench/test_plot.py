"""The plot of a bench: text for a terminal, and a PNG that a decoder accepts."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.bench.plot import BLUE, HEIGHT, WIDTH, plot_png, plot_text, size_text

POINTS = [(4096, 0.5), (65536, 5.0), (1 << 20, 9.4)]


def decoded(png: bytes) -> list[bytes]:
    """The rows of palette indices; checks the signature and every checksum on the way."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, kinds = 8, b"", []
    while at < len(png):
        (length,) = struct.unpack_from("!I", png, at)
        kind, body = png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        assert struct.unpack_from("!I", png, at + 8 + length)[0] == zlib.crc32(kind + body)
        kinds.append(kind)
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    assert kinds == [b"IHDR", b"PLTE", b"IDAT", b"IEND"]
    raw = zlib.decompress(data)
    assert len(raw) == HEIGHT * (WIDTH + 1)
    return [raw[row * (WIDTH + 1) + 1 : (row + 1) * (WIDTH + 1)] for row in range(HEIGHT)]


def test_a_faster_point_is_drawn_higher_and_a_larger_one_further_right() -> None:
    rows = decoded(plot_png(POINTS, "a <-> b"))
    blue = [(x, y) for y, row in enumerate(rows) for x, pixel in enumerate(row) if pixel == BLUE]
    assert min(blue)[1] > max(blue)[1]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 1 << 40), st.floats(0, 1e6)), max_size=12), st.text())
def test_any_points_make_a_picture(points: list[tuple[int, float]], title: str) -> None:
    decoded(plot_png(sorted(points), title))
    assert plot_text(sorted(points), title)


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
