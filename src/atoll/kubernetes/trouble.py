"""What only events tell, asked for when it is needed.

Why a Job's pods are missing (quota, admission), and why a pod that has its node does not get
further (a volume, the network).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from atoll.core.errors import Denied
from atoll.core.status import Seen, Training
from atoll.kubernetes.alarms import Alarms
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.pod import Pod
from atoll.kubernetes.read import Look, finished

Json = dict[str, Any]

TROUBLE_AFTER_S = 3.0  # pods missing for this long: ask the Job controller why
STUCK_AFTER_S = 10.0  # a container in the making for this long: ask the kubelet why
STUCK_EVERY_S = 15.0


class Troubles:
    """What was last heard, and when, by training."""

    def __init__(self, cluster: Cluster, alarms: Alarms) -> None:
        self._cluster = cluster
        self._alarms = alarms
        self._heard: dict[str, tuple[float, str]] = {}
        self._stuck: dict[str, tuple[float, str]] = {}
        self._refused: dict[str, str] = {}

    def forget(self, uid: str) -> None:
        self._heard.pop(uid, None)
        self._stuck.pop(uid, None)
        self._refused.pop(uid, None)

    @contextlib.contextmanager
    def noted(self, uid: str) -> Iterator[None]:
        """Around making a Job, which a quota, an admission rule or a missing right may forbid."""
        try:
            yield
        except Denied as error:
            self._refused[uid] = str(error)
            raise
        self._refused.pop(uid, None)

    async def of(self, training: Training, job: Json | None, pods: int, now: float) -> str:
        """`pods` are there now."""
        if job is None:
            return self._refused.get(training.uid, "")
        if job["spec"].get("suspend") or finished(job):
            return ""
        if pods >= job["spec"]["parallelism"]:  # 0 while it gives way
            self._heard.pop(training.uid, None)
            return ""
        asked_at, text = self._heard.get(training.uid, (now, ""))
        if training.uid not in self._heard or now - asked_at < TROUBLE_AFTER_S:
            self._heard[training.uid] = (asked_at, text)
            self._alarms.set(training.key, TROUBLE_AFTER_S - (now - asked_at))
            return text
        fields = f"involvedObject.uid={job['metadata']['uid']},reason=FailedCreate"
        namespace = job["metadata"]["namespace"]
        listed = await self._cluster.list("events", namespace, fields=fields)
        text = listed.items[-1].get("message", "") if listed.items else ""
        self._heard[training.uid] = (now, text)
        self._alarms.set(training.key, TROUBLE_AFTER_S)
        return text

    async def explain(self, training: Training, seen: Look, now: float) -> Look:
        """With what keeps containers from being made, in the kubelet's words."""
        made = [pod for pod in seen.newest if pod.is_being_made]
        if not made:
            self._stuck.pop(training.uid, None)
            return seen
        stuck = [pod for pod in made if now - pod.created_at >= STUCK_AFTER_S]
        if not stuck:
            self._alarms.set(training.key, STUCK_AFTER_S)
            return seen
        asked_at, text = self._stuck.get(training.uid, (0.0, ""))
        if now - asked_at >= STUCK_EVERY_S:
            text = await self._ask(stuck[0])
            self._stuck[training.uid] = (now, text)
        self._alarms.set(training.key, STUCK_EVERY_S)
        return seen._replace(seen=_with_words(seen.seen, {p.name for p in stuck}, text))

    async def _ask(self, pod: Pod) -> str:
        fields = f"involvedObject.uid={pod.metadata['uid']},type=Warning"
        listed = await self._cluster.list("events", pod.metadata["namespace"], fields=fields)
        return " ".join(listed.items[-1].get("message", "").split()) if listed.items else ""


def _with_words(seen: Seen, pods: set[str], text: str) -> Seen:
    if not text:
        return seen
    ranks = [
        replace(rank, message=f"{rank.message}: {text}") if rank.pod_name in pods else rank
        for rank in seen.ranks
    ]
    return replace(seen, ranks=ranks)
