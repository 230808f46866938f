"""What ranks wrote, by rank: from their pods while those are there, else what was kept.

A pod that ended on its own stays until the training is removed, and its log with it. Of one that
was taken away (scaled down, evicted) the archive has the last part; failing that, the few lines
that came with its exit.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from atoll.core.errors import NotFound, Permanent, Temporary
from atoll.core.status import LogLine, PlacedLine, RankStatus, Training
from atoll.kubernetes.archive import Archive
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.mirror import Mirror
from atoll.kubernetes.names import UID
from atoll.kubernetes.pod import Pod

Json = dict[str, Any]

LOOK_S = 0.5
AT_ONCE = 16
GONE = "[the log went with its pod; these are the last lines of it]"


class LogSource(NamedTuple):
    """Where the lines of one training come from."""

    cluster: Cluster
    training: Training
    pods: Callable[[], Awaitable[list[Json]]]
    archived: Callable[[int], Awaitable[list[str]]]

    @classmethod
    def of(
        cls, training: Training, namespace: str, cluster: Cluster, mirror: Mirror, archive: Archive
    ) -> LogSource:
        async def pods() -> list[Json]:
            if mirror.is_live:
                return list(mirror.of(training.uid).values())
            labels = f"{UID}={training.uid}"
            return (await cluster.list("pods", namespace, labels=labels)).items

        async def archived(rank: int) -> list[str]:
            return await archive.lines(namespace, training.uid, rank)

        return cls(cluster, training, pods, archived)


async def read_logs(
    source: LogSource,
    *,
    ranks: Sequence[int] | None,
    tail: int | None,
    follow: Callable[[], bool] | None,
) -> AsyncIterator[LogLine]:
    """Lines of all wanted ranks. Without `follow`, rank by rank in order."""
    if follow is None:
        pods = _by_rank(await source.pods(), ranks)
        for rank in sorted({*pods, *_gone(source.training, ranks)}):
            async for line in _whole(source, rank, pods.get(rank, []), tail):
                yield line
        return
    places = {} if tail is None else await tail_places(source, ranks=ranks, tail=tail)
    async for line in follow_logs(source, places, ranks=ranks, is_over=follow):
        yield line


async def tail_places(
    source: LogSource, *, ranks: Sequence[int] | None, tail: int
) -> dict[int, int]:
    """After which nanosecond the last `tail` lines of each rank were written."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def place(mine: list[Pod]) -> int | None:
        times: list[int] = []
        async with slots:
            for pod in reversed(mine):
                wanted = max(tail - len(times), 1)
                with contextlib.suppress(NotFound, Permanent, Temporary):
                    lines = source.cluster.dated_log(
                        pod.metadata["namespace"], pod.name, tail=wanted
                    )
                    times = [at async for at, _ in lines] + times
                if len(times) >= max(tail, 1):
                    break
        if not times:
            return None
        return times[-tail:][0] - 1 if tail else times[-1]

    pods = _by_rank(await source.pods(), ranks)
    places = await asyncio.gather(*(place(mine) for mine in pods.values()))
    return {rank: at for rank, at in zip(pods, places, strict=True) if at is not None}


async def _whole(
    source: LogSource, rank: int, mine: list[Pod], tail: int | None
) -> AsyncIterator[LogLine]:
    """All attempts of a rank that can still be read, or what is known of the last one."""
    lines = await source.archived(rank) if _was_taken(source.training, rank, mine) else []
    for pod in mine:
        try:
            async for text in source.cluster.log(pod.metadata["namespace"], pod.name, tail=tail):
                lines.append(text)
        except (NotFound, Permanent, Temporary):
            continue  # not started yet, or gone since
    last = _known(source.training).get(rank)
    if not lines and last is not None and last.exit is not None and last.exit.log_tail:
        lines = [GONE, *last.exit.log_tail]
    for text in lines if tail is None else lines[len(lines) - min(tail, len(lines)) :]:
        yield LogLine(rank=rank, text=text)


def _was_taken(training: Training, rank: int, mine: list[Pod]) -> bool:
    """Whether some attempt of the rank has no pod any more."""
    last = _known(training).get(rank)
    if last is None or last.attempt < 0:
        return False
    return last.previous is not None or all(pod.attempt != last.attempt for pod in mine)


async def follow_logs(
    source: LogSource,
    places: Mapping[int, int],
    *,
    ranks: Sequence[int] | None,
    is_over: Callable[[], bool],
) -> AsyncIterator[LogLine]:
    """From these places on, as it is written. A stream that breaks is taken up where it did."""
    lines: asyncio.Queue[LogLine] = asyncio.Queue(maxsize=10_000)
    readers: dict[str, asyncio.Task[None]] = {}
    ended: set[str] = set()

    async def read(pod: Pod) -> None:
        after = places.get(pod.rank, 0)
        while True:
            is_whole = pod.name in ended  # then nothing is added while it is read
            try:
                async for at, text in source.cluster.dated_log(
                    pod.metadata["namespace"], pod.name, after=after, follow=True
                ):
                    after = at
                    await lines.put(PlacedLine(rank=pod.rank, text=text, at=at))
            except NotFound:
                return
            except (Permanent, Temporary):  # its container is not there yet, or the server is away
                is_whole = False
            if is_whole:
                return
            await asyncio.sleep(LOOK_S)

    try:
        while True:
            is_last = is_over()
            for mine in _by_rank(await source.pods(), ranks).values():
                for pod in mine:
                    if pod.is_over:
                        ended.add(pod.name)
                    if pod.name not in readers and ("running" in pod.state or pod.is_over):
                        readers[pod.name] = asyncio.create_task(read(pod))
            if is_last:
                await _settle(list(readers.values()))
            try:
                async with asyncio.timeout(0 if is_last else LOOK_S):
                    while True:
                        yield await lines.get()
            except TimeoutError:
                pass
            while not lines.empty():
                yield lines.get_nowait()
            if is_last:
                return
    finally:
        for task in readers.values():
            task.cancel()
        await asyncio.gather(*readers.values(), return_exceptions=True)


async def _settle(readers: list[asyncio.Task[None]]) -> None:
    """The streams of ended pods end by themselves; none is waited for long."""
    if readers:
        await asyncio.wait(readers, timeout=5.0)


def _by_rank(manifests: list[Json], ranks: Sequence[int] | None) -> dict[int, list[Pod]]:
    by_rank: dict[int, list[Pod]] = {}
    for pod in sorted(map(Pod, manifests), key=lambda p: p.created_at):
        if pod.rank >= 0 and (ranks is None or pod.rank in ranks):
            by_rank.setdefault(pod.rank, []).append(pod)
    return by_rank


def _known(training: Training) -> dict[int, RankStatus]:
    return {r.rank: r for r in (*training.status.retired, *training.status.ranks)}


def _gone(training: Training, ranks: Sequence[int] | None) -> set[int]:
    known = _known(training).values()
    return {r.rank for r in known if r.exit and (ranks is None or r.rank in ranks)}
