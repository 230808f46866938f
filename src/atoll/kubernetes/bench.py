"""The link bench of a training on a cluster: a Job of two pods that measure each other. Pure.

`strict` pods run on the nodes of the ranks, on two of them, or wait. `preferred` ones do if they
can. With a floor the link is measured before there are ranks: then on nodes that the ranks may
run on, and the result says that they are not (yet) theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from atoll.core.bench import DONE, LIMIT_S, has_floor
from atoll.core.errors import ValidationError
from atoll.core.model import decode
from atoll.core.status import BenchResult, BenchSeen, Training
from atoll.kubernetes.fabric import RESTRICTED
from atoll.kubernetes.names import BENCH, PART, UID
from atoll.kubernetes.options import Options
from atoll.kubernetes.place import affinity, node_selector, ranks_of, tolerations
from atoll.kubernetes.pod import BROKEN, HOPELESS, Pod
from atoll.kubernetes.render import gang_metadata, gang_name, render_headless

Json = dict[str, Any]

PORT = 28_411
HOST = "kubernetes.io/hostname"
KEPT_S = 3600  # a Job that nobody asks after any more
# The scheduler adds up ranks: as long as a node has fewer than 100, two nodes beat one.
APART, NEAR = 100, 1
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"


def bench_name(training: Training) -> str:
    return f"{gang_name(training)}-bench"


def render_bench_service(training: Training, options: Options, owner: Json | None) -> Json:
    metadata = gang_metadata(training, owner, options, name=bench_name(training))
    return render_headless(metadata, training, BENCH, BENCH, PORT)


def render_bench(training: Training, options: Options, owner: Json | None, token: str) -> Json:
    name = bench_name(training)
    metadata = gang_metadata(training, owner, options, name=name)
    container = {
        "name": BENCH,
        "image": options.agent_image,
        "command": [
            *("python", "-m", "atoll.bench.netbench_pair", f"{name}-0.{name}:{PORT}"),
            f"--limit={LIMIT_S:g}",
        ],
        "env": [
            {"name": "ATOLL_BENCH_TOKEN", "value": token},
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "ports": [{"name": BENCH, "containerPort": PORT}],
        # No limit: what it is held to would be what it measures.
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
    optional = {
        "nodeSelector": node_selector(needs, options) or None,
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets] or None,
        "hostNetwork": options.is_host_network or None,
        "dnsPolicy": "ClusterFirstWithHostNet" if options.is_host_network else None,
    }
    pod |= {field: value for field, value in optional.items() if value is not None}
    body = {
        "completions": 2,
        "parallelism": 2,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "ttlSecondsAfterFinished": KEPT_S,
        "template": {"metadata": {"labels": {**metadata["labels"], PART: BENCH}}, "spec": pod},
    }
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": body}


def _affinity(training: Training, options: Options) -> Json:
    """The ranks' own rules about nodes, and where the two lie to them and to each other."""
    own = affinity(training, options) or {}
    made = {"nodeAffinity": own["nodeAffinity"]} if "nodeAffinity" in own else {}
    apart = _term({UID: training.uid, PART: BENCH})
    near = _term(ranks_of(training))
    if training.spec.bench.placement == "strict":
        return {**made, "podAffinity": {REQUIRED: [near]}, "podAntiAffinity": {REQUIRED: [apart]}}
    made["podAntiAffinity"] = {PREFERRED: [{"weight": APART, "podAffinityTerm": apart}]}
    if not has_floor(training.spec):
        made["podAffinity"] = {PREFERRED: [{"weight": NEAR, "podAffinityTerm": near}]}
    return made


def _term(labels: dict[str, str]) -> Json:
    return {"topologyKey": HOST, "labelSelector": {"matchLabels": labels}}


def is_over(training: Training) -> bool:
    """Whether what became of it is stored, and its pods may go."""
    return training.status.bench.phase in DONE


def read_bench(
    training: Training,
    pods: Iterable[Pod],
    ranks: Iterable[Pod],
    options: Options,
    now: float,
    *,
    made_at: float | None,
    are_ranks_placed: bool,
) -> BenchSeen:
    """`pods` are its own, `ranks` those of the ranks; its Job was `made_at`, if it was."""
    both = sorted((p for p in pods if not p.is_leaving and p.index in (0, 1)), key=_index)
    if not both:
        if made_at is not None:
            return _missing(now - made_at, options)
        if has_floor(training.spec) or are_ranks_placed:
            return BenchSeen(state="idle", message="about to be measured")
        return BenchSeen(state="waiting", message="waits until the ranks have their nodes")
    if both[-1].index == 1 and both[-1].status.get("phase") == "Succeeded":
        return _result(both, {p.node for p in ranks if p.node})
    for pod in both:
        if pod.status.get("phase") == "Failed" or _is_hopeless(pod, options, now):
            return BenchSeen(state="failed", message=_words(pod, now))
    waiting = [p for p in both if "running" not in p.state and not p.is_over]
    if waiting or len(both) < 2:
        words = waiting[0].waits_for if waiting else ""
        return BenchSeen(state="waiting", message=words or "its pods are being started")
    a, b = (p.node for p in both)
    return BenchSeen(state="running", message=f"measuring {a} with {b}")


def _missing(since_s: float, options: Options) -> BenchSeen:
    """No pods of a Job that was made: refused by a quota, or taken away."""
    limit_s = options.image_timeout_s
    if since_s > limit_s:
        return BenchSeen(state="failed", message=f"its pods are not there after {limit_s:g} s")
    return BenchSeen(state="waiting", message="its pods are being made")


def _result(both: list[Pod], workers: set[str]) -> BenchSeen:
    nodes = {p.index: p.node or "unknown" for p in both}
    ended: Json = both[-1].state.get("terminated") or {}
    try:
        result = decode(str(ended.get("message", "")), BenchResult)
    except ValidationError as error:
        return BenchSeen(state="failed", message=f"its result cannot be read: {error}")
    a, b = nodes.get(0, "unknown"), nodes[1]
    result = replace(result, probe_node_a=a, probe_node_b=b, is_worker_pair={a, b} <= workers)
    return BenchSeen(state="done", result=result)


def _index(pod: Pod) -> int:
    return pod.index


def _is_hopeless(pod: Pod, options: Options, now: float) -> bool:
    is_late = now - pod.created_at > options.image_timeout_s
    return pod.waiting_reason in HOPELESS or (pod.waiting_reason in BROKEN and is_late)


def _words(pod: Pod, now: float) -> str:
    if not pod.is_over:
        return pod.waits_for
    ended = pod.exit(is_stopped=False, now=now)
    said = ended.log_tail[-1] if ended.log_tail else ended.message
    return f"the pod on {pod.node} ended with {ended.reason}: {said or f'exit code {ended.code}'}"
