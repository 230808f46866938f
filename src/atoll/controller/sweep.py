"""Removes, from time to time, what trainings removed by force have left with a backend."""

from __future__ import annotations

import asyncio
import logging

from atoll.core.errors import AtollError
from atoll.core.ports import Executor, Store

log = logging.getLogger(__name__)

SWEEP_S = 300.0


async def keep_swept(store: Store, executor: Executor) -> None:
    """Sweeps until cancelled. A backend that does not answer is tried again next time."""

    async def known() -> set[str]:
        return (await store.snapshot()).uids

    while True:
        try:
            await executor.sweep(known)
        except AtollError as error:
            log.warning("sweeping: %s", error)
        except Exception:  # of whatever library the backend uses
            log.exception("sweeping")
        await asyncio.sleep(SWEEP_S)
