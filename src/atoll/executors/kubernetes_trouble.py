"""Why a Job's pods are missing (quota, admission), from its events: asked for when they are."""

from __future__ import annotations

from typing import Any

from atoll.core.status import Training
from atoll.executors.kubernetes_alarms import Alarms
from atoll.executors.kubernetes_read import finished
from atoll.remote.kubernetes import Cluster

Json = dict[str, Any]

TROUBLE_AFTER_S = 3.0  # pods missing for this long: ask the Job controller why


class Troubles:
    """What was last heard, and when, by training."""

    def __init__(self, cluster: Cluster, alarms: Alarms) -> None:
        self._cluster = cluster
        self._alarms = alarms
        self._heard: dict[str, tuple[float, str]] = {}

    def forget(self, uid: str) -> None:
        self._heard.pop(uid, None)

    async def of(self, training: Training, job: Json | None, pods: int, now: float) -> str:
        """`pods` are there now."""
        if job is None or job["spec"].get("suspend") or finished(job):
            return ""
        if pods >= job["spec"]["parallelism"]:  # 0 while it gives way
            self.forget(training.uid)
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
