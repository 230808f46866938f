"""The companions of a training's ranks: its etcd, the watch over its mesh, its link bench.

The etcd is a Deployment of one pod without a disk: its keys are written again if they are lost. No
rank starts before it answers: the Job is suspended, or, where a queue decides when the Job runs,
its start gate stays shut. The link bench is a Job of two pods that measure the link between them.
The pods of companions come with the same list or watch as those of ranks, so observing them costs
no extra request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from msgspec.structs import replace

from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.followups import PatchJob
from atoll.backends.kubernetes.names import BENCH, ETCD, PART, UID
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.backends.kubernetes.patch import is_blocked, render_unblock
from atoll.backends.kubernetes.placement import affinity, node_selector, ranks_of, tolerations
from atoll.backends.kubernetes.pod import BROKEN, HOPELESS, Pod, when
from atoll.backends.kubernetes.render import (
    RESTRICTED,
    etcd_name,
    fabric_folder,
    gang_metadata,
    gang_name,
    owner_of,
    reference_to,
    render_headless,
)
from atoll.core.bench import DONE, LIMIT_S, has_floor
from atoll.core.errors import BackendError, Conflict, NotFound, ValidationError
from atoll.core.mesh import DEFAULT_ETCD_PORT, MeshState
from atoll.core.model import decode
from atoll.core.ports import Key
from atoll.core.status import (
    BenchResult,
    DesiredState,
    Followup,
    MeshStatus,
    Observation,
    ObservedBench,
    Training,
    sooner,
)
from atoll.mesh.etcd import EtcdKeys
from atoll.mesh.reach import MeshVerdict, agent_name
from atoll.mesh.watch import MeshWatch

Json = dict[str, Any]
log = logging.getLogger(__name__)

REAPPLY_S = 5.0  # between two attempts to create an etcd that has no pod
BENCH_EVERY_S = 5.0  # its end comes with the watch; this only checks LIMIT_S
BLOCKED_EVERY_S = 30.0  # the end comes with the watch; this only checks image_timeout_s


class StartEtcd(Followup, frozen=True):
    """Create the etcd. Without a Training object, `job` owns it."""

    job: Json | None


class FollowMesh(Followup, frozen=True):
    """Make the mesh watch expect these agents, and read their reports in that etcd."""

    endpoint: str
    members: Members | None


class ClearBench(Followup, frozen=True):
    """Delete the Job and Service of a bench whose result is stored."""


class FollowedMesh:
    """The watch over the mesh of one training, in one etcd."""

    def __init__(
        self,
        training: Training,
        endpoint: str,
        deadline_s: float,
        notify: Callable[[], None],
        *,
        is_alone: bool,
    ):
        self.endpoint = endpoint
        self.agents: frozenset[str] = frozenset()
        self._notify = notify
        self._keys = EtcdKeys(endpoint)
        self._task: asyncio.Task[None] | None = None
        self.watch = MeshWatch(
            self._keys,
            self._on_verdict,
            deadline_s=deadline_s,
            folder=fabric_folder(training),
            is_alone=is_alone,
        )

    def follow(self, members: Members, now: float) -> None:
        if members.agents != self.agents:
            self.agents = members.agents
            already_s = max(now - members.placed_at, 0.0)
            self._task = asyncio.create_task(self._run(self._task, already_s))
            self._task.add_done_callback(_log_end)

    async def _run(self, before: asyncio.Task[None] | None, already_s: float) -> None:
        await _end(before)
        await self.watch.run(self.agents, already_s)

    async def close(self) -> None:
        await _end(self._task)
        self._task = None
        await self._keys.close()

    def _on_verdict(self, verdict: MeshVerdict) -> None:
        self._notify()


class Meshes:
    """One watch for each training with a mesh. A changed verdict calls `notify`.

    A watch reads what the agents report and writes the keys of their hosts once it can decide.
    It runs on between observations because the hosts wait for those keys. Reports come through the
    training's etcd, in any order, and cost the API server nothing. Only a followup starts a watch
    or changes it.
    """

    def __init__(
        self, notify: Callable[[Key], None], deadline_s: float, *, is_alone: bool = True
    ) -> None:
        self._notify = notify
        self._is_alone = is_alone  # each training has an etcd of its own
        self._deadline_s = deadline_s
        self._meshes: dict[str, FollowedMesh] = {}

    def verdict(self, uid: str, endpoint: str) -> MeshStatus | None:
        """The newest verdict in that etcd, in any if `endpoint` is empty; None if there is none."""
        mesh = self._meshes.get(uid)
        if mesh is None or (endpoint and mesh.endpoint != endpoint):
            return None
        verdict = mesh.watch.verdict
        return MeshStatus(
            state=verdict.state,
            message=verdict.message,
            hosts=len(mesh.watch.hosts),
            foreign_writes=mesh.watch.foreign_writes,
        )

    def is_followed(self, uid: str, endpoint: str, members: Members | None) -> bool:
        """Whether the watch has this etcd and these members.

        `endpoint` is empty while the etcd does not answer, and `members` is None while ranks are
        being scheduled. The watch stays as it is until they are known.
        """
        mesh = self._meshes.get(uid)
        if mesh is None:
            return not endpoint or members is None
        is_there = not endpoint or mesh.endpoint == endpoint
        return is_there and (members is None or members.agents == mesh.agents)

    async def follow(
        self, training: Training, endpoint: str, members: Members | None, now: float
    ) -> None:
        mesh = self._meshes.get(training.uid)
        if mesh is not None and endpoint and mesh.endpoint != endpoint:
            await self._meshes.pop(training.uid).close()
            mesh = None
        if mesh is None and endpoint and members is not None:
            key = training.key
            mesh = FollowedMesh(
                training,
                endpoint,
                self._deadline_s,
                lambda: self._notify(key),
                is_alone=self._is_alone,
            )
            self._meshes[training.uid] = mesh
        if mesh is not None and members is not None:
            mesh.follow(members, now)

    async def drop(self, training: Training, shared: str | None) -> None:
        """The watch has ended, and the keys of the training in a shared etcd are deleted."""
        mesh = self._meshes.pop(training.uid, None)
        if mesh is not None:
            await mesh.close()
        if shared is None:
            return
        others = {host for other in self._meshes.values() for host in other.watch.hosts}
        async with EtcdKeys(shared) as keys:
            watch = MeshWatch(keys, folder=fabric_folder(training))
            with contextlib.suppress(BackendError):  # an etcd that is down must not hold us up
                await watch.clear(keep=others)

    async def sweep(self, known: Callable[[], Awaitable[set[str]]]) -> None:
        """The watches of trainings that were removed by force have ended."""
        watched = set(self._meshes)
        for uid in watched - await known() if watched else ():
            if mesh := self._meshes.pop(uid, None):
                await mesh.close()

    async def close(self) -> None:
        while self._meshes:
            await self._meshes.popitem()[1].close()


class Companions:
    """Runs etcd, mesh watch and bench. `notify` gets trainings that must be observed again."""

    def __init__(
        self,
        cluster: Cluster,
        options: KubernetesOptions,
        notify: Callable[[Key], None],
        *,
        is_owner: bool,
    ) -> None:
        self._cluster = cluster
        self._options = options
        self._is_owner = is_owner
        self._meshes = Meshes(
            notify, options.mesh_deadline_s, is_alone=options.etcd_endpoint is None
        )
        # By training: when each was last applied, and what kept the etcd from getting its pod.
        self._etcds: dict[str, tuple[float, str]] = {}
        self._benches: dict[str, float] = {}

    async def close(self) -> None:
        await self._meshes.close()

    async def sweep(self, known: Callable[[], Awaitable[set[str]]]) -> None:
        await self._meshes.sweep(known)

    def observe(
        self,
        training: Training,
        job: Json | None,
        newest: list[Pod],
        pods: list[Pod],
        observation: Observation,
        now: float,
    ) -> Observation:
        """Adds etcd, mesh and bench to `observation`; `newest` is the last pod of each rank."""
        etcd = [pod for pod in pods if pod.part == ETCD]
        bench = [pod for pod in pods if pod.part == BENCH]
        if job is not None and is_blocked(job) and ready_etcd(etcd) is not None:
            observation = _with_followups(
                observation, PatchJob(why="its etcd answers", patch=render_unblock(job))
            )
        if observation.desired is None or observation.desired.size == 0:
            return self._observe_bench(training, newest, bench, observation, now)
        is_ending = training.is_cancelling or bool(training.status.failing)
        is_etcd_wanted = observation.is_supervised and not is_ending
        if self._options.has_own_etcd(training.spec) and is_etcd_wanted:
            observation = self._observe_etcd(training, job, etcd, observation, now)
        if self._options.has_gate(training.spec):
            agents = None if observation.desired is None else members(newest, observation.desired)
            observation = self._observe_mesh(training, agents, etcd, observation)
        return self._observe_bench(training, newest, bench, observation, now)

    async def perform(
        self, training: Training, namespace: str, followup: Followup, now: float
    ) -> None:
        match followup:
            case StartEtcd(job=job):
                await self._start_etcd(training, namespace, job, now)
            case FollowMesh(endpoint=endpoint, members=agents):
                await self._meshes.follow(training, endpoint, agents, now)
            case ClearBench():
                await self._clear_bench(training, namespace)

    async def measure(
        self, training: Training, namespace: str, job: Json | None, now: float
    ) -> None:
        owner, name = self._owner(training, job), bench_name(training)
        service = render_bench_service(training, self._options, owner)
        await self._cluster.patch("services", namespace, name, service, type="apply")
        body = render_bench(training, self._options, owner, secrets.token_hex(16))
        with contextlib.suppress(Conflict):  # this operator or the one before it made it
            await self._cluster.create("jobs", namespace, body)
        self._benches.setdefault(training.uid, now)

    async def release(self, training: Training, namespace: str) -> None:
        """The etcd, mesh and bench of the training are deleted. May be repeated."""
        spec, options = training.spec, self._options
        if options.has_own_etcd(spec):
            for kind in ("deployments", "services"):
                with contextlib.suppress(NotFound):
                    await self._cluster.delete(kind, namespace, etcd_name(training))
        self._etcds.pop(training.uid, None)
        if options.has_gate(spec):
            await self._meshes.drop(training, options.etcd_endpoint)
        if spec.bench.mode != "off":
            await self._clear_bench(training, namespace)

    def _observe_etcd(
        self,
        training: Training,
        job: Json | None,
        pods: list[Pod],
        observation: Observation,
        now: float,
    ) -> Observation:
        """An etcd without pods is applied again: somebody may have deleted it."""
        applied_at, pod_error = self._etcds.get(training.uid, (now - REAPPLY_S, ""))
        if not pods:
            is_due = now - applied_at >= REAPPLY_S
            followups = (StartEtcd(job=job),) if is_due else ()
            observation = _with_followups(observation, *followups, again_in_s=REAPPLY_S)
        if not is_blocked(job):
            return observation
        limit_s = self._options.image_timeout_s
        observation = _with_followups(observation, again_in_s=min(limit_s, BLOCKED_EVERY_S))
        for pod in pods:
            is_late = now - pod.created_at > limit_s
            if pod.waiting_reason in HOPELESS or (is_late and pod.waiting_reason in BROKEN):
                return replace(observation, fault=f"its etcd: {pod.waits_for}")
        return replace(observation, message=describe_etcd(pods, pod_error))

    async def _start_etcd(
        self, training: Training, namespace: str, job: Json | None, now: float
    ) -> None:
        owner, name = self._owner(training, job), etcd_name(training)
        service = render_etcd_service(training, self._options, owner)
        await self._cluster.patch("services", namespace, name, service, type="apply")
        body = render_etcd(training, self._options, owner)
        deployment = await self._cluster.patch("deployments", namespace, name, body, type="apply")
        self._etcds[training.uid] = (now, pod_error_of(deployment))

    def _observe_mesh(
        self, training: Training, agents: Members | None, etcd: list[Pod], observation: Observation
    ) -> Observation:
        pod = ready_etcd(etcd)
        endpoint = self._options.etcd_endpoint or (address(pod) if pod else "")
        status = self._meshes.verdict(training.uid, endpoint)
        if status is None and training.status.mesh is None:
            status = MeshStatus(state=MeshState.PENDING, message="its ranks are being placed")
        if not self._meshes.is_followed(training.uid, endpoint, agents):
            observation = _with_followups(
                observation, FollowMesh(endpoint=endpoint, members=agents), again_in_s=0.0
            )
        return replace(observation, mesh=status)

    def _observe_bench(
        self,
        training: Training,
        newest: list[Pod],
        pods: list[Pod],
        observation: Observation,
        now: float,
    ) -> Observation:
        if training.spec.bench.mode == "off":
            return observation
        agents = None if observation.desired is None else members(newest, observation.desired)
        applied_at = self._benches.get(training.uid)
        bench = read_bench(
            training,
            pods,
            newest,
            self._options,
            now,
            created_at=applied_at,
            are_ranks_placed=agents is not None,
        )
        observation = replace(observation, bench=bench)
        if applied_at is None and all(pod.is_leaving for pod in pods):
            return observation
        if self._is_bench_to_go(training, bench, now) and not observation.fault:
            return _with_followups(observation, ClearBench())
        return _with_followups(observation, again_in_s=BENCH_EVERY_S)

    def _is_bench_to_go(self, training: Training, bench: ObservedBench, now: float) -> bool:
        """Whether the result of the bench is stored, or is about to be in this pass."""
        since = training.status.bench.started_at
        is_late = since is not None and now >= since + LIMIT_S
        return is_bench_over(training) or is_late or bench.state in ("done", "failed")

    async def _clear_bench(self, training: Training, namespace: str) -> None:
        for kind in ("jobs", "services"):
            with contextlib.suppress(NotFound):
                await self._cluster.delete(kind, namespace, bench_name(training))
        self._benches.pop(training.uid, None)

    def _owner(self, training: Training, job: Json | None) -> Json | None:
        """The object with which Kubernetes deletes it."""
        if self._is_owner:
            return owner_of(training)
        return reference_to("batch/v1", "Job", job["metadata"]) if job else None


def _with_followups(
    observation: Observation, *followups: Followup, again_in_s: float | None = None
) -> Observation:
    again_in_s = sooner(observation.again_in_s, again_in_s)
    return replace(
        observation, followups=(*observation.followups, *followups), again_in_s=again_in_s
    )


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.wait({task})


def _log_end(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()):
        log.error("the watch over a mesh ended: %s", error, exc_info=error)


BENCH_PORT = 28_411
HOST = "kubernetes.io/hostname"
BENCH_TTL_S = 3600  # Kubernetes deletes a finished bench after this if the operator is away
# NEAR counts once for each rank on a node: below 100 ranks, two nodes score higher than one.
SPREAD_WEIGHT, NEAR_WEIGHT = 100, 1
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def render_etcd_service(training: Training, options: KubernetesOptions, owner: Json | None) -> Json:
    metadata = gang_metadata(training, owner, options, name=etcd_name(training))
    return render_headless(metadata, training, ETCD, "client", DEFAULT_ETCD_PORT)


def render_etcd(training: Training, options: KubernetesOptions, owner: Json | None) -> Json:
    metadata = gang_metadata(training, owner, options, name=etcd_name(training))
    labels = {**metadata["labels"], PART: ETCD}
    pod: Json = {
        "containers": [_etcd_container(training, options)],
        "tolerations": tolerations(training.spec.resources, options),
        "volumes": [{"name": "data", "emptyDir": {}}],
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
    }
    pod |= options.shared("priorityClassName", "imagePullSecrets")
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},
            "revisionHistoryLimit": 0,
            "selector": {"matchLabels": {UID: training.uid, PART: ETCD}},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _etcd_container(training: Training, options: KubernetesOptions) -> Json:
    port = DEFAULT_ETCD_PORT
    return {
        "name": ETCD,
        "image": options.etcd_image,
        "command": [
            "etcd",
            "--data-dir=/data/etcd",
            "--enable-v2=true",
            f"--listen-client-urls=http://0.0.0.0:{port}",
            f"--advertise-client-urls=http://{etcd_name(training)}:{port}",
            "--listen-peer-urls=http://127.0.0.1:2380",
            # No page in somebody's browser may read or write it, by its own name or by another's.
            f"--cors=http://127.0.0.1:{port}",
            f"--host-whitelist={_allowed_hosts(etcd_name(training))}",
            "--unsafe-no-fsync",
        ],
        "env": [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
            for name, path in (("POD_IP", "status.podIP"), ("HOME_NS", "metadata.namespace"))
        ],
        "ports": [{"name": "client", "containerPort": port}],
        "readinessProbe": {
            "httpGet": {"path": "/health", "port": "client"},
            "periodSeconds": 1,
            "timeoutSeconds": 5,
            "failureThreshold": 5,
        },
        "resources": {
            "requests": {"cpu": "50m", "memory": "64Mi"},
            "limits": {"memory": "512Mi"},
        },
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "securityContext": RESTRICTED,
    }


def _allowed_hosts(name: str) -> str:
    """Host names in requests that the etcd accepts: its Service, its pod, and a forwarded port."""
    names = [name, f"{name}.$(HOME_NS)", f"{name}.$(HOME_NS).svc"]
    names.append(f"{name}.$(HOME_NS).svc.cluster.local")
    return ",".join([*names, "$(POD_IP)", "localhost", "127.0.0.1"])


def ready_etcd(pods: list[Pod]) -> Pod | None:
    """The etcd pod that is ready, if there is one."""
    for pod in pods:
        is_ready = pod.condition("Ready").get("status") == "True" and not pod.is_leaving
        if is_ready and pod.status.get("podIP"):
            return pod
    return None


def address(pod: Pod) -> str:
    """By IP: the pod states it, and this process may run where cluster names do not resolve."""
    ip = str(pod.status["podIP"])
    return f"[{ip}]:{DEFAULT_ETCD_PORT}" if ":" in ip else f"{ip}:{DEFAULT_ETCD_PORT}"


def pod_error_of(deployment: Json) -> str:
    """Why the Deployment's pod cannot be created (quota, admission), as far as that is known."""
    conditions = deployment.get("status", {}).get("conditions") or ()
    messages = (c.get("message", "") for c in conditions if c["type"] == "ReplicaFailure")
    return next(messages, "")


