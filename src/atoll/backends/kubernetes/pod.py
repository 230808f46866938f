"""A pod's manifest, read: which rank and attempt it is, whether it runs, how it ended. Pure.

`PodManifest` names the fields that are read: lists and watches decode no others, so that a pod
takes 5 KB of memory instead of 50. Spec and status stay bytes until a `Pod` is made of them, so
that a listed pod that has not changed costs a look at its version.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterable
from datetime import datetime
from typing import Any, TypedDict

import msgspec
from msgspec.structs import replace

from atoll.agent.process import TAIL_LINES, read_record
from atoll.backends.kubernetes.names import (
    CONTAINER,
    FAILURES,
    FINALIZER,
    GATE,
    INDEX,
    PART,
    REPLICA,
    REPORT_DIR,
)
from atoll.backends.kubernetes.results import without_results
from atoll.core.model import json_decoder
from atoll.core.phase import ExitReason
from atoll.core.status import Exit, ObservedRank
from atoll.core.text import split_lines

Json = dict[str, Any]

TURNED_AWAY = 143  # exit code of a start gate whose pod is taken away
CLOCK_SKEW_S = 5.0  # how far the clocks of nodes and API server may be apart; a choice
NO_SHELL = "the executor option is_exit_recorded=False runs the command without sh"
LATE_S = 10.0  # a kubelet that answers has ended a pod long before this

# Why the cluster took a pod away, by the reason of its DisruptionTarget condition.
DISRUPTIONS = {
    "PreemptionByScheduler": ExitReason.PREEMPTED,
    "DeletionByTaintManager": ExitReason.EVICTED,
    "EvictionByEvictionAPI": ExitReason.EVICTED,
    "DeletionByPodGC": ExitReason.HOST_LOST,
    "TerminationByKubelet": ExitReason.EVICTED,
}
EXPECTED_WHEN_STOPPED = frozenset(
    {
        ExitReason.ERROR,
        ExitReason.SIGNAL,
        ExitReason.UNKNOWN,
        ExitReason.EVICTED,
        ExitReason.DEADLINE_EXCEEDED,
    }
)
# Reasons of a pod's status that say more than its container's.
POD_REASONS = {
    "Evicted": ExitReason.EVICTED,
    "NodeLost": ExitReason.HOST_LOST,
    "NodeShutdown": ExitReason.EVICTED,
    "Terminated": ExitReason.EVICTED,
    "Preempting": ExitReason.PREEMPTED,
    "DeadlineExceeded": ExitReason.DEADLINE_EXCEEDED,
    "NodeAffinity": ExitReason.REJECTED,
    "UnexpectedAdmissionError": ExitReason.REJECTED,
}
CONFIG_ERROR = "CreateContainerConfigError"
# A container that is not there yet, by the reason it waits for.
WAITING = {
    "ContainerCreating": "its container is being created",
    "PodInitializing": "its container is being created",
    "ErrImagePull": "the image {image} cannot be pulled: {message}",
    "ImagePullBackOff": "the image {image} cannot be pulled: {message}",
    "InvalidImageName": "{image!r} is not an image name: {message}",
    "ErrImageNeverPull": "the image {image} is not on the node and may not be pulled",
    "ImageInspectError": "the image {image} cannot be read: {message}",
    CONFIG_ERROR: "its container cannot be set up: {message}",
    "CreateContainerError": "its container cannot be made: {message}",
    "RunContainerError": "its container cannot be started: {message}",
}
HOPELESS = frozenset({"InvalidImageName", "ErrImageNeverPull"})
BEING_CREATED = frozenset({"ContainerCreating", "PodInitializing"})
BROKEN = frozenset(WAITING) - BEING_CREATED


MAX_SHARED = 10_000  # distinct parts of manifests; a gang has a handful


# A bookmark of a watch has null in place of lists and times. No value is checked here.
class PodMetadata(TypedDict, total=False):
    name: Any
    namespace: Any
    uid: Any
    resourceVersion: Any
    creationTimestamp: Any
    deletionTimestamp: Any
    deletionGracePeriodSeconds: Any
    labels: Any
    annotations: Any
    finalizers: Any
    ownerReferences: Any


class PodEntry(TypedDict, total=False):
    """A container, the status of one, or a condition."""

    name: Any
    image: Any
    command: Any
    state: Any
    type: Any
    status: Any
    reason: Any
    message: Any


class PodSpec(TypedDict, total=False):
    nodeName: Any
    schedulingGates: Any
    containers: list[PodEntry] | None
    initContainers: list[PodEntry] | None


class PodStatus(TypedDict, total=False):
    phase: Any
    reason: Any
    message: Any
    hostIP: Any
    podIP: Any
    startTime: Any
    conditions: list[PodEntry] | None
    containerStatuses: list[PodEntry] | None
    initContainerStatuses: list[PodEntry] | None


class PodManifest(TypedDict, total=False):
    """What of a pod is read here, in a plain dictionary."""

    metadata: PodMetadata
    spec: msgspec.Raw
    status: msgspec.Raw


_PARTS: dict[str, msgspec.json.Decoder[Any]] = {
    "spec": json_decoder(PodSpec),
    "status": json_decoder(PodStatus),
}
_shared: dict[bytes, Any] = {}  # parts of manifests that most pods of a gang have in common


@functools.lru_cache(maxsize=10_000)
def when(text: str | None) -> float | None:
    """Seconds since the epoch, or None: Kubernetes writes the epoch itself for 'never'."""
    at = datetime.fromisoformat(text).timestamp() if text else 0.0
    return at or None


class Pod:
    """A pod's manifest with names for what atoll asks of it.

    A pod is parsed once, when it arrives, and read in every observation until it changes: what all
    of them need is an attribute, and the rest is computed on demand.
    """

    def __init__(self, manifest: Json) -> None:
        for part, decoder in _PARTS.items():
            if isinstance(raw := manifest.get(part), msgspec.Raw):
                manifest[part] = decoder.decode(raw)
        self.metadata: Json = manifest["metadata"]
        self.spec: Json = manifest.get("spec", {})
        self.status: Json = manifest.get("status", {})
        self.name: str = self.metadata["name"]
        self.namespace = str(self.metadata.get("namespace", ""))
        self.uid = str(self.metadata.get("uid"))
        self.version = int(self.metadata.get("resourceVersion") or 0)
        self.labels: Json = self.metadata.get("labels") or {}
        self.annotations: Json = self.metadata.get("annotations") or {}
        self.restarts = int(self.annotations.get(FAILURES, 0))
        self.created_at = when(self.metadata.get("creationTimestamp")) or 0.0
        # A rank has one pod after another. The second a pod was created in grows over restarts,
        # resizes and new Jobs, and needs no memory.
        self.attempt = int(self.created_at)
        self.age = (self.created_at, self.restarts)
        self.node: str | None = self.spec.get("nodeName") or None
        # What the pod does for its training: it is a rank, an etcd or a bench. Also the name of
        # its container, except in launches from scripts.
        self.part = str(self.labels.get(PART, CONTAINER))
        self.index = int(self.annotations.get(INDEX, -1))
        self.rank = self.index if self.part == CONTAINER else -1
        self.address: str = self.status.get("hostIP", "")  # of its node
        statuses = self.status.get("containerStatuses") or []
        names = (CONTAINER, REPLICA) if self.part == CONTAINER else (self.part,)
        self.container: Json = next((c for c in statuses if c["name"] in names), {})
        self.state: Json = self.container.get("state") or {}
        self._before: list[Json] = self.status.get("initContainerStatuses") or []
        gate: Json = next((c.get("state") or {} for c in self._before if c["name"] == GATE), {})
        self._gate_end: Json = gate.get("terminated") or {}
        self._gate_code: int | None = self._gate_end.get("exitCode")
        self.is_leaving = "deletionTimestamp" in self.metadata
        self.is_running = "running" in self.state
        self.is_over = "terminated" in self.state or self.status.get("phase") in (
            "Succeeded",
            "Failed",
        )
        state = self.state.get("running") or self.state.get("terminated") or {}
        # A command that could not be run has an end and no start.
        self.started_at = when(state.get("startedAt")) or when(state.get("finishedAt"))
        self.has_run = self.started_at is not None
        # Its start gate runs, according to the kubelet's last report.
        self.is_gate_up = "running" in gate and not self.is_over
        # It has its node and its image, and waits at the gate for the other ranks.
        self.is_at_gate = self.is_gate_up and not self.is_leaving
        self.has_passed = self._gate_code == 0
        # It was stopped at the start gate: it never ran, and used up no restart.
        self.is_turned_away = self._gate_code == TURNED_AWAY and not self.has_run
        # A finalizer keeps the pod until its exit is stored.
        self.has_finalizer = FINALIZER in (self.metadata.get("finalizers") or ())
        # It runs and nothing is due: almost every pod of a large gang, most of the time.
        is_steady = self.is_running and self.has_run and not self.is_over and not self.is_leaving
        self.is_steady = is_steady and not self.has_finalizer
        # Why the container whose turn it is waits, and its image. A restarting sidecar does not
        # concern a rank that runs.
        self._waiting, self._waiting_image = ({}, "") if self.is_running else self._read_waiting()
        self.waiting_reason = str(self._waiting.get("reason", ""))
        scheduled = {} if self.node else self.condition("PodScheduled")
        if scheduled.get("status") == "False" and not self.is_running:
            self.waiting_reason = str(scheduled.get("reason", "Unschedulable"))
        self.observed: ObservedRank | None = None  # a steady pod's rank, once it was read

    @classmethod
    def shared(cls, manifest: Json) -> Pod:
        """A pod to keep: the pods of a gang share the parts that are equal. Never change them."""
        if len(_shared) >= MAX_SHARED:
            _shared.clear()
        pod = cls(manifest)
        for part, field in (
            *((pod.spec, "containers"), (pod.spec, "initContainers")),
            *((pod.metadata, "ownerReferences"), (pod.status, "conditions")),
        ):
            if value := part.get(field):
                part[field] = _shared.setdefault(msgspec.json.encode(value), value)
        return pod

    @property
    def deleted_at(self) -> float | None:
        """When its deletion was requested."""
        at = when(self.metadata.get("deletionTimestamp"))
        return None if at is None else at - self.metadata.get("deletionGracePeriodSeconds", 0)

    def is_ending(self, now: float) -> bool:
        """Its rank has ended, and the kubelet is about to report the end of the pod."""
        at = when((self.state.get("terminated") or {}).get("finishedAt"))
        is_reported = self.status.get("phase") in ("Succeeded", "Failed") or self.is_leaving
        return at is not None and not is_reported and now < at + LATE_S

    @property
    def is_being_created(self) -> bool:
        """The pod has its node, but no container runs yet; only events show what it lacks."""
        is_on_its_way = self.node is not None and not self.is_leaving and not self.is_over
        return is_on_its_way and not self.is_gate_up and self.waiting_reason in BEING_CREATED

    @property
    def is_silent(self) -> bool:
        """The cluster has given up its node: not ready, though the kubelet did not report it."""
        ready = self.condition("Ready")
        is_expected = ready.get("reason") in ("ContainersNotReady", "PodCompleted")
        return ready.get("status") == "False" and not is_expected and not self.is_leaving

    def is_late(self, now: float) -> bool:
        """Whether a kubelet that answers would have ended it by now."""
        return now > (when(self.metadata.get("deletionTimestamp")) or now) + LATE_S

    def is_lost(self, now: float) -> bool:
        """The pod is being deleted on a node that does not answer, and may never report again."""
        if not self.is_leaving or self.is_over:
            return False
        is_silent = self.condition("Ready").get("status") != "True"
        reason = self.condition("DisruptionTarget").get("reason")
        is_abandoned = reason == "DeletionByTaintManager" or self.status.get("reason") == "NodeLost"
        is_abandoned = is_abandoned and self.has_run  # at the start gate no pod is Ready
        is_up = self.has_run or self.is_gate_up
        return is_up and is_silent and (is_abandoned or self.is_late(now))

    def condition(self, kind: str) -> Json:
        conditions: list[Json] = self.status.get("conditions") or []
        return next((c for c in conditions if c["type"] == kind), {})

    def is_hopeless(self, patience_s: float, now: float) -> bool:
        """Whether waiting does not help any more: its container cannot be created."""
        is_late = now - self.created_at > patience_s
        return self.waiting_reason in HOPELESS or (is_late and self.waiting_reason in BROKEN)

    def misses(self, name: str) -> bool:
        """Whether it cannot start because the ConfigMap of that name is missing."""
        is_stuck = self.waiting_reason == CONFIG_ERROR and not self.is_leaving
        return is_stuck and f'"{name}"' in self.waits_for

    def _read_waiting(self) -> tuple[Json, str]:
        waiting: Json = {}
        for status in (*self._before, self.container):
            waiting = (status.get("state") or {}).get("waiting") or waiting
            if waiting.get("reason", "PodInitializing") != "PodInitializing":
                return waiting, self._image_of(status["name"])
        return waiting, ""

    def _image_of(self, name: str) -> str:
        containers = [*self.spec.get("initContainers", ()), *self.spec.get("containers", ())]
        return next(
            (str(c.get("image", "")) for c in containers if c.get("name", name) == name), ""
        )

    @property
    def waits_for(self) -> str:
        """What the pod waits for, in one line with the scheduler's or the kubelet's message."""
        scheduled = self.condition("PodScheduled")
        reason = self.waiting_reason
        if reason == "Unschedulable":
            return f"no capacity: {scheduled.get('message', '')}"
        if reason == "SchedulingGated":
            gates = ", ".join(gate["name"] for gate in self.spec.get("schedulingGates") or ())
            return f"held back by the scheduling gate {gates}"
        template = WAITING.get(reason, "{reason} {message}")
        message = " ".join(str(self._waiting.get("message", "")).split())
        image = self._waiting_image
        return template.format(image=image, message=message, reason=reason).strip()

    def exit(self, *, is_stopped: bool, now: float) -> Exit:
        """How it ended, from the rank's own record first and the kubelet's report second.

        An exit code that Kubernetes makes up because it has none counts as unknown.
        """
        ended: Json = self.state.get("terminated") or {}
        text = str(ended.get("message") or "")
        record = read_record(text)
        is_lost = self.is_lost(now)
        reason, message = self._why(ended, is_lost)
        code: int | None = ended.get("exitCode")
        if ended.get("reason") == "ContainerStatusUnknown" or is_lost:
            code = None
        if reason == ExitReason.COMMAND_NOT_FOUND:
            code = 127  # there was no process; a shell uses this code
        last = ended if self.has_run else ended or self._gate_end
        exit = Exit(
            code=code,
            at=when(last.get("finishedAt")) or self.deleted_at or now,
            reason=reason,
            signal=_signal(code),
            message=message,
            log_tail=[]
            if message and message in text
            else without_results(split_lines(text))[-TAIL_LINES:],
        )
        if record is not None:
            exit = recorded_exit(exit, record)
        elif (
            self._is_recorder and reason in (ExitReason.ERROR, ExitReason.SIGNAL) and not is_stopped
        ):
            exit = replace(exit, is_from_backend=True)
        if is_stopped and exit.reason in EXPECTED_WHEN_STOPPED:
            return replace(exit, is_stopped=True, reason=ExitReason.STOPPED)
        return replace(exit, is_stopped=is_stopped)

    @property
    def _is_recorder(self) -> bool:
        """Whether its rank runs under the wrapper that records its exit."""
        containers = self.spec.get("containers") or ()
        ranks = (c for c in containers if c.get("name") in (CONTAINER, REPLICA))
        return any(
            f" {REPORT_DIR}/" in argument for c in ranks for argument in c.get("command", ())[2:3]
        )

    def _why(self, ended: Json, is_lost: bool) -> tuple[ExitReason, str]:
        disruption = self.condition("DisruptionTarget")
        pod_reason = self.status.get("reason", "")
        if is_lost:
            return ExitReason.HOST_LOST, f"its node {self.node} does not answer"
        if pod_reason.startswith("OutOf"):  # the kubelet found less room than the scheduler
            return ExitReason.REJECTED, str(self.status.get("message", ""))
        if pod_reason in POD_REASONS:
            return POD_REASONS[pod_reason], str(self.status.get("message", ""))
        if disruption.get("reason") in DISRUPTIONS:
            return DISRUPTIONS[disruption["reason"]], str(disruption.get("message", ""))
        if not ended and self._gate_code not in (None, 0):
            return ExitReason.START_GATE_FAILED, self._gate_error()
        if not ended and (init := self._failed_init):
            return ExitReason.INIT_FAILED, init
        native = ended.get("reason", "")
        # With exit code 0, a child of the rank was killed, and the rank went on.
        if native == "OOMKilled" and ended.get("exitCode") != 0:
            return ExitReason.OOM_KILLED, ""
        if native in ("StartError", "ContainerCannotRun"):
            message = " ".join(str(ended.get("message", "")).split())
            if self._is_recorder and '"sh"' in message:
                message += f" ({NO_SHELL})"
            is_missing = "not found" in message or "no such file" in message
            return ExitReason.COMMAND_NOT_FOUND if is_missing else ExitReason.CANNOT_RUN, message
        if native == "ContainerStatusUnknown" or not ended:
            return ExitReason.UNKNOWN, str(ended.get("message") or self.status.get("message", ""))
        code = ended.get("exitCode", 0)
        if code == 0:
            return ExitReason.COMPLETED, ""
        return ExitReason.SIGNAL if _signal(code) else ExitReason.ERROR, ""

    @property
    def _failed_init(self) -> str:
        """The init container of the option `pod` that failed, and how; empty if none did."""
        for container in self._before:
            end = (container.get("state") or {}).get("terminated") or {}
            if end.get("exitCode") and container["name"] != GATE:
                code = end["exitCode"]
                message = " ".join(str(end.get("message", "")).split())
                return f"{container['name']}: exit code {code}" + (message and f": {message}")
        return ""

    def _gate_error(self) -> str:
        image = (self.spec.get("containers") or [{}])[0].get("image", "")
        message = " ".join(str(self._gate_end.get("message", "")).split())
        return (
            f"the start gate needs sh and sleep, and cannot run in the image {image} "
            f"({message or f'exit code {self._gate_code}'}); "
            "the executor option is_start_gated=False does without it"
        )


def parsed(manifests: Iterable[Json], known: Iterable[Pod]) -> list[Pod]:
    """The pods of a list; those of `known` that have not changed are not parsed again."""
    by_version = {pod.metadata["resourceVersion"]: pod for pod in known}
    return [by_version.get(item["metadata"]["resourceVersion"]) or Pod(item) for item in manifests]


def recorded_exit(exit: Exit, record: Json) -> Exit:
    """`exit`, the kubelet's report, with the rank's own record. The message says if they differ.

    A failure in either counts: the Job goes by the kubelet's code.
    """
    code: int | None = record.get("code")
    at = record.get("at")
    message = str(record.get("message", ""))
    changes: Json = {"log_tail": without_results(map(str, record.get("tail", ())))[-TAIL_LINES:]}
    if at is not None and abs(at - exit.at) <= CLOCK_SKEW_S:  # the kubelet reports whole seconds
        changes["at"] = at
    if isinstance(record.get("failedAt"), int | float):
        changes["failed_at"] = record["failedAt"]
    if code == exit.code or code:
        changes |= {"code": code, "signal": record.get("signal")}
        if exit.reason in ("Completed", "Error", "Signal"):
            changes["reason"] = str(record.get("reason", exit.reason))
    if code != exit.code:
        both = f"the rank's record says exit code {code}, its kubelet {exit.code}"
        message = f"{message}; {both}" if message else both
    changes["message"] = exit.message or message
    return replace(exit, **changes)


def _signal(code: int | None) -> str | None:
    """The signal behind an exit code above 128, as every container runtime counts it."""
    try:
        return signal.Signals((code or 0) - 128).name
    except ValueError:
        return None
