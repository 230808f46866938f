"""The result of a replica as marked lines of its log, on every backend. Pure.

Each line fits into one atomic write to a pipe, so that other output of the replica never breaks
it.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

MARK = "\x1eatoll-result "
MAX_BYTES = 16 * 2**20
_CHUNK = 3000  # base64 of this and the mark stay below 4096 bytes


def result_lines(payload: bytes) -> list[bytes]:
    """The lines that a replica prints last. Each states its number and how many there are."""
    chunks = [payload[at : at + _CHUNK] for at in range(0, len(payload), _CHUNK)] or [b""]
    return [
        f"{MARK}{at} {len(chunks)} ".encode() + base64.b64encode(chunk) + b"\n"
        for at, chunk in enumerate(chunks)
    ]


def visible(line: str) -> str | None:
    """The part of a line that the user printed; None if it holds nothing but a result."""
    text, mark, _ = line.partition(MARK)
    return line if not mark else text or None


def lines_expected(lines: Iterable[str]) -> int:
    """The number of lines of the result, which each of them states; 0 without a result."""
    return next((int(parts[1]) for line in lines if (parts := _parts(line))), 0)


def result_of(lines: Iterable[str]) -> bytes | None:
    """The last complete result in the log, or None."""
    chunks: dict[int, bytes] = {}
    whole = None
    for line in lines:
        if not (parts := _parts(line)):
            continue
        at, count = int(parts[0]), int(parts[1])
        if at == 0:
            chunks = {}
        chunks[at] = base64.b64decode(parts[2] if len(parts) > 2 else "")
        if len(chunks) == count:
            whole = b"".join(chunks[index] for index in range(count))
    return whole


def _parts(line: str) -> list[str]:
    _, mark, rest = line.partition(MARK)
    return rest.split(" ") if mark else []
