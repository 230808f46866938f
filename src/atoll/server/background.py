"""Work that goes on beside a block, and not longer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def beside(
    work: Coroutine[Any, Any, None], on_end: Callable[[asyncio.Task[None]], object] | None = None
) -> AsyncIterator[None]:
    """`work` runs while the block does. What it failed with is raised when the block is left."""
    task = asyncio.create_task(work)
    if on_end is not None:
        task.add_done_callback(on_end)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
