"""What is kept for a reader that does not read is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from atoll.server.http.streams import BATCH, BATCH_BYTES, Streams


@pytest.mark.parametrize(
    ("size", "most"), [(1, BATCH), (BATCH_BYTES // 4, 4), (10 * BATCH_BYTES, 1)]
)
def test_a_reader_that_stops_holds_the_source_up(size: int, most: int) -> None:
    asked = 0

    async def source() -> AsyncIterator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            yield b"x" * size

    async def stop_reading() -> None:
        stream = Streams().run(source(), beat=b"")
        first = await anext(stream)  # from here on nobody reads
        for _ in range(10):
            await asyncio.sleep(0)
        assert asked <= len(first) // size + most
        assert len(await anext(stream)) == most * size
        await stream.aclose()

    asyncio.run(stop_reading())
