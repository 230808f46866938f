"""What local ranks wrote, line by line. A place in a log is the offset of a byte in it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from atoll.core.status import LogLine, PlacedLine
from atoll.local.ranklog import log_start, read_log, tail_offset

LINE_BYTES = 1 << 20  # a longer line comes in pieces
LOOK_S, LOOK_MAX_S = 0.02, 0.2
GROWTH = 1.15  # of the pause between looks: what is seen late is late by a share of its age
PROGRESS_S = 1.0  # how often a bar that only ever goes back to its start is shown


def tail_places(folder: Path, ranks: Sequence[int] | None, tail: int) -> dict[int, int]:
    """Where the last `tail` lines of each rank begin; a rank that has no log yet has no place.

    Nor has one of which fewer lines are kept: it is read from its start, which says so.
    """
    places = {}
    for rank in _ranks_in(folder, ranks):
        place = tail_offset(folder / str(rank), tail)
        start = log_start(folder / str(rank))
        if start == 0 or place > start:
            places[rank] = place
    return places


async def read_lines(
    folder: Path,
    places: Mapping[int, int],
    *,
    ranks: Sequence[int] | None,
    follow: Callable[[], bool] | None,
) -> AsyncIterator[LogLine]:
    """From these places on; the logs of other ranks from their start."""
    offsets = dict(places)
    partial: dict[int, bytes] = {}
    shown: dict[int, float] = {}
    pause_s = LOOK_S
    while True:
        is_last = follow is None or follow()
        is_new = False
        for rank in _ranks_in(folder, ranks):
            while True:
                data, end = read_log(folder / str(rank), offsets.get(rank, 0))
                if not data:
                    break
                if end - len(data) > offsets.get(rank, 0):
                    was = offsets.get(rank, 0) - len(partial.pop(rank, b""))
                    offsets[rank] = log_start(folder / str(rank))
                    yield _dropped(rank, offsets[rank] - was, offsets[rank])
                    continue
                offsets[rank], is_new = end, True
                whole = partial.get(rank, b"") + data
                at = end - len(whole)
                *lines, partial[rank] = whole.split(b"\n")
                for line in lines:
                    at += len(line) + 1
                    yield _line(rank, line, at)
                if len(partial[rank]) >= LINE_BYTES:
                    yield _line(rank, partial.pop(rank), end)
        if is_last:
            break
        for rank, rest in partial.items():
            size, now = _progress(rest), time.monotonic()
            if size and now >= shown.get(rank, 0.0) + PROGRESS_S:
                partial[rank], shown[rank] = rest[size:], now
                yield _line(rank, rest[:size], offsets[rank] - len(rest) + size)
        pause_s = LOOK_S if is_new else min(pause_s * GROWTH, LOOK_MAX_S)
        await asyncio.sleep(pause_s)
    for rank, rest in sorted(partial.items()):
        if rest:
            yield _line(rank, rest, offsets[rank])


def _progress(rest: bytes) -> int:
    """How much of an unfinished line was since written over. Its last byte may be half an end."""
    size = rest.rfind(b"\r", 0, -1) + 1
    return size if rest[:size].strip(b"\r") else 0


def _dropped(rank: int, size: int, at: int) -> LogLine:
    """A line of atoll's own in place of what is not kept."""
    text = (
        f"[atoll: {size:,} bytes of this log were dropped here; the newest ones are kept: "
        "log_bytes in atoll.toml says how many]"
    )
    return PlacedLine(rank=rank, text=text, at=at)


def _line(rank: int, text: bytes, at: int) -> LogLine:
    return PlacedLine(rank=rank, text=text.decode("utf-8", errors="replace"), at=at)


def _ranks_in(folder: Path, wanted: Sequence[int] | None) -> list[int]:
    try:
        found = sorted(int(name) for name in os.listdir(folder))
    except FileNotFoundError:
        return []
    return found if wanted is None else [rank for rank in found if rank in set(wanted)]
