"""Placement: which nodes a rank may use, and how ranks are spread. Pure."""

from __future__ import annotations

from typing import Any

from atoll.backends.kubernetes.names import CONTAINER, PART, PROVIDER, REGION, UID
from atoll.backends.kubernetes.options import KubernetesOptions
from atoll.core.spec import Resources
from atoll.core.status import Training

Json = dict[str, Any]

# How ranks lie in the cluster, by `topology_spread`: the node label they keep to or spread over.
SPREAD = {"provider-aware": PROVIDER, "region-aware": REGION}


def ranks_of(training: Training) -> dict[str, str]:
    """The labels of its ranks' pods, and of no others of its pods."""
    return {UID: training.uid, PART: CONTAINER}


def tolerations(needs: Resources, options: KubernetesOptions) -> list[Json]:
    own = options.own_pod.get("tolerations")
    merged: list[Json] = list(own or ())
    if own is None and needs.gpu_count:
        merged.append(
            {"key": options.gpu_resource_key, "operator": "Exists", "effect": "NoSchedule"}
        )
    keys = {t.get("key") for t in merged}
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if key not in keys:
            merged.append(
                {
                    "key": key,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": options.lost_node_s,
                }
            )
    return merged


def node_selector(needs: Resources, options: KubernetesOptions) -> dict[str, str]:
    """The table's labels under the caller's own, where there is one value for each."""
    rows = options.gpu_rows(needs.gpu_models)
    labels = {key: values[0] for key, values in rows[0].items()} if _is_one(rows) else {}
    return {**options.patched({"nodeSelector": labels}).get("nodeSelector", {})}


def _is_one(rows: list[dict[str, list[str]]]) -> bool:
    return len(rows) == 1 and all(len(values) == 1 for values in rows[0].values())


def _gpu_rules(needs: Resources, options: KubernetesOptions) -> list[list[Json]]:
    """Rules of which one list must hold; those that fit a selector are there."""
    rows = options.gpu_rows(needs.gpu_models)
    if not rows or _is_one(rows):
        return [[]]
    return [
        [{"key": key, "operator": "In", "values": values} for key, values in row.items()]
        for row in rows
    ]


def _node_rules(training: Training, options: KubernetesOptions) -> list[Json]:
    needs, providers = training.spec.resources, training.spec.provider_filter
    rules: list[tuple[str, str, list[str]]] = []
    if needs.min_gpu_memory_gb is not None and needs.gpu_count:
        mib = needs.min_gpu_memory_gb * 10**9 // 2**20
        rules.append((options.gpu_memory_label, "Gt", [str(mib - 1)]))
    if providers.include is not None:
        rules.append((PROVIDER, "In", providers.include))
    if providers.exclude:
        rules.append((PROVIDER, "NotIn", providers.exclude))
    return [{"key": key, "operator": how, "values": values} for key, how, values in rules]


def affinity(training: Training, options: KubernetesOptions) -> Json | None:
    merged: Json = {**options.own_pod.get("affinity", {})}
    rules = _node_rules(training, options)
    by_gpu = _gpu_rules(training.spec.resources, options)
    if rules or by_gpu != [[]]:
        node = {**merged.get("nodeAffinity", {})}
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        # Terms are alternatives: each of the caller's own must meet our rules as well.
        terms = node.get(required, {}).get("nodeSelectorTerms") or [{}]
        node[required] = {
            "nodeSelectorTerms": [
                {**term, "matchExpressions": [*term.get("matchExpressions", ()), *gpu, *rules]}
                for term in terms
                for gpu in by_gpu
            ]
        }
        merged["nodeAffinity"] = node
    if training.spec.topology_spread == "pack" and "podAffinity" not in merged:
        near = [
            {
                "weight": weight,
                "podAffinityTerm": {
                    "topologyKey": key,
                    "labelSelector": {"matchLabels": ranks_of(training)},
                },
            }
            for key, weight in (
                ("kubernetes.io/hostname", 100),
                ("topology.kubernetes.io/zone", 50),
            )
        ]
        merged["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": near}
    return merged or None


def spread(training: Training) -> list[Json] | None:
    key = SPREAD.get(training.spec.topology_spread)
    if key is None:
        return None
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": ranks_of(training)},
        }
    ]
