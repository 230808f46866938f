"""Results of ranks in files: the rank writes one, and the exit of its attempt names it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from atoll.agent.records import Facts
from atoll.agent.result import NONE, parse_result
from atoll.core.errors import ResultError, Temporary
from atoll.core.status import Training

RESULTS = "results"  # the folder or prefix; it stays as long as the logs
RETRY_S = 5.0  # for a file server that shows a new file late
AGAIN_S = 0.2


def attempt_of(training: Training, rank: int) -> int | None:
    """Return the newest attempt of a rank that the status knows."""
    status = training.status
    known = {one.rank: one.attempt for one in (*status.removed_ranks, *status.ranks)}
    return known.get(rank)


def is_named(facts: Facts, rank: int, attempt: int) -> bool:
    """Return whether the exit of the attempt says that there is a result."""
    one = facts.attempt(rank, attempt)
    return one is not None and bool((one.exit or {}).get("result"))


async def read_result(
    read: Callable[[], bytes | None], what: str, *, is_named: bool
) -> tuple[str, bytes] | None:
    """Return the encoding and the bytes of a result; None if there is none and none is named.

    Of a damaged one the encoding is `none`, as of a result that the rank could not leave. Raises
    Temporary if one is named that cannot be read.
    """
    deadline, trouble = time.monotonic() + RETRY_S, "it is not there"
    while True:
        try:
            data = await asyncio.to_thread(read)
        except (OSError, Temporary) as error:
            data, trouble, is_named = None, str(error), True
        if data is not None:
            try:
                return parse_result(data)
            except ResultError as error:
                return NONE, f"{what} cannot be read: {error}".encode()
        if not is_named:
            return None
        if time.monotonic() >= deadline:
            raise Temporary(f"{what} cannot be read: {trouble}")
        await asyncio.sleep(AGAIN_S)
