"""Work that is done at once, or beside the training."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any, NamedTuple

from atoll.diloco.data.ranges import Ranges
from atoll.diloco.stream import Commit


class PendingRound(NamedTuple):
    """A round on its way: `job` yields its commit, when it began and when it ended."""

    fragment: int
    weight: float
    mark: tuple[float, int]  # what was counted, and the steps, when it was sent
    job: Future[tuple[Commit, float, float]]
    blocked_s: float
    is_bad: bool  # its movement is not finite, and was left out
    claimed: Ranges  # the data that its movement was trained on
    is_last: bool = False
    is_background: bool = False  # the model trains on meanwhile


def at_once(work: Callable[[], Any]) -> Future[Any]:
    job: Future[Any] = Future()
    job.set_result(work())
    return job


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Run in a daemon thread, so that a replica that has to stop does not wait for the others."""
    job: Future[Any] = Future()

    def run() -> None:
        try:
            job.set_result(work())
        except BaseException as error:
            job.set_exception(error)

    Thread(target=run, name="atoll-diloco-round", daemon=True).start()
    return job
