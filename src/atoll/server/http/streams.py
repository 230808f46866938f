"""Endless answers: watches and followed logs.

A stream sends chunks of bytes, and heartbeats while there are none, so that each side notices when
the other has left. `Streams.close()` ends all of them, so that a shutdown waits for no client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

HEARTBEAT_S = 10.0  # clients take two missed ones for a lost connection; proxies wait 30 s or more
TICKS = 4  # of the one timer, in a heartbeat: streams do not all send theirs at the same time
BATCH = 500  # chunks that one write joins
BATCH_BYTES = 256 * 1024  # a client that does not read costs about twice this


class Streams:
    """All open streams of one server. One timer sends the heartbeats of all of them."""

    def __init__(self, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.heartbeat_s = heartbeat_s
        self.is_closed = False
        self._open: set[_Buffer] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._open)

    def close(self) -> None:
        self.is_closed = True
        for buffer in self._open:
            buffer.end()

    async def run(
        self,
        source: AsyncIterator[bytes],
        *,
        heartbeat: bytes,
        cut: bytes = b"",
        limit_s: float | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Yields the chunks of `source`, joined as they pile up, until it ends or `limit_s` passes.

        Sends `cut` last if the server shuts down before the source ends.
        """
        buffer = _Buffer()
        reader = asyncio.create_task(buffer.fill(source))
        self._open.add(buffer)
        if self.is_closed:
            buffer.end()
        if self._timer is None:
            self._start_timer()
        limit = None
        if limit_s is not None:
            limit = asyncio.get_running_loop().call_later(limit_s, buffer.cancel)
        try:
            while (chunk := await buffer.take()) is not None:
                yield chunk or heartbeat
            if self.is_closed and cut:
                yield cut
        finally:
            if limit is not None:
                limit.cancel()
            self._open.discard(buffer)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.heartbeat_s / TICKS, self._tick)

    def _tick(self) -> None:
        self._timer = None
        for buffer in self._open:
            buffer.tick()
        if self._open:
            self._start_timer()


class _Buffer:
    """A bounded buffer of chunks between a source and a connection."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._bytes = 0
        self._is_ready = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_over = False
        self._idle_ticks = 0

    def end(self) -> None:
        self._is_over = True
        self._is_ready.set()

    def cancel(self) -> None:
        """Ends at once, without the chunks that are left."""
        self._chunks.clear()
        self.end()

    def tick(self) -> None:
        self._idle_ticks += 1
        if self._idle_ticks >= TICKS:
            self._is_ready.set()  # with no chunk: a heartbeat

    async def fill(self, source: AsyncIterator[bytes]) -> None:
        try:
            async for chunk in source:
                self._chunks.append(chunk)
                self._bytes += len(chunk)
                self._is_ready.set()
                while len(self._chunks) >= BATCH or self._bytes >= BATCH_BYTES:
                    self._has_room.clear()
                    await self._has_room.wait()
        finally:
            self.end()
            if isinstance(source, AsyncGenerator):
                await source.aclose()

    async def take(self) -> bytes | None:
        """All chunks in the buffer; empty if it is time for a heartbeat; None at the end."""
        await self._is_ready.wait()
        self._idle_ticks = 0
        chunks, self._chunks, self._bytes = self._chunks, [], 0
        self._has_room.set()
        if not self._is_over:
            self._is_ready.clear()
        elif not chunks:
            return None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)
