"""Removes, from time to time, what trainings removed by force have left with a backend."""

from __future__ import annotations

import asyncio
import logging

from atoll.core.errors import AtollError
from atoll.core.ports import Store, Sweeping

log = logging.getLogger(__name__)

SWEEP_S = 300.0


async def keep_swept(store: Store, executor: Sweeping) -> None:
    """Sweeps until cancelled. A backend that does not answer is tried again next time."""

    async def known() -> set[str]:
        return {training.uid for training in await store.list()}

    while True:
        try:
            await executor.sweep(known)
        except AtollError as error:
            log.warning("sweeping: %s", error)
        await asyncio.sleep(SWEEP_S)
