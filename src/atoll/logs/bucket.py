"""The logs of ranks in an object store: pieces of what each wrote, under the rank's own prefix.

A piece is named by its attempt and the offset of its first byte. An offset in a log is both in one
number, so that a reader can go on where it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from atoll.core.errors import Temporary
from atoll.core.status import LogLine, OffsetLine
from atoll.logs.files import LINE_BYTES, merged
from atoll.objectstore.bucket import Bucket

T = TypeVar("T")

CHUNK_BYTES = 65_536  # what a pipe holds by default
PIPE_BYTES = 1 << 20  # what Linux lets any user set: a rank that prints waits less often
PIECE_BYTES = 1 << 20  # of an object, at the most: a reader holds one of each rank
MAX_BYTES = 16 << 20  # of what could not be uploaded yet; older lines are dropped
OFTEN, OFTEN_S, LATER_S = 20, 0.5, 3.0  # so many pieces soon after they were written
CLOSE_S = 30.0  # for what was not uploaded yet when the rank has ended: 16 MB on a slow line
POLL_S, MAX_POLL_S, GROWTH = 0.2, 2.0, 1.3  # each poll is a LIST a rank, and costs money
AT_ONCE = 16  # requests: as many as a client has connections
ATTEMPT_SHIFT = 40  # bits for the offset: a log of 1 TiB an attempt


class LogPiece(NamedTuple):
    attempt: int
    offset: int
    ms: int | None = None  # when its last byte was read, since the epoch

    @property
    def name(self) -> str:
        at = "" if self.ms is None else f".{self.ms}"
        return f"{self.attempt:06d}.{self.offset:012d}{at}"

    @property
    def time(self) -> float | None:
        return None if self.ms is None else self.ms / 1000

    @property
    def position(self) -> int:
        return self.attempt << ATTEMPT_SHIFT | self.offset

    @classmethod
    def of(cls, name: str) -> LogPiece | None:
        parts = name.split(".")
        is_one = len(parts) in (2, 3) and all(part.isdigit() for part in parts)
        return cls(*map(int, parts)) if is_one else None


class UploadedLog:
    """Takes the place of this process's output: what is written goes on to it, and to the store.

    A store that is slow or away never holds up the rank.
    """

    def __init__(self, store: Bucket, attempt: int, *, often_s: float = OFTEN_S) -> None:
        self._store = store
        self._attempt = attempt
        self._often_s = often_s
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._offset = 0
        self._read_at = 0.0
        self._news = threading.Condition()
        self._is_over = False
        self._own = os.dup(1)
        self._output, output_in = os.pipe()
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        for fd in (1, 2):
            os.dup2(output_in, fd)
        os.close(output_in)
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._read, self._upload)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """All that was written is in the store, or could not be for so long."""
        for fd in (1, 2):
            os.dup2(self._own, fd)
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _read(self) -> None:
        while data := os.read(self._output, CHUNK_BYTES):
            with contextlib.suppress(OSError):  # nobody reads
                left = memoryview(data)
                while left:
                    left = left[os.write(self._own, left) :]
            with self._news:
                self._read_at = time.time()
                self._waiting.append(data)
                self._size += len(data)
                while self._size > MAX_BYTES and len(self._waiting) > 1:
                    dropped = len(self._waiting.popleft())
                    self._size -= dropped
                    self._offset += dropped
                self._news.notify()
        with self._news:
            self._is_over = True
            self._news.notify()

    def _upload(self) -> None:
        count, pause_s = 0, 0.2
        while True:
            piece = self._next()
            if piece is None:
                return
            name, data = piece
            while True:
                try:
                    self._store.put(name, data)
                    break
                except Exception:  # of whatever client the store has: tried again
                    time.sleep(pause_s)
                    pause_s = min(pause_s * 2, 10.0)
            count, pause_s = count + 1, 0.2
            with self._news:
                self._news.wait_for(
                    lambda: self._is_over or self._size >= PIECE_BYTES,
                    self._often_s if count < OFTEN else LATER_S,
                )

    def _next(self) -> tuple[str, bytes] | None:
        """The name of the next piece and what is in it, once there is something; None when there
        will be no more."""
        with self._news:
            self._news.wait_for(lambda: self._waiting or self._is_over)
            if not self._waiting:
                return None
            parts, size = [], 0
            while self._waiting and size < PIECE_BYTES:
                parts.append(self._waiting.popleft())
                size += len(parts[-1])
            offset, self._offset = self._offset, self._offset + size
            self._size -= size
            piece = LogPiece(self._attempt, offset, round(self._read_at * 1000))
            return piece.name, b"".join(parts)


class ObjectLogs:
    """The logs of one training, as a reader sees them. `open_rank` opens the prefix of a rank."""

    def __init__(self, open_rank: Callable[[int], Bucket], ranks: Sequence[int]) -> None:
        self._stores = {rank: open_rank(rank) for rank in ranks}

    async def offsets(self, tail: int) -> dict[int, int]:
        """Where the last `tail` lines of each rank begin; of one without a log there is none."""
        limit = asyncio.Semaphore(AT_ONCE)

        async def position(rank: int) -> tuple[int, int | None]:
            async with limit:
                return rank, await _ask(self._tail_offset, rank, tail)

        positions = await asyncio.gather(*map(position, self._stores))
        return {rank: at for rank, at in positions if at is not None}

    async def lines(
        self, offsets: Mapping[int, int], follow: Callable[[], bool] | None
    ) -> AsyncIterator[LogLine]:
        readers = {
            rank: _RankReader(rank, store, offsets.get(rank, 0))
            for rank, store in self._stores.items()
        }
        limit, pause_s = asyncio.Semaphore(AT_ONCE), POLL_S

        async def read(reader: _RankReader) -> list[LogLine]:
            async with limit:
                return await _ask(reader.read)

        while True:
            is_last = follow is None or follow()
            batches = await asyncio.gather(*map(read, readers.values()))
            for line in merged([iter(batch) for batch in batches]):
                yield line
            if is_last:
                break
            pause_s = POLL_S if any(batches) else min(pause_s * GROWTH, MAX_POLL_S)
            await asyncio.sleep(pause_s)
        for reader in readers.values():
            for line in reader.remainder():
                yield line

    def _tail_offset(self, rank: int, tail: int) -> int | None:
        store = self._stores[rank]
        pieces = sorted(filter(None, map(LogPiece.of, store.entries())))
        if not pieces:
            return None
        lines = 0
        for piece in reversed(pieces):
            data = store.get(piece.name) or b""
            end = len(data) - 1 if piece == pieces[-1] and data.endswith(b"\n") else len(data)
            while lines <= tail:
                at = data.rfind(b"\n", 0, end)
                if at < 0:
                    break
                lines += 1
                end = at
                if lines == tail:
                    return piece.position + at + 1
        return pieces[0].position


class _RankReader:
    def __init__(self, rank: int, store: Bucket, position: int) -> None:
        self._rank = rank
        self._store = store
        self._at = position
        self._partial = b""
        self._time: float | None = None

    def read(self) -> list[LogLine]:
        """The lines that are new since the last time."""
        lines: list[LogLine] = []
        for piece in self._pieces():
            data = self._store.get(piece.name)
            if data is None:
                continue
            if piece.position + len(data) <= self._at:
                continue
            if piece.attempt != self._at >> ATTEMPT_SHIFT:
                lines += self.remainder()
            data = data[max(self._at - piece.position, 0) :]
            self._at = max(piece.position, self._at)
            complete = self._partial + data
            at = self._at - len(self._partial)
            *full, self._partial = complete.split(b"\n")
            self._time = piece.time
            for line in full:
                at += len(line) + 1
                lines.append(_line(self._rank, line, at, self._time))
            self._at += len(data)
            if len(self._partial) >= LINE_BYTES:
                lines += self.remainder()
        return lines

    def remainder(self) -> list[LogLine]:
        """A line that has no end yet."""
        remainder, self._partial = self._partial, b""
        return [_line(self._rank, remainder, self._at, self._time)] if remainder else []

    def _pieces(self) -> list[LogPiece]:
        """Those that reach beyond the offset: the last one at or before it, and all after it."""
        pieces = sorted(filter(None, map(LogPiece.of, self._store.entries())))
        first = max((i for i, piece in enumerate(pieces) if piece.position <= self._at), default=0)
        return pieces[first:]


def _line(rank: int, text: bytes, at: int, time: float | None) -> LogLine:
    return OffsetLine(rank=rank, text=text.decode("utf-8", errors="replace"), time=time, at=at)


async def _ask(work: Callable[..., T], *args: object) -> T:
    """In a thread, again where the store fails for a moment."""
    for pause_s in (0.2, 1.0, 3.0):
        try:
            return await asyncio.to_thread(work, *args)
        except Temporary:
            await asyncio.sleep(pause_s)
    return await asyncio.to_thread(work, *args)
