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
        stream = Streams().run(source(), heartbeat=b"")
        first = await anext(stream)  # from here on nobody reads
        for _ in range(10):
            await asyncio.sleep(0)
        assert asked <= len(first) // size + most
        assert len(await anext(stream)) == most * size
        await stream.aclose()

    asyncio.run(stop_reading())


def test_a_quiet_stream_sends_heartbeats_and_a_busy_one_none() -> None:
    async def quiet() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.Event().wait()

    async def busy() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.01)
            yield b"x"

    async def follow() -> None:
        streams, loop = Streams(heartbeat_s=0.4), asyncio.get_running_loop()
        silent, lively = (streams.run(each, heartbeat=b"beat") for each in (quiet(), busy()))
        assert await anext(silent) == b"first"
        began, beats = loop.time(), 0
        while beats < 3:
            assert await anext(silent) == b"beat"
            beats += 1
            assert b"beat" not in await anext(lively)
        assert 0.9 <= loop.time() - began < 3
        await silent.aclose()
        await lively.aclose()
        assert len(streams) == 0

    asyncio.run(follow())


def test_a_limit_ends_a_stream_that_goes_on() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0.01)
            yield b"x"

    async def follow() -> int:
        stream = Streams().run(endless(), heartbeat=b"", limit_s=0.2)
        return len([chunk async for chunk in stream])

    assert 1 <= asyncio.run(follow()) <= 20
