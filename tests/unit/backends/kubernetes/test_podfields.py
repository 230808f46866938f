"""What the API server would refuse is refused before: with the field, the value, what is right."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.backends.kubernetes.options import KubernetesOptions as Options
from atoll.backends.kubernetes.podfields import quantity
from atoll.core.errors import ValidationError
from atoll.core.spec import ProviderFilter, Resources
from tests.unit.backends.kubernetes.kube import Json, training

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
# (options, the field that is named)
REFUSED: list[tuple[Json, str]] = [
    ({"labels": {"team a": "x"}}, "labels"),
    ({"labels": {"team": "x y"}}, "labels.team"),
    ({"labels": {"team": "x" * 64}}, "labels.team"),
    ({"annotations": {"a b": "x"}}, "annotations"),
    ({"node_selector": {"pool": "-gpu"}}, "node_selector.pool"),
    ({"node_selector": {"a/b/c": "x"}}, "node_selector"),
    ({"tolerations": [{"key": "a", "effect": "NoRun"}]}, "tolerations[0].effect"),
    ({"tolerations": [{"key": "a", "operator": "In"}]}, "tolerations[0].operator"),
    ({"tolerations": [{"operator": "Equal", "value": "a"}]}, "tolerations[0].operator"),
    (
        {"tolerations": [{"key": "a", "operator": "Exists", "value": "b"}]},
        "tolerations[0].value",
    ),
    (
        {"tolerations": [{"key": "a", "effect": "NoSchedule", "tolerationSeconds": 1}]},
        "tolerations[0].effect",
    ),
    ({"shm_size": "8 GB"}, "shm_size"),
    ({"shm_size": "-1Gi"}, "shm_size"),
    ({"service_account": "Trainer"}, "service_account"),
    ({"priority_class_name": "High Priority"}, "priority_class_name"),
    ({"runtime_class_name": "g_visor"}, "runtime_class_name"),
    ({"image_pull_secrets": ["ok", "A b"]}, "image_pull_secrets[1]"),
    ({"env_from_secrets": ["A_b"]}, "env_from_secrets[0]"),
    ({"volumes": [{"name": "Data", "emptyDir": {}}]}, "volumes[0].name"),
    ({"volumes": [{"name": "d", "emptyDir": {"sizeLimit": "1 Gi"}}]}, "volumes[0].emptyDir"),
    ({"volumes": [{"name": "d", "emptyDir": {}, "hostPath": {"path": "/x"}}]}, "volumes[0]"),
    ({"gpu_resource_key": "gpu"}, "gpu_resource_key"),
    ({"gpu_memory_label": "a b"}, "gpu_memory_label"),
    ({"gpu_nodes": {"X": {"a": "b c"}}}, "gpu_nodes.X.a"),
    ({"pod": {"nodeSelector": {"pool": "a b"}}}, "pod.nodeSelector.pool"),
    ({"pod": {"tolerations": [{"key": "a", "effect": "x"}]}}, "pod.tolerations[0].effect"),
    (
        {"pod": {"containers": [{"name": "rank", "resources": {"limits": {"cpu": "two"}}}]}},
        "pod.containers[0].resources.limits.cpu",
    ),
    (
        {"pod": {"containers": [{"name": "rank", "resources": {"limits": {"gpu": 1}}}]}},
        "pod.containers[0].resources.limits",
    ),
    ({"pod": {"initContainers": [{"name": "a"}]}}, "pod.initContainers[0].image"),
    ({"pod": {"initContainers": [{"name": "A", "image": "x"}]}}, "pod.initContainers[0].name"),
    (
        {"pod": {"topologySpreadConstraints": [{"maxSkew": 0, "topologyKey": "a",
         "whenUnsatisfiable": "ScheduleAnyway"}]}},
        "pod.topologySpreadConstraints[0].maxSkew",
    ),
    (
        {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "a", "operator": "In"}]}]}}}},
        f"affinity.nodeAffinity.{REQUIRED}.nodeSelectorTerms[0].matchExpressions[0].values"[9:],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("options", "field"), REFUSED, ids=range(len(REFUSED)))
def test_what_the_api_server_would_refuse_is_refused_with_its_field(
    options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        Options(**options)
    assert field in refused.value.field
    assert refused.value.expected.startswith("expected")


TAKEN: list[Json] = [
    {"labels": {"example.com/team": "A_b.c-1", "empty": ""}},
    {"annotations": {"Note": "any text, at all"}},
    {"tolerations": [{"operator": "Exists"}, {"key": "a", "value": "b"}]},
    {"tolerations": [{"key": "a", "effect": "NoExecute", "tolerationSeconds": 3}]},
    {"shm_size": "1.5Gi"},
    {"pod": {"nodeSelector": {"pool": None}}},
    {"pod": {"containers": [{"name": "rank", "resources": {"requests": {"cpu": 2}}}]}},
    {"volumes": [{"name": "d", "emptyDir": {"sizeLimit": 1024}}]},
]


@pytest.mark.parametrize("options", TAKEN)
def test_what_it_takes_is_not_refused(options: dict[str, Any]) -> None:
    Options(**options)


def test_providers_are_values_of_a_label() -> None:
    backend = KubernetesBackend(cluster=object())  # type: ignore[arg-type]
    backend.check(training(provider_filter=ProviderFilter(include=["aws"])).spec)
    with pytest.raises(ValidationError, match=r"provider_filter\.exclude: 'a b'"):
        backend.check(training(provider_filter=ProviderFilter(exclude=["a b"])).spec)


def test_a_request_of_the_options_above_the_limit_of_the_training_is_refused() -> None:
    patch = {"containers": [{"name": "rank", "resources": {"requests": {"cpu": "4"}}}]}
    backend = KubernetesBackend(cluster=object(), pod=patch)  # type: ignore[arg-type]
    backend.check(training(resources=Resources(cpu="4")).spec)
    with pytest.raises(ValidationError, match=r"requests\.cpu: '4' .* at most the limit, 2"):
        backend.check(training(resources=Resources(cpu="2")).spec)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1", 1), ("1.5", 1.5), (".5", 0.5), ("500m", 0.5), ("1Ki", 1024), ("2e3", 2000), ("-1", -1)],
)
def test_quantities(text: str, number: float) -> None:
    assert quantity(text) == number


@pytest.mark.parametrize("text", ["", "1 Gi", "Gi", "1gi", "1GB", "1e", "0x1", None, True, [], "١"])
def test_no_quantities(text: object) -> None:
    assert quantity(text) is None
