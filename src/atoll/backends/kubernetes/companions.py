"""The companions of a training's ranks: its etcd, the watch over its mesh, its link bench.

The etcd is a Deployment of one pod without a disk: its keys are written again if they are lost. No
rank starts before it answers: the Job is suspended, or, where a queue decides when the Job runs,
its start gate stays shut. The link bench is a Job of two pods that measure the link between them.
The pods of companions come with the same list or watch as those of ranks, so observing them costs
no extra request.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Awaitable, Callable, Iterable
from operator import attrgetter
from typing import Any

from msgspec.structs import replace

from atoll.backends.companions import bench_command, etcd_arguments
from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.followups import PatchJob
from atoll.backends.kubernetes.job import Job
from atoll.backends.kubernetes.names import BENCH, ETCD, PART, UID
from atoll.backends.kubernetes.options import REQUIRED, KubernetesOptions
from atoll.backends.kubernetes.pod import Pod, when
from atoll.backends.kubernetes.render import (
    HOST,
    RESTRICTED,
    affinity,
    etcd_name,
    gang_metadata,
    gang_name,
    node_selector,
    owner_in,
    prefer,
    ranks_of,
    render_fields,
    render_headless,
    term_of,
    tolerations,
)
from atoll.core.errors import Conflict, ValidationError
from atoll.core.mesh import DEFAULT_ETCD_PORT, MeshState
from atoll.core.model import decode
from atoll.core.ports import Key
from atoll.core.status import (
    BENCH_DONE,
    BENCH_LIMIT_S,
    BenchResult,
    DesiredState,
    Followup,
    MeshStatus,
    Observation,
    ObservedBench,
    Training,
    sooner,
)
from atoll.mesh.watch import Members, MeshWatches, agent_name

Json = dict[str, Any]

REAPPLY_S = 5.0  # between two attempts to create an etcd that has no pod
BENCH_EVERY_S = 5.0  # its end comes with the watch; this only checks BENCH_LIMIT_S
BLOCKED_EVERY_S = 30.0  # the end comes with the watch; this only checks image_timeout_s


class StartEtcd(Followup, frozen=True):
    """Create the etcd. Without a Training object, `job` owns it."""

    job: Job | None


class FollowMesh(Followup, frozen=True):
    """Make the mesh watch expect these agents, and read their reports in that etcd."""

    endpoint: str
    members: Members | None


class ClearBench(Followup, frozen=True):
    """Delete the Job and Service of a bench whose result is stored."""


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
        self._meshes = MeshWatches(
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
        job: Job | None,
        newest: list[Pod],
        pods: list[Pod],
        observation: Observation,
        now: float,
    ) -> Observation:
        """Adds etcd, mesh and bench to `observation`; `newest` is the last pod of each rank."""
        options, spec = self._options, training.spec
        has_bench = spec.bench.mode != "off"
        is_blocked = job is not None and job.is_blocked
        if not (spec.needs_etcd or has_bench or is_blocked):
            return observation
        etcd = [pod for pod in pods if pod.part == ETCD]
        if job is not None and job.is_blocked and ready_etcd(etcd) is not None:
            observation = _with_followups(
                observation, PatchJob(why="its etcd answers", patch=job.unblock())
            )
        desired = observation.desired
        agents = None if desired is None else members(newest, desired)
        if desired is not None and desired.size > 0:
            is_ending = training.is_cancelling or bool(training.status.failing)
            if options.has_own_etcd(spec) and observation.is_supervised and not is_ending:
                observation = self._observe_etcd(training, job, etcd, observation, now)
            if options.has_gate(spec):
                observation = self._observe_mesh(training, agents, etcd, observation)
        if has_bench:
            bench = [pod for pod in pods if pod.part == BENCH]
            observation = self._observe_bench(training, agents, newest, bench, observation, now)
        return observation

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
        self, training: Training, namespace: str, job: Job | None, now: float
    ) -> None:
        owner = await self._make_service(training, namespace, job, BENCH)
        body = render_bench(training, self._options, owner, secrets.token_hex(16))
        with contextlib.suppress(Conflict):  # this operator or the one before it made it
            await self._cluster.create("jobs", namespace, body)
        self._benches.setdefault(training.uid, now)

    async def release(self, training: Training, namespace: str) -> None:
        """The etcd, mesh and bench of the training are deleted. May be repeated."""
        spec, options = training.spec, self._options
        if options.has_own_etcd(spec):
            kinds = ("deployments", "services")
            await self._cluster.drop(kinds, namespace, etcd_name(training))
        self._etcds.pop(training.uid, None)
        if options.has_gate(spec):
            await self._meshes.drop(training, options.etcd_endpoint)
        if spec.bench.mode != "off":
            await self._clear_bench(training, namespace)

    def _observe_etcd(
        self,
        training: Training,
        job: Job | None,
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
        if job is None or not job.is_blocked:
            return observation
        limit_s = self._options.image_timeout_s
        observation = _with_followups(observation, again_in_s=min(limit_s, BLOCKED_EVERY_S))
        for pod in pods:
            if pod.is_hopeless(limit_s, now):
                return replace(observation, fault=f"its etcd: {pod.waits_for}")
        return replace(observation, message=describe_etcd(pods, pod_error))

    async def _start_etcd(
        self, training: Training, namespace: str, job: Job | None, now: float
    ) -> None:
        owner = await self._make_service(training, namespace, job, ETCD)
        name, body = etcd_name(training), render_etcd(training, self._options, owner)
        deployment = await self._cluster.patch("deployments", namespace, name, body, type="apply")
        self._etcds[training.uid] = (now, pod_error_of(deployment))

    async def _make_service(
        self, training: Training, namespace: str, job: Job | None, part: str
    ) -> Json | None:
        """Returns the owner of all objects of the companion."""
        owner = owner_in(training, job, is_owner=self._is_owner)
        service = render_companion_service(training, self._options, owner, part)
        name = service["metadata"]["name"]
        await self._cluster.patch("services", namespace, name, service, type="apply")
        return owner

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
        agents: Members | None,
        newest: list[Pod],
        pods: list[Pod],
        observation: Observation,
        now: float,
    ) -> Observation:
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
        status = training.status.bench
        is_late = status.started_at is not None and now >= status.started_at + BENCH_LIMIT_S
        # Its result is stored, or is about to be in this pass.
        is_over = status.phase in BENCH_DONE or is_late or bench.state in ("done", "failed")
        if is_over and not observation.fault:
            return _with_followups(observation, ClearBench())
        return _with_followups(observation, again_in_s=BENCH_EVERY_S)

    async def _clear_bench(self, training: Training, namespace: str) -> None:
        await self._cluster.drop(("jobs", "services"), namespace, bench_name(training))
        self._benches.pop(training.uid, None)


def _with_followups(
    observation: Observation, *followups: Followup, again_in_s: float | None = None
) -> Observation:
    again_in_s = sooner(observation.again_in_s, again_in_s)
    return replace(
        observation, followups=(*observation.followups, *followups), again_in_s=again_in_s
    )


BENCH_PORT = 28_411  # below 32768, where Linux begins to give ports out
BENCH_TTL_S = 3600  # Kubernetes deletes a finished bench after this if the operator is away
# NEAR counts once for each rank on a node: below 100 ranks, two nodes score higher than one.
SPREAD_WEIGHT, NEAR_WEIGHT = 100, 1
# Of the pods of etcd and bench.
POD: Json = {
    "automountServiceAccountToken": False,
    "enableServiceLinks": False,
    "terminationGracePeriodSeconds": 1,
}


def render_companion_service(
    training: Training, options: KubernetesOptions, owner: Json | None, part: str
) -> Json:
    """A name for its etcd, or names for the two pods of its bench."""
    rows = {
        ETCD: (etcd_name(training), "client", DEFAULT_ETCD_PORT),
        BENCH: (bench_name(training), BENCH, BENCH_PORT),
    }
    name, port, number = rows[part]
    metadata = gang_metadata(training, owner, options, name=name)
    return render_headless(metadata, training, part, port, number)


def render_etcd(training: Training, options: KubernetesOptions, owner: Json | None) -> Json:
    metadata = gang_metadata(training, owner, options, name=etcd_name(training))
    labels = {**metadata["labels"], PART: ETCD}
    pod: Json = {
        "containers": [_etcd_container(training, options)],
        "tolerations": tolerations(training.spec.resources, options),
        "volumes": [{"name": "data", "emptyDir": {}}],
        **POD,
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
            *etcd_arguments(
                "/data/etcd",
                listen=f"http://0.0.0.0:{port}",
                advertise=f"http://{etcd_name(training)}:{port}",
                peer="http://127.0.0.1:2380",
                origin=f"http://127.0.0.1:{port}",
                hosts=_etcd_hosts(etcd_name(training)),
            ),
        ],
        "env": render_fields({"POD_IP": "status.podIP", "HOME_NS": "metadata.namespace"}),
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


def _etcd_hosts(name: str) -> list[str]:
    """Its Service by each of its names, its pod, and a forwarded port."""
    domains = ("", ".$(HOME_NS)", ".$(HOME_NS).svc", ".$(HOME_NS).svc.cluster.local")
    return [*(f"{name}{domain}" for domain in domains), "$(POD_IP)", "localhost", "127.0.0.1"]


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


def render_bench(
    training: Training, options: KubernetesOptions, owner: Json | None, token: str
) -> Json:
    name = bench_name(training)
    metadata = gang_metadata(training, owner, options, name=name)
    container = {
        "name": BENCH,
        "image": options.agent_image,
        "command": bench_command(
            "python", "pair", f"{name}-0.{name}:{BENCH_PORT}", limit_s=BENCH_LIMIT_S
        ),
        "env": [
            {"name": "ATOLL_BENCH_TOKEN", "value": token},
            *render_fields({"NODE_NAME": "spec.nodeName"}),
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
        **POD,
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
    pair, near = {UID: training.uid, PART: BENCH}, ranks_of(training)
    if training.spec.bench.placement == "strict":
        required = {"podAffinity": near, "podAntiAffinity": pair}
        return rules | {rule: {REQUIRED: [term_of(of)]} for rule, of in required.items()}
    rules["podAntiAffinity"] = prefer((pair, HOST, SPREAD_WEIGHT))
    if not training.spec.bench.has_floor:
        rules["podAffinity"] = prefer((near, HOST, NEAR_WEIGHT))
    return rules


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

    `created_at` is when its Job was created; None if it was not.
    """
    pair = sorted(
        (p for p in pods if not p.is_leaving and p.index in (0, 1)), key=attrgetter("index")
    )
    if not pair:
        if created_at is not None:
            return _missing(now - created_at, options)
        if training.spec.bench.has_floor or are_ranks_placed:
            return ObservedBench(state="idle", message="about to be measured")
        return ObservedBench(state="waiting", message="waits until all ranks have nodes")
    if pair[-1].index == 1 and pair[-1].status.get("phase") == "Succeeded":
        return _result(pair, {p.node for p in ranks if p.node})
    for pod in pair:
        if pod.status.get("phase") == "Failed" or pod.is_hopeless(options.image_timeout_s, now):
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


def _describe_failure(pod: Pod, now: float) -> str:
    if not pod.is_over:
        return pod.waits_for
    ended = pod.exit(is_stopped=False, now=now)
    text = ended.log_tail[-1] if ended.log_tail else ended.message
    return f"the pod on {pod.node} ended with {ended.reason}: {text or f'exit code {ended.code}'}"


def members(newest: Iterable[Pod], desired: DesiredState) -> Members | None:
    """The agents of the ranks that have a node; None while the scheduler has yet to decide on one.

    A rank for which there is no room is not waited for: it joins when it gets a node.
    """
    pods = [pod for pod in newest if pod.rank < desired.size]
    decided = [p for p in pods if p.node or p.is_over or p.waiting_reason == "Unschedulable"]
    on_nodes = [p for p in pods if p.node is not None and not p.is_over and not p.is_leaving]
    if len(decided) < desired.size or not on_nodes:
        return None
    return Members(
        agents=frozenset(agent_name(p.rank, p.node) for p in on_nodes if p.node),
        # When kubelets took them. A pod got its node just now if its kubelet has yet to do that.
        placed_at=max(when(p.status.get("startTime")) or math.inf for p in on_nodes),
    )
