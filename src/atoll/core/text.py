"""Text from people and for people: control characters, lines, ranges of ranks, durations, sizes.

Loads nothing slow: the supervisor of ranks and the command line import it.
"""

from __future__ import annotations

import math
import re
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator

from atoll.core.errors import ValidationError

# Text of ranks and of other people, made harmless for a terminal.
#
# An escape sequence can set the title, write the clipboard, move the cursor over other lines, or
# make a line that looks like one of atoll's own.

# Control characters, line separators, and those that turn the direction of what follows.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_RESET = "\x1b[0m"
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # CSI: cursor, erasing, modes, and colours
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|\x9c|$)"  # OSC and its kind: title, clipboard
    r"|\x1b[ -/]*[0-~]"
    r"|[\x00-\x08\x0a-\x1f\x7f-\x9f]",
    re.DOTALL,
)


def escape_control(text: str) -> str:
    r"""The text on one line, with control characters as Python writes them: `\x1b`, `\n`."""
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def keep_colours(line: str) -> str:
    """A line with its colours, which end with it, and without other control characters."""
    if not _SEQUENCE.search(line):
        return line
    colours = _SEQUENCE.sub(lambda match: match[0] if _COLOUR.fullmatch(match[0]) else "", line)
    return colours + _RESET if _COLOUR.search(colours) and not colours.endswith(_RESET) else colours


# Splits a stream of bytes into whole lines. Only "\n" ends a line.
#
# `str.splitlines`, and the line readers of HTTP clients that use it, end one at eight other
# characters too, some of which JSON leaves as they are.


class Lines:
    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that are complete after `data`, without their newlines."""
        *complete, self._partial = (self._partial + data).split(b"\n")
        return [line.decode(errors="replace") for line in complete]

    def last(self) -> list[str]:
        """The unfinished line after the last newline, if there is one."""
        return [self._partial.decode(errors="replace")] if self._partial else []


def split_lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def lines_of(chunks: Iterable[bytes]) -> Iterator[str]:
    lines = Lines()
    for chunk in chunks:
        yield from lines.feed(chunk)
    yield from lines.last()


async def alines_of(chunks: AsyncIterable[bytes]) -> AsyncGenerator[str, None]:
    lines = Lines()
    async for chunk in chunks:
        for line in lines.feed(chunk):
            yield line
    for line in lines.last():
        yield line


# Sets of ranks as ranges: `0-192, 195`.

MAX_SPANS = 50  # ranges in a sentence


def spans(ranks: Iterable[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    return ", ".join(_text(span) for span in _runs(ranks))


def limited_spans(ranks: Iterable[int], most: int = MAX_SPANS) -> str:
    """The same for a sentence, which names the first ranges and counts the ranks after them."""
    runs = list(_runs(ranks))
    text = ", ".join(_text(span) for span in runs[:most])
    remaining = sum(last - first + 1 for first, last in runs[most:])
    return f"{text} and {remaining} more" if remaining else text


def _runs(ranks: Iterable[int]) -> Iterator[tuple[int, int]]:
    first = last = -1
    for rank in sorted(ranks):
        if first >= 0 and rank <= last + 1:
            last = rank
            continue
        if first >= 0:
            yield first, last
        first = last = rank
    if first >= 0:
        yield first, last


def _text(span: tuple[int, int]) -> str:
    first, last = span
    return str(first) if first == last else f"{first}-{last}"


# The one parser and printer of durations, quantities and sizes.
#
# Durations are what people write: `30s`, `5m`, `2h`, or a plain number of seconds. Quantities are
# those of Kubernetes: `2`, `500m`, `4Gi`, `1048576Ki`.

DURATION_EXAMPLES = "30s, 5m, 2h, 7d or a number of seconds"
_UNITS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}
# As Kubernetes has it: decimal suffixes with a small k, binary ones with a capital K.
QUANTITY_PATTERN = r"^[0-9]+(\.[0-9]+)?(m|k|[MGTPE]|[KMGTPE]i)?$"
_QUANTITY = re.compile(QUANTITY_PATTERN)
_SCALE = {"": 1.0, "m": 1e-3}
_SCALE |= {suffix: 1000.0**power for power, suffix in enumerate("kMGTPE", 1)}
_SCALE |= {f"{suffix}i": 1024.0**power for power, suffix in enumerate("KMGTPE", 1)}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|[smhd])")


def parse_duration(field: str, value: str | int | float) -> float:
    """Seconds for `90`, `"90"`, `"30s"`, `"1h30m"`. Raises ValidationError, which names `field`."""
    expected = f"expected {DURATION_EXAMPLES}"
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValidationError(field, value, expected)
    text = str(value).strip()
    try:
        seconds = float(text)
    except ValueError:
        parts = _PART.findall(text)
        if not parts or "".join(number + unit for number, unit in parts) != text:
            raise ValidationError(field, value, expected) from None
        seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if math.isnan(seconds) or seconds < 0:
        raise ValidationError(field, value, expected)
    return seconds


def format_duration(seconds: float) -> str:
    """`0.4s`, `12s`, `3m05s`, `2h10m`, `3d04h`."""
    rounded = int(seconds)
    if seconds < 10:
        return f"{seconds:.1f}s"
    if rounded < 60:
        return f"{rounded}s"
    if rounded < 3600:
        return f"{rounded // 60}m{rounded % 60:02}s"
    if rounded < 86_400:
        return f"{rounded // 3600}h{rounded // 60 % 60:02}m"
    return f"{rounded // 86_400}d{rounded // 3600 % 24:02}h"


def check_quantity(field: str, value: object) -> None:
    """Raises ValidationError unless it is None or a quantity of Kubernetes."""
    if value is not None and not (isinstance(value, str) and _QUANTITY.fullmatch(value)):
        expected = "expected a quantity such as '2', '500m', '4Gi' or '1048576Ki'"
        raise ValidationError(field, value, expected)


def check_memory(field: str, value: object) -> None:
    """As `check_quantity`, and no slip such as 4 for 4Gi: no program starts in less than 1 MiB."""
    check_quantity(field, value)
    if isinstance(value, str) and 0 < parse_quantity(value) < 2**20:
        raise ValidationError(field, value, "expected at least 1Mi: a number alone is bytes")


def parse_quantity(text: str) -> float:
    """The number for `2`, `500m` (0.5), `4Gi` (4294967296). The spec has checked the text."""
    digits = text.rstrip("mkKMGTPEi")
    return float(digits) * _SCALE[text[len(digits) :]]


def format_bytes(count: float) -> str:
    """`812 MiB`, `19.6 GiB`, `2 KiB`."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            share = count / unit
            digits = f"{share:.0f}" if share >= 100 else f"{share:.1f}".removesuffix(".0")
            return f"{digits} {name}"
    return f"{count:.0f} B"
