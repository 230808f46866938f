"""Endless answers: watches and followed logs.

A stream sends chunks of bytes, with heartbeats in between so that each side notices when the
other is gone. `Streams.close()` ends all of them, so that a shutdown waits for no client.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator

HEARTBEAT_S = 10.0
BATCH = 500
BATCH_BYTES = 256 * 1024  # a client that does not read costs about twice this


class Streams:
    """All open streams of one server."""

    def __init__(self, heartbeat_s: float = HEARTBEAT_S) -> None:
        self.heartbeat_s = heartbeat_s
        self.is_closed = False
        self._open: set[_Buffer] = set()

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
        beat: bytes,
        cut: bytes = b"",
        limit_s: float | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """The chunks of `source`, joined as they pile up, until it ends or `limit_s` has passed.

        `cut` is sent last when the server shuts down before the source has ended.
        """
        buffer = _Buffer()
        reader = asyncio.create_task(buffer.fill(source))
        self._open.add(buffer)
        if self.is_closed:
            buffer.end()
        now = asyncio.get_running_loop().time
        ends_at = None if limit_s is None else now() + limit_s
        try:
            while True:
                left_s = self.heartbeat_s if ends_at is None else ends_at - now()
                if left_s <= 0:
                    return
                chunk = await buffer.take(min(left_s, self.heartbeat_s))
                if chunk is None:
                    break
                yield chunk or beat
            if self.is_closed and cut:
                yield cut
        finally:
            self._open.discard(buffer)
            reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reader


class _Buffer:
    """A bounded buffer of chunks between a source and a connection."""

    def __init__(self) -> None:
        self._chunks: list[bytes] = []
        self._bytes = 0
        self._filled = asyncio.Event()
        self._has_room = asyncio.Event()
        self._is_over = False

    def end(self) -> None:
        self._is_over = True
        self._filled.set()

    async def fill(self, source: AsyncIterator[bytes]) -> None:
        try:
            async for chunk in source:
                self._chunks.append(chunk)
                self._bytes += len(chunk)
                self._filled.set()
                while len(self._chunks) >= BATCH or self._bytes >= BATCH_BYTES:
                    self._has_room.clear()
                    await self._has_room.wait()
        finally:
            self.end()
            if isinstance(source, AsyncGenerator):
                await source.aclose()

    async def take(self, patience_s: float) -> bytes | None:
        """All chunks in the buffer; empty if none comes within `patience_s`; None at the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await self._filled.wait()
        chunks, self._chunks, self._bytes = self._chunks, [], 0
        self._has_room.set()
        if not self._is_over:
            self._filled.clear()
        elif not chunks:
            return None
        return b"".join(chunks)
