"""Which nodes a rank may run on, and how ranks lie to each other. Pure."""

from __future__ import annotations

from typing import Any

from atoll.core.spec import Resources
from atoll.core.status import Training
from atoll.kubernetes.names import CONTAINER, PART, PROVIDER, REGION, UID
from atoll.kubernetes.options import KubernetesOptions

Json = dict[str, Any]

# How ranks lie in the cluster, by `topology_spread`: the node label they keep to or spread over.
SPREAD = {"provider-aware": PROVIDER, "region-aware": REGION}


def ranks_of(training: Training) -> dict[str, str]:
    """The labels of its ranks' pods, and of no others of its pods."""
    return {UID: training.uid, PART: CONTAINER}


def tolerations(needs: Resources, options: KubernetesOptions) -> list[Json]:
    own = options.patched({}).get("tolerations")
    made: list[Json] = list(own or ())
    if own is None and needs.gpu_count:
        made.append({"key": options.gpu_resource_key, "operator": "Exists", "effect": "NoSchedule"})
    given = {t.get("key") for t in made}
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        if key not in given:
            made.append(
                {
                    "key": key,
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": options.lost_node_s,
                }
            )
    return made


def node_selector(needs: Resources, options: KubernetesOptions) -> dict[str, str]:
    """The table's labels under the caller's own."""
    is_one = len(needs.gpu_models) == 1
    labels = options.gpu_nodes[needs.gpu_models[0].upper()] if is_one else {}
    return {**options.patched({"nodeSelector": labels}).get("nodeSelector", {})}


def _node_rules(training: Training, options: KubernetesOptions) -> list[Json]:
    needs, providers = training.spec.resources, training.spec.provider_filter
    rules: list[tuple[str, str, list[str]]] = []
    if len(needs.gpu_models) > 1:
        rows = [options.gpu_nodes[model.upper()] for model in needs.gpu_models]
        (key,) = rows[0]
        if key not in options.patched({}).get("nodeSelector", {}):
            rules.append((key, "In", [row[key] for row in rows]))
    if needs.min_gpu_memory_gb is not None and needs.gpu_count:
        mib = needs.min_gpu_memory_gb * 10**9 // 2**20
        rules.append((options.gpu_memory_label, "Gt", [str(mib - 1)]))
    if providers.include is not None:
        rules.append((PROVIDER, "In", providers.include))
    if providers.exclude:
        rules.append((PROVIDER, "NotIn", providers.exclude))
    return [{"key": key, "operator": how, "values": values} for key, how, values in rules]


def affinity(training: Training, options: KubernetesOptions) -> Json | None:
    made: Json = {**options.patched({}).get("affinity", {})}
    if rules := _node_rules(training, options):
        node = {**made.get("nodeAffinity", {})}
        required = "requiredDuringSchedulingIgnoredDuringExecution"
        # Terms are alternatives: each of the caller's own must meet our rules as well.
        terms = node.get(required, {}).get("nodeSelectorTerms") or [{}]
        node[required] = {
            "nodeSelectorTerms": [
                {**term, "matchExpressions": [*term.get("matchExpressions", ()), *rules]}
                for term in terms
            ]
        }
        made["nodeAffinity"] = node
    if training.spec.topology_spread == "pack" and "podAffinity" not in made:
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
        made["podAffinity"] = {"preferredDuringSchedulingIgnoredDuringExecution": near}
    return made or None


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
