"""Results of ranks in marked lines of their logs: a pod has neither folder nor bucket.

A mark names the launch by a nonce, the call that made it, how the value is written and which part
of it the line holds. `agent/result.py` prints them.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NamedTuple

from msgspec.structs import replace

from atoll.agent.result import CHUNK_BYTES, MARK, MAX_BYTES, NONE, Result, nonce_of
from atoll.core.status import LogLine
from atoll.logs.files import merged

TORN = "the result is not complete in the log: the rank ended while it wrote it, or it was cut off"
NEAR_END = 64  # last lines in which a result is looked for first: most results are small
_MARK = re.compile(
    r"(?P<nonce>[0-9a-f]{32}) (?P<call>[0-9a-f]{8}) (?P<encoding>json|msgpack|pickle|none) "
    r"(?P<at>[0-9]{1,4}) (?P<count>[0-9]{1,4}) (?P<data>[A-Za-z0-9+/]*={0,2})"
)


class Reading(NamedTuple):
    """What a log says of a rank's result."""

    result: Result | None
    is_torn: bool = False  # the rank gave one, and only a part of it is in the log


class ResultPart(NamedTuple):
    call: str
    encoding: str
    at: int
    total: int  # number of parts
    data: bytes


def visible(line: str) -> str | None:
    """Return the part of a line that the program printed; None if all of it is a result."""
    text, mark, _ = line.partition(MARK)
    return line if not mark else text or None


def without_results(lines: Iterable[str]) -> list[str]:
    """Return the lines as the program printed them."""
    return [text for line in lines if (text := visible(line)) is not None]


async def strip_results(lines: AsyncIterator[LogLine]) -> AsyncIterator[LogLine]:
    """Yield the lines as the programs printed them."""
    try:
        async for line in lines:
            text = visible(line.text)
            if text is not None:
                yield line if text == line.text else replace(line, text=text)
    finally:
        if hasattr(lines, "aclose"):
            await lines.aclose()


async def read_without_results(
    read: Callable[[int | None], AsyncIterator[LogLine]], tail: int | None
) -> AsyncIterator[LogLine]:
    """Yield the last lines as they were printed: `tail` does not count results.

    `read` gives the last lines of each rank, or all.
    """
    if not tail or not any([MARK in line.text async for line in read(NEAR_END)]):
        async for line in strip_results(read(tail)):
            yield line
        return
    extra = NEAR_END
    while True:  # further back until what was printed fills `tail`, or the logs begin
        counts: defaultdict[int, int] = defaultdict(int)
        texts: defaultdict[int, list[LogLine]] = defaultdict(list)
        async for line in read(tail + extra):
            counts[line.rank] += 1
            text = visible(line.text)
            if text is not None:
                texts[line.rank].append(replace(line, text=text))
        is_cut = [rank for rank, count in counts.items() if count == tail + extra]
        if all(len(texts[rank]) >= tail for rank in is_cut):
            break
        extra *= 4
    for line in merged([iter(texts[rank][-tail:]) for rank in sorted(texts)]):
        yield line


async def result_in_log(
    read: Callable[[int | None], AsyncIterator[LogLine]], uid: str
) -> tuple[str, bytes] | None:
    """Return the last whole result in a log; with the encoding `none`, why there is only a part."""

    async def texts(tail: int | None) -> AsyncIterator[str]:
        async for line in read(tail):
            yield line.text

    reading = await find_result(texts, nonce_of(uid))
    return (NONE, TORN.encode()) if reading.is_torn else reading.result


def parts_expected(lines: Iterable[str], nonce: str) -> int:
    """The number of lines that the last result in these lines has; 0 without one."""
    return max((part.total for line in lines if (part := _part(line, nonce))), default=0)


def read_result(lines: Iterable[str], nonce: str) -> Reading:
    """The last complete result in the log. Marks of others and broken ones do not count."""
    pieces: dict[str, dict[int, bytes]] = {}
    last: Result | None = None
    for line in lines:
        part = _part(line, nonce)
        if part is None:
            continue
        mine = pieces.setdefault(part.call, {})
        mine[part.at] = part.data
        if len(mine) == part.total and part.total - 1 in mine:
            last = Result(part.encoding, b"".join(mine[at] for at in range(part.total)))
            del pieces[part.call]
    return Reading(last, is_torn=last is None and bool(pieces))


async def find_result(texts: Callable[[int | None], AsyncIterator[str]], nonce: str) -> Reading:
    """The result in a log, of which `texts` gives the last lines, or all.

    The whole log is read only where its end does not have the result.
    """
    marked, count = await _read_marked(texts(NEAR_END))
    if count < NEAR_END:
        return read_result(marked, nonce)
    if parts := parts_expected(marked, nonce):
        marked, _ = await _read_marked(texts(parts + NEAR_END))
        reading = read_result(marked, nonce)
        if reading.result is not None:
            return reading
    marked, _ = await _read_marked(texts(None))
    return read_result(marked, nonce)


async def _read_marked(texts: AsyncIterator[str]) -> tuple[list[str], int]:
    """The lines with a mark, and the number of all."""
    marked, count = [], 0
    async for text in texts:
        count += 1
        if MARK in text:
            marked.append(text)
    return marked, count


def _part(line: str, nonce: str) -> ResultPart | None:
    """None if the line is no mark of this launch."""
    _, mark, remainder = line.partition(MARK)
    match = _MARK.fullmatch(remainder.rstrip("\r\n")) if mark else None
    if match is None or match["nonce"] != nonce:
        return None
    at, count = int(match["at"]), int(match["count"])
    try:
        data = base64.b64decode(match["data"], validate=True)
    except binascii.Error:
        return None
    is_complete = at < count and len(data) <= CHUNK_BYTES and count <= MAX_BYTES // CHUNK_BYTES + 1
    return ResultPart(match["call"], match["encoding"], at, count, data) if is_complete else None
