"""Work on the threads of a pool that is over when the call is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, wait
from typing import TypeVar

# Threads that compute at a time: more would wait for each other, and each has memory of its own.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

S = TypeVar("S")
T = TypeVar("T")


def each(
    pool: Executor, work: Callable[[S], T], items: Iterable[S], lanes: int | None = None
) -> list[T]:
    """As `pool.map`; but when one fails, all have ended before its error is raised.

    One that went on would still write into memory that its caller, or the next attempt, uses.
    `lanes`: so many at a time, one of them on the caller's thread.
    """
    todo = list(items)
    if lanes is not None:
        return _in_lanes(pool, work, todo, min(lanes, len(todo)))
    jobs: list[Future[T]] = []
    try:
        jobs.extend(pool.submit(work, item) for item in todo)
        return [job.result() for job in jobs]
    finally:
        for job in jobs:
            job.cancel()
        wait(jobs)


def _in_lanes(pool: Executor, work: Callable[[S], T], items: list[S], lanes: int) -> list[T]:
    results: dict[int, T] = {}

    def run(lane: int) -> None:
        for index in range(lane, len(items), lanes):
            results[index] = work(items[index])

    others = [pool.submit(run, lane) for lane in range(1, lanes)]
    try:
        if items:
            run(0)
        for other in others:
            other.result()
    finally:
        for other in others:
            other.cancel()
        wait(others)
    return [results[index] for index in range(len(items))]
