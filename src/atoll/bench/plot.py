"""Bandwidth against message size, as text for a terminal and as a PNG. Pure: points in, plot out.

Both axes are logarithmic. The PNG is a palette image written with zlib alone, about 3 KB.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence

Points = Sequence[tuple[int, float]]  # bytes, Gbit/s

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 90, 24, 44, 56
MOST_DECADES, LEAST_RATE = 6, 1e-9
WHITE, BLACK, GREY, BLUE = range(4)
PALETTE = bytes([255, 255, 255, 30, 30, 30, 221, 221, 221, 31, 95, 191])

# Three pixels wide, five high, a row after the other, most significant bit first.
GLYPHS = {
    "0": 0o75557, "1": 0o26227, "2": 0o71747, "3": 0o71717, "4": 0o55711, "5": 0o74717,
    "6": 0o74757, "7": 0o71122, "8": 0o75757, "9": 0o75717, ".": 0o00002, "/": 0o11244,
    "-": 0o00700, ">": 0o42124, "<": 0o12421, ":": 0o02020, " ": 0o00000, "_": 0o00007,
    "A": 0o25755, "B": 0o65656, "C": 0o34443, "D": 0o65556, "E": 0o74647, "F": 0o74644,
    "G": 0o34553, "H": 0o55755, "I": 0o72227, "J": 0o11152, "K": 0o55655, "L": 0o44447,
    "M": 0o57755, "N": 0o65555, "O": 0o25552, "P": 0o65644, "Q": 0o25563, "R": 0o65655,
    "S": 0o34216, "T": 0o72222, "U": 0o55557, "V": 0o55552, "W": 0o55775, "X": 0o55255,
    "Y": 0o55222, "Z": 0o71247,
}  # fmt: skip


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


def plot_png(points: Points, title: str = "") -> bytes:
    """The same as an image."""
    canvas = _Canvas()
    canvas.text(LEFT, 14, title or "bandwidth against message size")
    canvas.text(LEFT + 180, HEIGHT - 18, "message size")
    canvas.text(8, 14, "Gbit/s")
    low, high = _decades([rate for _, rate in points if rate > LEAST_RATE])
    sizes = [size for size, _ in points] or [1, 2]
    first, last = math.log2(min(sizes)), max(math.log2(max(sizes)), math.log2(min(sizes)) + 1)

    def x(size: float) -> int:
        share = (math.log2(size) - first) / (last - first)
        return LEFT + round(share * (WIDTH - LEFT - RIGHT))

    def y(rate: float) -> int:
        share = (math.log10(rate) - low) / (high - low)
        return HEIGHT - BOTTOM - round(share * (HEIGHT - TOP - BOTTOM))

    for power in range(low, high + 1):
        canvas.line(LEFT, y(10.0**power), WIDTH - RIGHT, y(10.0**power), GREY)
        label = f"{10.0**power:g}"
        canvas.text(LEFT - 8 - 8 * len(label), y(10.0**power) - 5, label)
    for size in sizes[:: max(1, len(sizes) // 8)]:
        canvas.line(x(size), TOP, x(size), HEIGHT - BOTTOM, GREY)
        label = size_text(size)
        canvas.text(min(x(size) - 4 * len(label), WIDTH - 8 * len(label)), HEIGHT - 44, label)
    canvas.line(LEFT, TOP, LEFT, HEIGHT - BOTTOM, BLACK)
    canvas.line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, BLACK)
    dots = [(x(size), y(rate)) for size, rate in points if rate > LEAST_RATE]
    for (ax, ay), (bx, by) in zip(dots, dots[1:], strict=False):
        canvas.line(ax, ay, bx, by, BLUE, thick=True)
    for ax, ay in dots:
        canvas.dot(ax, ay)
    return canvas.png()


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
    low = max(math.floor(math.log10(min(rates))), high - MOST_DECADES)
    return low, max(high, low + 1)


class _Canvas:
    def __init__(self) -> None:
        self._rows = [bytearray(WIDTH) for _ in range(HEIGHT)]

    def set(self, x: int, y: int, colour: int) -> None:
        if 0 <= x < WIDTH and 0 <= y < HEIGHT:
            self._rows[y][x] = colour

    def line(self, ax: int, ay: int, bx: int, by: int, colour: int, thick: bool = False) -> None:
        steps = max(abs(bx - ax), abs(by - ay), 1)
        for step in range(steps + 1):
            x, y = ax + (bx - ax) * step // steps, ay + (by - ay) * step // steps
            self.set(x, y, colour)
            if thick:
                self.set(x, y + 1, colour)
                self.set(x + 1, y, colour)

    def dot(self, x: int, y: int) -> None:
        for dx in range(-3, 5):
            for dy in range(-3, 5):
                if (dx - 0.5) ** 2 + (dy - 0.5) ** 2 <= 12:
                    self.set(x + dx, y + dy, BLUE)

    def text(self, x: int, y: int, text: str) -> None:
        for at, char in enumerate(text.upper()):
            bits = GLYPHS.get(char, GLYPHS["_"])
            for spot in range(15):
                if bits >> (14 - spot) & 1:
                    px, py = x + at * 8 + spot % 3 * 2, y + spot // 3 * 2
                    for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
                        self.set(px + dx, py + dy, BLACK)

    def png(self) -> bytes:
        rows = b"".join(b"\0" + bytes(row) for row in self._rows)
        return b"".join(
            [
                b"\x89PNG\r\n\x1a\n",
                _chunk(b"IHDR", struct.pack("!2I5B", WIDTH, HEIGHT, 8, 3, 0, 0, 0)),
                _chunk(b"PLTE", PALETTE),
                _chunk(b"IDAT", zlib.compress(rows, 9)),
                _chunk(b"IEND", b""),
            ]
        )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))