def describe_etcd(pods: list[Pod], pod_error: str = "") -> str:
    """One line: what a Job that is blocked by its etcd waits for."""
    reasons = (pod.waits_for for pod in pods if pod.waits_for and not pod.is_leaving)
    waits = next(reasons, "" if pods else pod_error)
    return f"waits for its etcd{f': {waits}' if waits else ''}"


def bench_name(training: Training) -> str:
    return f"{gang_name(training)}-bench"


def render_bench_service(
    training: Training, options: KubernetesOptions, owner: Json | None
) -> Json:
    metadata = gang_metadata(training, owner, options, name=bench_name(training))
    return render_headless(metadata, training, BENCH, BENCH, BENCH_PORT)


def render_bench(
    training: Training, options: KubernetesOptions, owner: Json | None, token: str
) -> Json:
    name = bench_name(training)
    metadata = gang_metadata(training, owner, options, name=name)
    container = {
        "name": BENCH,
        "image": options.agent_image,
        "command": [
            *("python", "-m", "atoll.bench.netbench", "pair", f"{name}-0.{name}:{BENCH_PORT}"),
            f"--limit={LIMIT_S:g}",
        ],
        "env": [
            {"name": "ATOLL_BENCH_TOKEN", "value": token},
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "ports": [{"name": BENCH, "containerPort": BENCH_PORT}],
        # No limits: a CPU limit would lower what is measured.
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}},
        "securityContext": RESTRICTED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    needs = training.spec.resources
    pod: Json = {
        "restartPolicy": "Never",
        "subdomain": name,
        "containers": [container],
        "tolerations": tolerations(needs, options),
        "affinity": _affinity(training, options),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 1,
    }
    if selector := node_selector(needs, options):
        pod["nodeSelector"] = selector
    pod |= options.shared("imagePullSecrets", "hostNetwork", "dnsPolicy")
    body = {
        "completions": 2,
        "parallelism": 2,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": BENCH_TTL_S,
        "template": {"metadata": {"labels": {**metadata["labels"], PART: BENCH}}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": body}


def _affinity(training: Training, options: KubernetesOptions) -> Json:
    """Where the two bench pods run: the ranks' node rules, plus rules between these pods.

    `strict` requires two different nodes that run ranks; `preferred` prefers them. With a floor,
    the link is measured before there are ranks: then on any two nodes that the ranks may use, and
    the result marks them as not the ranks' own.
    """
    own = affinity(training, options) or {}
    rules = {"nodeAffinity": own["nodeAffinity"]} if "nodeAffinity" in own else {}
    spread = _term({UID: training.uid, PART: BENCH})
    near = _term(ranks_of(training))
    if training.spec.bench.placement == "strict":
        return {**rules, "podAffinity": {REQUIRED: [near]}, "podAntiAffinity": {REQUIRED: [spread]}}
    rules["podAntiAffinity"] = {PREFERRED: [{"weight": SPREAD_WEIGHT, "podAffinityTerm": spread}]}
    if not has_floor(training.spec):
        rules["podAffinity"] = {PREFERRED: [{"weight": NEAR_WEIGHT, "podAffinityTerm": near}]}
    return rules


def _term(labels: dict[str, str]) -> Json:
    return {"topologyKey": HOST, "labelSelector": {"matchLabels": labels}}


def is_bench_over(training: Training) -> bool:
    """Whether the result of the bench is stored, and its pods may be deleted."""
    return training.status.bench.phase in DONE


def read_bench(
    training: Training,
    pods: Iterable[Pod],
    ranks: Iterable[Pod],
    options: KubernetesOptions,
    now: float,
    *,
    created_at: float | None,
    are_ranks_placed: bool,
) -> ObservedBench:
    """The state of the bench, from its own `pods` and those of the ranks.

    `made_at` is when its Job was created; None if it was not.
    """
    pair = sorted((p for p in pods if not p.is_leaving and p.index in (0, 1)), key=_index)
    if not pair:
        if created_at is not None:
            return _missing(now - created_at, options)
        if has_floor(training.spec) or are_ranks_placed:
            return ObservedBench(state="idle", message="about to be measured")
        return ObservedBench(state="waiting", message="waits until all ranks have nodes")
    if pair[-1].index == 1 and pair[-1].status.get("phase") == "Succeeded":
        return _result(pair, {p.node for p in ranks if p.node})
    for pod in pair:
        if pod.status.get("phase") == "Failed" or _is_hopeless(pod, options, now):
            return ObservedBench(state="failed", message=_describe_failure(pod, now))
    waiting = [p for p in pair if "running" not in p.state and not p.is_over]
    if waiting or len(pair) < 2:
        text = waiting[0].waits_for if waiting else ""
        return ObservedBench(state="waiting", message=text or "its pods are being started")
    a, b = (p.node for p in pair)
    return ObservedBench(state="running", message=f"measuring {a} with {b}")


def _missing(since_s: float, options: KubernetesOptions) -> ObservedBench:
    """The state of a bench whose Job has no pods: a quota refused them, or they were deleted."""
    limit_s = options.image_timeout_s
    if since_s > limit_s:
        return ObservedBench(state="failed", message=f"its pods are not there after {limit_s:g} s")
    return ObservedBench(state="waiting", message="its pods are being created")


def _result(pair: list[Pod], workers: set[str]) -> ObservedBench:
    nodes = {p.index: p.node or "unknown" for p in pair}
    ended: Json = pair[-1].state.get("terminated") or {}
    try:
        result = decode(str(ended.get("message", "")), BenchResult)
    except ValidationError as error:
        return ObservedBench(state="failed", message=f"its result cannot be read: {error}")
    a, b = nodes.get(0, "unknown"), nodes[1]
    result = replace(result, probe_node_a=a, probe_node_b=b, is_worker_pair={a, b} <= workers)
    return ObservedBench(state="done", result=result)


def _index(pod: Pod) -> int:
    return pod.index


def _is_hopeless(pod: Pod, options: KubernetesOptions, now: float) -> bool:
    is_late = now - pod.created_at > options.image_timeout_s
    return pod.waiting_reason in HOPELESS or (pod.waiting_reason in BROKEN and is_late)


def _describe_failure(pod: Pod, now: float) -> str:
    if not pod.is_over:
        return pod.waits_for
    ended = pod.exit(is_stopped=False, now=now)
    text = ended.log_tail[-1] if ended.log_tail else ended.message
    return f"the pod on {pod.node} ended with {ended.reason}: {text or f'exit code {ended.code}'}"


class Members(NamedTuple):
    """The agents that must reach each other, and when the last of them got its node."""

    agents: frozenset[str]
    placed_at: float


def members(newest: Iterable[Pod], desired: DesiredState) -> Members | None:
    """The agents of the ranks that have a node; None while the scheduler has yet to decide on one.

    A rank for which there is no room is not waited for: it joins when it gets a node.
    """
    pods = [pod for pod in newest if pod.rank < desired.size]
    undecided = desired.size - len(pods) + sum(not _is_decided(pod) for pod in pods)
    on_nodes = [p for p in pods if p.node is not None and not p.is_over and not p.is_leaving]
    if undecided or not on_nodes:
        return None
    return Members(
        agents=frozenset(agent_name(p.rank, p.node) for p in on_nodes if p.node),
        placed_at=max(_placed_at(p) for p in on_nodes),
    )


def _is_decided(pod: Pod) -> bool:
    return pod.node is not None or pod.is_over or pod.waiting_reason == "Unschedulable"


def _placed_at(pod: Pod) -> float:
    return when(pod.condition("PodScheduled").get("lastTransitionTime")) or pod.created_at
