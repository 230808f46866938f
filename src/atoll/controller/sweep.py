"""What trainings removed by force have left with a backend is cleared away, now and then."""

from __future__ import annotations

import asyncio
import logging

from atoll.core.errors import AtollError
from atoll.core.ports import Store, Sweeping

log = logging.getLogger(__name__)

SWEEP_S = 300.0


async def keep_swept(store: Store, executor: Sweeping) -> None:
    """Until cancelled. A backend that does not answer is tried again the next time."""

    async def known() -> set[str]:
        return {training.uid for training in await store.list()}

    while True:
        try:
            await executor.sweep(known)
        except AtollError as error:
            log.warning("sweeping: %s", error)
        await asyncio.sleep(SWEEP_S)
