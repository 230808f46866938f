"""A background task that lives as long as a `with` block."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def beside(
    work: Coroutine[Any, Any, None], on_end: Callable[[asyncio.Task[None]], object] | None = None
) -> AsyncIterator[None]:
    """Runs `work` until the block ends, then cancels it; an error of `work` is raised then."""
    task = asyncio.create_task(work)
    if on_end is not None:
        task.add_done_callback(on_end)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
