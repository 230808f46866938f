"""The logs of ranks: read from their pods while those exist, from the archive afterwards.

A pod that ended on its own stays until the training is removed, and so does its log. For a deleted
pod (scaled down, evicted) the archive has the last part of the log; failing that, the last few
lines are in the exit that was recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from atoll.backends.kubernetes.client import Cluster, Mirror
from atoll.backends.kubernetes.names import INDEX, LOG_OF, MANAGED, UID
from atoll.backends.kubernetes.pod import Pod
from atoll.core.errors import AtollError, NotFound, Permanent, Temporary
from atoll.core.status import LogLine, OffsetLine, RankStatus, Training
from atoll.core.text import split_lines
from atoll.logs.files import amerged

Json = dict[str, Any]
log = logging.getLogger(__name__)

POLL_S = 0.5  # seconds between checks for new pods, and before a broken stream is opened again
AT_ONCE = 16  # logs read at a time, each over a connection of its own
DELETED_NOTE = "[the log was deleted with its pod; these are its last lines]"


class LogSource(NamedTuple):
    """Where the lines of one training come from."""

    cluster: Cluster
    training: Training
    namespace: str
    mirror: Mirror[Pod]
    archive: Archive
    is_shared: bool = False  # other processes archived logs of pods that this one never knew

    async def pods(self) -> list[Pod]:
        if self.mirror.is_live:
            return list(self.mirror.of(self.training.uid).values())
        labels = f"{UID}={self.training.uid}"
        listed = await self.cluster.list("pods", self.namespace, labels=labels)
        return [Pod(manifest) for manifest in listed.items]

    async def archived(self, rank: int) -> list[str]:
        return await self.archive.lines(self.namespace, self.training.uid, rank)


async def read_logs(
    source: LogSource,
    *,
    ranks: Sequence[int] | None,
    tail: int | None,
    follow: Callable[[], bool] | None,
) -> AsyncIterator[LogLine]:
    """The lines of the chosen ranks, in the order of their times. Without `follow`, many ranks come
    one after another: each is a connection."""
    if follow is None:
        pods = _by_rank(await source.pods(), ranks)
        unknown = (ranks or ()) if source.is_shared else ()
        chosen = sorted({*pods, *_ended_ranks(source.training, ranks), *unknown})
        logs = [_read_rank(source, rank, pods.get(rank, []), tail) for rank in chosen]
        if len(logs) > 1:  # one that cannot be read must not hide the others
            logs = [_with_errors(rank, log) for rank, log in zip(chosen, logs, strict=True)]
        for group in (logs,) if len(logs) <= AT_ONCE else ([log] for log in logs):
            async for line in amerged(group):
                yield line
        return
    offsets = {} if tail is None else await tail_offsets(source, ranks=ranks, tail=tail)
    unseen = set((ranks or ()) if source.is_shared else ())
    async for line in follow_logs(source, offsets, ranks=ranks, is_over=follow):
        unseen.discard(line.rank)
        yield line
    for rank in sorted(unseen):
        async for line in _read_rank(source, rank, [], tail):
            yield line


async def tail_offsets(
    source: LogSource, *, ranks: Sequence[int] | None, tail: int
) -> dict[int, int]:
    """By rank, the nanosecond after which its last `tail` lines were written."""
    slots = asyncio.Semaphore(AT_ONCE)

    async def offset_of(pods: list[Pod]) -> int | None:
        times: list[int] = []
        async with slots:
            for pod in reversed(pods):
                count = max(tail - len(times), 1)
                with contextlib.suppress(NotFound, Permanent, Temporary):
                    lines = source.cluster.log_with_times(pod.namespace, pod.name, tail=count)
                    times = [at async for at, _ in lines] + times
                if len(times) >= max(tail, 1):
                    break
        if not times:
            return None
        return times[-tail:][0] - 1 if tail else times[-1]

    by_rank = _by_rank(await source.pods(), ranks)
    offsets = await asyncio.gather(*(offset_of(pods) for pods in by_rank.values()))
    return {rank: at for rank, at in zip(by_rank, offsets, strict=True) if at is not None}


async def _read_rank(
    source: LogSource, rank: int, pods: list[Pod], tail: int | None
) -> AsyncIterator[LogLine]:
    """The logs of all attempts of a rank that can still be read, or the last lines recorded."""
    lines = _all_lines(source, rank, pods, tail)
    if tail is None:
        async for line in lines:
            yield line
        return
    for line in deque([line async for line in lines], maxlen=tail):
        yield line


async def _with_errors(rank: int, lines: AsyncIterator[LogLine]) -> AsyncIterator[LogLine]:
    """The lines, with a line in place of an error."""
    try:
        async for line in lines:
            yield line
    except Temporary as error:
        yield LogLine(rank=rank, text=f"[the log of rank {rank} cannot be read: {error}]")


async def _all_lines(
    source: LogSource, rank: int, pods: list[Pod], tail: int | None
) -> AsyncIterator[LogLine]:
    """At least the last `tail` lines. Those in the archive have no time."""
    is_empty = True
    unreadable: Temporary | None = None
    for text in await source.archived(rank) if _was_taken(source, rank, pods) else ():
        is_empty = False
        yield LogLine(rank=rank, text=text)
    for pod in pods:
        try:
            async for at, text in source.cluster.log_with_times(pod.namespace, pod.name, tail=tail):
                is_empty = False
                yield LogLine(rank=rank, text=text, time=_seconds(at))
        except (NotFound, Permanent):
            continue  # not started yet, or deleted since
        except Temporary as error:
            unreadable = error
    last = _statuses(source.training).get(rank)
    if is_empty and last is not None and last.exit is not None and last.exit.log_tail:
        for text in (DELETED_NOTE, *last.exit.log_tail):
            yield LogLine(rank=rank, text=text)
    if unreadable is not None:
        raise unreadable


def _seconds(nanosecond: int) -> float:
    return round(nanosecond / 10**9, 3)


def _was_taken(source: LogSource, rank: int, pods: list[Pod]) -> bool:
    """Whether some attempt of the rank has no pod any more."""
    last = _statuses(source.training).get(rank)
    if last is None or last.attempt < 0:
        return source.is_shared and not pods
    return last.previous_exit is not None or all(pod.attempt != last.attempt for pod in pods)


async def follow_logs(
    source: LogSource,
    offsets: Mapping[int, int],
    *,
    ranks: Sequence[int] | None,
    is_over: Callable[[], bool],
) -> AsyncIterator[LogLine]:
    """Lines after these offsets, as they are written. A broken stream resumes where it stopped."""
    lines: asyncio.Queue[LogLine] = asyncio.Queue(maxsize=10_000)
    readers: dict[str, asyncio.Task[None]] = {}
    ended: set[str] = set()

    async def read(pod: Pod) -> None:
        after = offsets.get(pod.rank, 0)
        while True:
            is_complete = pod.name in ended  # a pod that has ended adds nothing while it is read
            try:
                async for at, text in source.cluster.log_with_times(
                    pod.namespace, pod.name, after=after, follow=True
                ):
                    after = at
                    await lines.put(OffsetLine(rank=pod.rank, text=text, time=_seconds(at), at=at))
            except NotFound:
                return
            except (Permanent, Temporary):  # its container is not there yet, or the server is away
                is_complete = False
            if is_complete:
                return
            await asyncio.sleep(POLL_S)

    try:
        while True:
            is_last = is_over()
            for pods in _by_rank(await source.pods(), ranks).values():
                for pod in pods:
                    if pod.is_over:
                        ended.add(pod.name)
                    if pod.name not in readers and (pod.is_running or pod.is_over):
                        readers[pod.name] = asyncio.create_task(read(pod))
            if is_last:
                await _settle(list(readers.values()))
            try:
                async with asyncio.timeout(0 if is_last else POLL_S):
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
    """The streams of ended pods have ended, or a few seconds have passed."""
    if readers:
        # A kubelet ends the stream of an ended container at once; one that is away never does.
        await asyncio.wait(readers, timeout=5.0)


def _by_rank(pods: list[Pod], ranks: Sequence[int] | None) -> dict[int, list[Pod]]:
    by_rank: dict[int, list[Pod]] = {}
    for pod in sorted(pods, key=lambda p: p.created_at):
        if pod.rank >= 0 and (ranks is None or pod.rank in ranks):
            by_rank.setdefault(pod.rank, []).append(pod)
    return by_rank


def _statuses(training: Training) -> dict[int, RankStatus]:
    return {r.rank: r for r in (*training.status.removed_ranks, *training.status.ranks)}


def _ended_ranks(training: Training, ranks: Sequence[int] | None) -> set[int]:
    statuses = _statuses(training).values()
    return {r.rank for r in statuses if r.exit and (ranks is None or r.rank in ranks)}


PER_RANK = 64 * 2**10  # bytes of text; a ConfigMap holds 1 MiB
PER_TRAINING = 4 * 2**20  # bytes; etcd's default quota is 2 GiB for the whole cluster
CAPTURES = 50  # logs read at a time: each is a connection through the API server to a kubelet
MAX_CAPTURED = 10_000  # uids of pods, remembered so that none is read twice: 1 MB
OPEN_S = 3.0  # a scale-down waits no longer for the logs of what it stops
CLOSE_S = 1.0  # the stream of an ended pod ends at once, and storing it is one request
TRIES, AGAIN_S = 3, 0.5  # a stream that breaks is read again; after these the log is given up


class Archive:
    """Reads the logs of pods that are being deleted, and stores their last part."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._opened: dict[str, asyncio.Event] = {}  # whether the stream of a log is open
        self._captured: set[str] = set()
        self._gate = asyncio.Semaphore(CAPTURES)

    async def begin(self, pods: Sequence[Pod], ranks: int) -> None:
        """Starts to read the logs of pods that are about to be deleted; waits `OPEN_S` at most.

        On a busy node a pod may be deleted before anybody has observed that it is ending.
        """
        for pod in pods:
            self.capture(pod, ranks)
        opening = [self._opened[key] for pod in pods if (key := pod.uid) in self._opened]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_S):
                for opened in opening:
                    await opened.wait()

    def capture(self, pod: Pod, ranks: int) -> None:
        """The log is read until the pod ends, then stored. A second call for a pod does nothing."""
        key = pod.uid
        if key not in self._captured:
            if len(self._captured) > MAX_CAPTURED:
                self._captured = set(self._tasks)
            self._captured.add(key)
            # Of a gang with thousands of ranks, at least the last lines of each.
            limit = max(min(PER_RANK, PER_TRAINING // max(ranks, 1)), 1024)
            opened = self._opened[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._capture(pod, limit, opened))
            self._tasks[key].add_done_callback(lambda _: self._end(key))

    def _end(self, key: str) -> None:
        self._tasks.pop(key, None)
        self._opened.pop(key, None)

    async def settle(self, pods: Iterable[Pod], timeout_s: float) -> None:
        """The logs of these pods are stored, or `timeout_s` has passed."""
        tasks = [self._tasks[pod.uid] for pod in pods if pod.uid in self._tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def lines(self, namespace: str, uid: str, rank: int) -> list[str]:
        """The archived lines of all deleted attempts of the rank, oldest first."""
        labels = f"{UID}={uid},{LOG_OF}={rank}"
        configmaps = await self._cluster.list("configmaps", namespace, labels=labels)
        oldest_first = sorted(
            configmaps.items, key=lambda item: str(item["metadata"]["creationTimestamp"])
        )
        return [line for item in oldest_first for line in split_lines(item["data"]["log"])]

    async def drop(self, namespace: str, uid: str) -> None:
        await self._cluster.delete_all("configmaps", namespace, labels=f"{UID}={uid},{LOG_OF}")

    async def close(self) -> None:
        """Stores the logs of pods that have just ended, and gives up on those that still run."""
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _capture(self, pod: Pod, limit: int, opened: asyncio.Event) -> None:
        try:
            async with self._gate:
                text = await self._read(pod, limit, opened)
            if text:
                await self._again(pod, lambda: self._store(pod, _last(text, limit)))
        finally:
            opened.set()

    async def _read(self, pod: Pod, limit: int, opened: asyncio.Event) -> str:
        """What could be read of the log, also if its stream broke as the pod went."""
        longest = ""

        async def read() -> None:
            nonlocal longest
            text = ""
            lines = self._cluster.log(pod.namespace, pod.name, follow=True, on_open=opened.set)
            async for line in lines:
                text += line + "\n"
                if len(text) > 2 * limit:
                    text = text[-limit:]
                longest = text if len(text) >= len(longest) else longest

        await self._again(pod, read)
        return longest

    async def _again(self, pod: Pod, work: Callable[[], Awaitable[None]]) -> None:
        """Does the work, and tries again when the server or the kubelet fails."""
        for _ in range(TRIES):
            try:
                return await work()
            except NotFound:
                return
            except Temporary as error:
                log.info("the log of pod %s: %s", pod.name, error)
                await asyncio.sleep(AGAIN_S)
            except AtollError as error:
                log.info("the log of pod %s could not be archived: %s", pod.name, error)
                return

    async def _store(self, pod: Pod, text: str) -> None:
        # Kubernetes deletes it with the Job, even if the Job no longer exists.
        owners = [
            {field: owner[field] for field in ("apiVersion", "kind", "name", "uid")}
            for owner in pod.metadata.get("ownerReferences") or ()
        ]
        body: Json = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {
                "name": pod.name,
                "ownerReferences": owners,
                "labels": {
                    MANAGED: "atoll",
                    UID: pod.labels.get(UID, ""),
                    LOG_OF: pod.annotations[INDEX],
                },
            },
            "data": {"log": text},
        }
        await self._cluster.patch("configmaps", pod.namespace, pod.name, body, type="apply")


def _last(text: str, limit: int) -> str:
    """The last `limit` bytes of `text`, cut at the start of a line."""
    data = text.encode()
    if len(data) <= limit:
        return text
    return data[-limit:].split(b"\n", 1)[-1].decode(errors="replace")
