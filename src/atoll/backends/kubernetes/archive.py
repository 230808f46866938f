"""The log archive: ConfigMaps with the last lines of ranks whose pods were deleted.

A kubelet drops the log of a deleted pod as soon as the pod has ended, so the archive reads the log
while the pod is still ending. It needs no volume, every operator can read it, and it is deleted
with the training.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.names import INDEX, LOG_OF, MANAGED, UID
from atoll.backends.kubernetes.pod import Pod
from atoll.core.errors import AtollError, NotFound, Temporary
from atoll.core.lines import split_lines

Json = dict[str, Any]
log = logging.getLogger(__name__)

PER_RANK = 64 * 2**10
PER_TRAINING = 4 * 2**20
AT_ONCE = 50
SEEN_KEPT = 10_000
OPEN_S = 3.0  # a scale-down waits no longer for the logs of what it stops
TRIES, AGAIN_S = 3, 0.5


class Archive:
    """Reads the logs of pods that are being deleted, and stores their last part."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._opened: dict[str, asyncio.Event] = {}  # whether the stream of a log is open
        self._observed: set[str] = set()
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def begin(self, pods: Sequence[Pod], ranks: int) -> None:
        """The logs of pods that are about to be deleted are being read, or a moment has passed.

        On a busy node a pod may be gone before anybody has seen that it leaves.
        """
        for pod in pods:
            self.capture(pod, ranks)
        opening = [
            self._opened[key] for pod in pods if (key := pod.metadata["uid"]) in self._opened
        ]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_S):
                for opened in opening:
                    await opened.wait()

    def capture(self, pod: Pod, ranks: int) -> None:
        """The log is read until the pod ends, then stored. A second call for a pod does nothing."""
        key = pod.metadata["uid"]
        if key not in self._observed:
            if len(self._observed) > SEEN_KEPT:
                self._observed = set(self._tasks)
            self._observed.add(key)
            limit = max(min(PER_RANK, PER_TRAINING // max(ranks, 1)), 1024)
            opened = self._opened[key] = asyncio.Event()
            self._tasks[key] = asyncio.create_task(self._capture(pod, limit, opened))
            self._tasks[key].add_done_callback(lambda _: self._end(key))

    def _end(self, key: str) -> None:
        self._tasks.pop(key, None)
        self._opened.pop(key, None)

    async def settle(self, pods: Iterable[Pod], timeout_s: float) -> None:
        """The logs of these pods are stored, or `timeout_s` has passed."""
        keys = (pod.metadata.get("uid") for pod in pods)
        tasks = [self._tasks[key] for key in keys if key in self._tasks]
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
        tasks = list(self._tasks.values())
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
            lines = self._cluster.log(
                pod.metadata["namespace"], pod.name, follow=True, on_open=opened.set
            )
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
        labels = pod.metadata.get("labels") or {}
        # Kubernetes deletes it with the Job, even if the Job is gone by now.
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
                    UID: labels.get(UID, ""),
                    LOG_OF: pod.annotations[INDEX],
                },
            },
            "data": {"log": text},
        }
        await self._cluster.patch(
            "configmaps", pod.metadata["namespace"], pod.name, body, type="apply"
        )


def _last(text: str, limit: int) -> str:
    """The last `limit` bytes of `text`, cut at the start of a line."""
    data = text.encode()
    if len(data) <= limit:
        return text
    return data[-limit:].split(b"\n", 1)[-1].decode(errors="replace")
