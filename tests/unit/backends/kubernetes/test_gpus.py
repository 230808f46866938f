"""On which nodes replicas with GPUs may run."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.backends.kubernetes.gpus import EKS_GPU_NODES, GPU_NODES
from atoll.backends.kubernetes.render import render_job
from atoll.core.errors import ValidationError
from atoll.core.status import DesiredState
from tests.unit.backends.kubernetes.kube import Json, Options, Resources, training

INSTANCE = "node.kubernetes.io/instance-type"
KARPENTER = "karpenter.k8s.aws/instance-gpu-name"


def pod_with(gpus: list[str], **options: Any) -> Json:
    table = {"gpu_nodes": EKS_GPU_NODES} | options
    asked = training(resources=Resources(gpu_count=1, gpu_models=gpus))
    settings = Options(**table)
    settings.check(asked.spec)
    pod: Json = render_job(asked, DesiredState(version=1, size=1), settings)["spec"]["template"][
        "spec"
    ]
    return pod


def terms_of(pod: Json) -> list[dict[str, list[str]]]:
    node = pod.get("affinity", {}).get("nodeAffinity", {})
    terms = node.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    found = []
    for term in terms.get("nodeSelectorTerms", ()):
        assert {rule["operator"] for rule in term["matchExpressions"]} == {"In"}
        found.append({rule["key"]: rule["values"] for rule in term["matchExpressions"]})
    return found


def fits(pod: Json, labels: dict[str, str]) -> bool:
    """As the scheduler decides it."""
    terms = terms_of(pod)
    return pod.get("nodeSelector", {}).items() <= labels.items() and (
        not terms
        or any(all(labels.get(key) in values for key, values in term.items()) for term in terms)
    )


@pytest.mark.parametrize(
    ("gpu", "types"),
    {
        "A100": ["p4d.24xlarge", "p4de.24xlarge"],
        "H100": ["p5.48xlarge", "p5.4xlarge"],
        "H200": ["p5e.48xlarge", "p5en.48xlarge"],
        "B200": ["p6-b200.48xlarge"],
        "A10G": ["g5.xlarge", "g5.48xlarge"],
        "L4": ["g6.xlarge", "gr6.4xlarge"],
        "L40S": ["g6e.xlarge", "g6e.48xlarge"],
        "T4": ["g4dn.xlarge", "g4dn.metal"],
    }.items(),
)
def test_managed_groups_and_karpenter_both_match(gpu: str, types: list[str]) -> None:
    for name in (gpu, gpu.lower()):
        pod = pod_with([name])
        assert "nodeSelector" not in pod
        for kind in types:
            assert fits(pod, {INSTANCE: kind})
        assert fits(pod, {KARPENTER: gpu.lower(), INSTANCE: "p9.48xlarge"})
        assert not fits(pod, {INSTANCE: "m5.large"})
        assert not fits(pod, {KARPENTER: "k80"})
        assert not fits(pod, {})


def test_both_sizes_of_an_a100_are_one() -> None:
    products = pod_with(["A100"], gpu_nodes=GPU_NODES)
    for name in ("NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB"):
        assert fits(products, {"nvidia.com/gpu.product": name})
    large = pod_with(["A100-80GB"])
    assert fits(large, {INSTANCE: "p4de.24xlarge"})
    assert not fits(large, {INSTANCE: "p4d.24xlarge"})
    memory = "karpenter.k8s.aws/instance-gpu-memory"
    assert fits(large, {KARPENTER: "a100", memory: "81920"})
    assert not fits(large, {KARPENTER: "a100", memory: "40960"})


def test_several_gpus_are_alternatives() -> None:
    pod = pod_with(["A100", "T4"])
    for labels in ({INSTANCE: "p4d.24xlarge"}, {INSTANCE: "g4dn.xlarge"}, {KARPENTER: "t4"}):
        assert fits(pod, labels)
    assert not fits(pod, {INSTANCE: "g5.xlarge"})
    assert len(terms_of(pod)) == 2


def test_the_table_is_under_the_callers_own_selector() -> None:
    companion = pod_with(["A100"], node_selector={"pool": "a"})
    assert companion["nodeSelector"] == {"pool": "a"}
    assert fits(companion, {"pool": "a", INSTANCE: "p4d.24xlarge"})
    assert not fits(companion, {"pool": "a", INSTANCE: "m5.large"})
    chosen = pod_with(["A100"], node_selector={INSTANCE: "p9.new"})
    assert chosen["nodeSelector"] == {INSTANCE: "p9.new"}
    assert fits(chosen, {INSTANCE: "p9.new"})
    assert terms_of(chosen) == []


def test_each_of_the_callers_own_alternatives_meets_the_table() -> None:
    zones = [
        {"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in "ab"
    ]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": zones}}
    pod = pod_with(["A100"], affinity={"nodeAffinity": required})
    assert len(terms_of(pod)) == 4
    assert fits(pod, {"zone": "b", KARPENTER: "a100"})
    assert not fits(pod, {"zone": "b"})
    assert not fits(pod, {KARPENTER: "a100"})


def test_a_gpu_outside_the_table_needs_a_selector() -> None:
    with pytest.raises(ValidationError, match="node_selector") as refused:
        pod_with(["RTX6000"])
    assert refused.value.field == "gpu_models"
    pod = pod_with(["RTX6000"], node_selector={"gpu": "rtx"})
    assert pod["nodeSelector"] == {"gpu": "rtx"}
    assert terms_of(pod) == []
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}


@pytest.mark.parametrize("bad", [7, {"T4": "t4"}, {"T4": {"a": 1}}])
def test_a_bad_table_is_refused(bad: Any) -> None:
    with pytest.raises(ValidationError, match="gpu_nodes"):
        Options(gpu_nodes=bad)
