"""The objects beside the ranks of a training: its etcd and its link bench. Pure.

The etcd is a Deployment of one pod, without a disk: its keys are written again if they are lost.
No rank starts before it answers: the Job is suspended, or, where a queue decides when the Job
runs, its start gate stays shut.

The link bench is a Job of two pods that measure the link between them. See `_affinity` for where.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from atoll.backends.kubernetes.fabric import RESTRICTED
from atoll.backends.kubernetes.names import BENCH, ETCD, PART, UID
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.backends.kubernetes.placement import affinity, node_selector, ranks_of, tolerations
from atoll.backends.kubernetes.pod import BROKEN, HOPELESS, Pod
from atoll.backends.kubernetes.render import etcd_name, gang_metadata, gang_name, render_headless
from atoll.core.bench import DONE, LIMIT_S, has_floor
from atoll.core.errors import ValidationError
from atoll.core.mesh import DEFAULT_ETCD_PORT
from atoll.core.model import decode
from atoll.core.status import BenchResult, ObservedBench, Training

Json = dict[str, Any]

BENCH_PORT = 28_411
HOST = "kubernetes.io/hostname"
BENCH_KEPT_S = 3600  # how long a finished Job that nobody deletes stays
# NEAR counts once for each rank on a node: below 100 ranks, two nodes score higher than one.
APART, NEAR = 100, 1
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
            f"--host-whitelist={_hosts(etcd_name(training))}",
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


def _hosts(name: str) -> str:
    """By which names the etcd may be asked: its Service, its pod, and a forwarded port."""
    names = [name, f"{name}.$(HOME_NS)", f"{name}.$(HOME_NS).svc"]
    names.append(f"{name}.$(HOME_NS).svc.cluster.local")
    return ",".join([*names, "$(POD_IP)", "localhost", "127.0.0.1"])


def answering(pods: list[Pod]) -> Pod | None:
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


def trouble_of(deployment: Json) -> str:
    """Why the Deployment's pod cannot be created (quota, admission), as far as that is known."""
    conditions = deployment.get("status", {}).get("conditions") or ()
    messages = (c.get("message", "") for c in conditions if c["type"] == "ReplicaFailure")
    return next(messages, "")


def etcd_words(pods: list[Pod], trouble: str = "") -> str:
    """One line that says what a held Job waits for."""
    reasons = (pod.waits_for for pod in pods if pod.waits_for and not pod.is_leaving)
    waits = next(reasons, "" if pods else trouble)
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
            *("python", "-m", "atoll.bench.netbench_pair", f"{name}-0.{name}:{BENCH_PORT}"),
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
        "ttlSecondsAfterFinished": BENCH_KEPT_S,
        "template": {"metadata": {"labels": {**metadata["labels"], PART: BENCH}}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": body}


def _affinity(training: Training, options: KubernetesOptions) -> Json:
    """Where the two bench pods run: the ranks' node rules, plus rules between these pods.

    `strict` requires two different nodes that run ranks; `preferred` prefers them. With a floor,
    the link is measured before there are ranks: then on any two nodes that the ranks may use, and
    the result says that they are not the ranks' own.
    """
    own = affinity(training, options) or {}
    rules = {"nodeAffinity": own["nodeAffinity"]} if "nodeAffinity" in own else {}
    apart = _term({UID: training.uid, PART: BENCH})
    near = _term(ranks_of(training))
    if training.spec.bench.placement == "strict":
        return {**rules, "podAffinity": {REQUIRED: [near]}, "podAntiAffinity": {REQUIRED: [apart]}}
    rules["podAntiAffinity"] = {PREFERRED: [{"weight": APART, "podAffinityTerm": apart}]}
    if not has_floor(training.spec):
        rules["podAffinity"] = {PREFERRED: [{"weight": NEAR, "podAffinityTerm": near}]}
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
    made_at: float | None,
    are_ranks_placed: bool,
) -> ObservedBench:
    """The state of the bench, from its own `pods` and those of the ranks.

    `made_at` is when its Job was created; None if it was not.
    """
    pair = sorted((p for p in pods if not p.is_leaving and p.index in (0, 1)), key=_index)
    if not pair:
        if made_at is not None:
            return _missing(now - made_at, options)
        if has_floor(training.spec) or are_ranks_placed:
            return ObservedBench(state="idle", message="about to be measured")
        return ObservedBench(state="waiting", message="waits until all ranks have nodes")
    if pair[-1].index == 1 and pair[-1].status.get("phase") == "Succeeded":
        return _result(pair, {p.node for p in ranks if p.node})
    for pod in pair:
        if pod.status.get("phase") == "Failed" or _is_hopeless(pod, options, now):
            return ObservedBench(state="failed", message=_bench_words(pod, now))
    waiting = [p for p in pair if "running" not in p.state and not p.is_over]
    if waiting or len(pair) < 2:
        words = waiting[0].waits_for if waiting else ""
        return ObservedBench(state="waiting", message=words or "its pods are being started")
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


def _bench_words(pod: Pod, now: float) -> str:
    if not pod.is_over:
        return pod.waits_for
    ended = pod.exit(is_stopped=False, now=now)
    words = ended.log_tail[-1] if ended.log_tail else ended.message
    return f"the pod on {pod.node} ended with {ended.reason}: {words or f'exit code {ended.code}'}"
