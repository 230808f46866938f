"""Problems that a Job and its pods do not show.

`NodeProbes` notices in seconds that a node has stopped answering; the cluster takes most of a
minute.
This is reported but not acted on: a node that only this process cannot reach still runs its ranks,
and a second copy of them would be worse than a late one. `Diagnosis` reads events when needed: only
they show why a Job's pods are missing (quota, admission) or why a pod on its node does not start (a
volume, the network).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator

from msgspec.structs import replace

from atoll.backends.kubernetes.client import Cluster, keepalive
from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.pod import Pod
from atoll.core.errors import Denied
from atoll.core.ports import Key
from atoll.core.status import Observation, Training, sooner

MISSING_AFTER_S = 3.0  # if pods are missing for this long, read the Job's events
STUCK_AFTER_S = 10.0  # if a container is not created for this long, read its pod's events
STUCK_EVERY_S = 15.0  # between two reads of the events of a pod that stays stuck

CONNECT_S = 1.5  # the kernel sends a lost SYN again after 1 s
AGAIN_S = 1.0  # between two attempts to connect


class NodeProbes:
    """One idle connection to each node's kubelet. `notify` gets the trainings that are affected.

    A node that never answered is not called silent: it may be unreachable by design.
    """

    def __init__(self, port: int | None, notify: Callable[[Key], None]) -> None:
        self._port = port
        self._notify = notify
        self._addresses: dict[Key, frozenset[str]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._silent: set[str] = set()

    def follow(self, key: Key, pods: Iterable[Pod]) -> Collection[str]:
        """Watches the nodes of the training's pods; returns the addresses of silent nodes."""
        if self._port is None:
            return self._silent
        addresses = frozenset(p.address for p in pods if p.is_running and p.address)
        if self._addresses.get(key, frozenset()) == addresses:
            return self._silent
        self._addresses[key] = addresses
        if not addresses:
            del self._addresses[key]
        in_use = frozenset[str]().union(*self._addresses.values())
        for unused in self._tasks.keys() - in_use:
            self._tasks.pop(unused).cancel()
            self._silent.discard(unused)
        for new in in_use - self._tasks.keys():
            self._tasks[new] = asyncio.create_task(self._ask(new, self._port))
        return self._silent

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _ask(self, address: str, port: int) -> None:
        has_answered = False
        while True:
            writer = None
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(address, port)
                has_answered = True
                self._mark(address, is_silent=False)
                for option in keepalive(1, 1):
                    writer.get_extra_info("socket").setsockopt(*option)
                await reader.read(1)  # returns when the peer closes it or the kernel gives it up
            except (ConnectionRefusedError, ConnectionResetError):
                has_answered = True  # the machine answers, though its kubelet is down
                self._mark(address, is_silent=False)
            except OSError:  # a timeout is one too
                if has_answered:
                    self._mark(address, is_silent=True)
            finally:
                if writer is not None:
                    with contextlib.suppress(OSError):
                        writer.close()
            await asyncio.sleep(AGAIN_S)

    def _mark(self, address: str, *, is_silent: bool) -> None:
        if is_silent == (address in self._silent):
            return
        (self._silent.add if is_silent else self._silent.discard)(address)
        for key, addresses in self._addresses.items():
            if address in addresses:
                self._notify(key)


class Diagnosis:
    """Explanations for missing and stuck pods, and when they were last read, by training."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._pod_errors: dict[str, tuple[float, str]] = {}
        self._stuck: dict[str, tuple[float, str]] = {}
        self._refused: dict[str, str] = {}

    def forget(self, uid: str) -> None:
        self._pod_errors.pop(uid, None)
        self._stuck.pop(uid, None)
        self._refused.pop(uid, None)

    @contextlib.contextmanager
    def watch_refusal(self, uid: str) -> Iterator[None]:
        """Remembers why a Job created inside was refused: quota, admission, missing rights."""
        try:
            yield
        except Denied as error:
            self._refused[uid] = str(error)
            raise
        self._refused.pop(uid, None)

    async def of(
        self, training: Training, job: Job | None, pods: int, now: float
    ) -> tuple[str, float | None]:
        """Why pods of the Job are missing, if any are, and when to ask again; `pods` is the number
        that exist."""
        if job is None:
            return self._refused.get(training.uid, ""), None
        if job.is_suspended or job.end_reason:
            return "", None
        if pods >= job.parallelism:  # 0 while it gives way
            self._pod_errors.pop(training.uid, None)
            return "", None
        read_at, text = self._pod_errors.setdefault(training.uid, (now, ""))
        left_s = read_at + MISSING_AFTER_S - now
        if left_s > 0:
            return text, left_s
        fields = f"involvedObject.uid={job.metadata['uid']},reason=FailedCreate"
        events = await self._cluster.list("events", job.metadata["namespace"], fields=fields)
        text = events.items[-1].get("message", "") if events.items else ""
        self._pod_errors[training.uid] = (now, text)
        return text, MISSING_AFTER_S

    async def explain(
        self, training: Training, observation: Observation, newest: list[Pod], now: float
    ) -> Observation:
        """Adds the kubelet's message about containers that cannot be created."""
        making = [pod for pod in newest if pod.waiting_reason and pod.is_being_created]
        stuck = [pod for pod in making if now - pod.created_at >= STUCK_AFTER_S]
        if not stuck:
            self._stuck.pop(training.uid, None)
            again_in_s = STUCK_AFTER_S if making else None
            return replace(observation, again_in_s=sooner(observation.again_in_s, again_in_s))
        read_at, text = self._stuck.get(training.uid, (0.0, ""))
        if now - read_at >= STUCK_EVERY_S:
            text = await self._ask(stuck[0])
            self._stuck[training.uid] = (now, text)
        observation = replace(observation, again_in_s=sooner(observation.again_in_s, STUCK_EVERY_S))
        return _with_message(observation, {p.name for p in stuck}, text)

    async def _ask(self, pod: Pod) -> str:
        fields = f"involvedObject.uid={pod.uid},type=Warning"
        events = await self._cluster.list("events", pod.namespace, fields=fields)
        return " ".join(events.items[-1].get("message", "").split()) if events.items else ""


def _with_message(observation: Observation, pods: set[str], text: str) -> Observation:
    if not text:
        return observation
    ranks = [
        replace(rank, message=f"{rank.message}: {text}") if rank.pod_name in pods else rank
        for rank in observation.ranks
    ]
    return replace(observation, ranks=ranks)
