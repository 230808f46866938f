"""The option `pod`: how it is merged, what it may not say, and the short names for parts of it."""

from __future__ import annotations

import copy
import tomllib
from typing import Any

import pytest

from atoll.backends.kubernetes.companions import render_bench, render_etcd
from atoll.backends.kubernetes.options import SHORT_NAMES, ClusterOptions, ShortNames, merge_pod
from atoll.backends.kubernetes.render import render_job
from atoll.core.config import options_of
from atoll.core.errors import ValidationError
from atoll.core.status import DesiredState
from atoll.operator.manifests import read_options, render_manifests
from atoll.replicas.kubernetes import KubernetesExecutor
from tests.unit.backends.kubernetes.kube import Json, Options, Resources, Source, training


def named(*names: str, **fields: Any) -> list[Json]:
    return [{"name": name, **fields} for name in names]


# What there was, the patch, what becomes of it.
MERGES: dict[str, tuple[Json, Json, Json]] = {
    "nothing": ({"a": 1}, {}, {"a": 1}),
    "a value": ({"a": 1, "b": 2}, {"a": 3}, {"a": 3, "b": 2}),
    "a new field": ({"a": 1}, {"noSuchField": 1}, {"a": 1, "noSuchField": 1}),
    "null takes away": ({"a": 1, "b": 2}, {"a": None, "c": None}, {"b": 2}),
    "objects merge": (
        {"securityContext": {"a": 1, "deep": {"b": 1}}},
        {"securityContext": {"deep": {"b": None, "c": 2}}},
        {"securityContext": {"a": 1, "deep": {"c": 2}}},
    ),
    "a new object has no nulls": ({}, {"o": {"a": None, "b": 1}}, {"o": {"b": 1}}),
    "an object over a value": ({"a": 1}, {"a": {"b": 1}}, {"a": {"b": 1}}),
    "an object under a placeholder": ({"a": None}, {"a": {"b": 1}}, {"a": {"b": 1}}),
    "other lists are replaced": (
        {"dnsConfig": {"searches": ["a"]}},
        {"dnsConfig": {"searches": ["b"]}},
        {"dnsConfig": {"searches": ["b"]}},
    ),
    "containers merge by name": (
        {"containers": [{"name": "rank", "image": "i", "resources": {"limits": {"cpu": "1"}}}]},
        {"containers": [{"name": "rank", "resources": {"limits": {"rdma/ib": "1"}}}]},
        {
            "containers": [
                {
                    "name": "rank",
                    "image": "i",
                    "resources": {"limits": {"cpu": "1", "rdma/ib": "1"}},
                }
            ]
        },
    ),
    "new containers come last": (
        {"initContainers": named("a")},
        {"initContainers": named("b", "a", image="i")},
        {"initContainers": [{"name": "a", "image": "i"}, {"name": "b", "image": "i"}]},
    ),
    "variables are replaced by name, new ones come last": (
        {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}]},
        {"env": [{"name": "C", "value": "$(B)"}, {"name": "A", "valueFrom": {"x": 1}}]},
        {
            "env": [
                {"name": "A", "valueFrom": {"x": 1}},
                {"name": "B", "value": "2"},
                {"name": "C", "value": "$(B)"},
            ]
        },
    ),
    "volumes are replaced by name, new ones come first": (
        {"volumes": [{"name": "a", "emptyDir": {}}]},
        {"volumes": [{"name": "a", "hostPath": {"path": "/a"}}, {"name": "b", "emptyDir": {}}]},
        {"volumes": [{"name": "b", "emptyDir": {}}, {"name": "a", "hostPath": {"path": "/a"}}]},
    ),
    "mounts go by their path": (
        {"volumeMounts": [{"name": "a", "mountPath": "/a"}]},
        {"volumeMounts": [{"name": "a", "mountPath": "/b"}, {"name": "b", "mountPath": "/a"}]},
        {"volumeMounts": [{"name": "a", "mountPath": "/b"}, {"name": "b", "mountPath": "/a"}]},
    ),
    "secrets go by name": (
        {"imagePullSecrets": named("a")},
        {"imagePullSecrets": named("a", "b")},
        {"imagePullSecrets": named("a", "b")},
    ),
    "tolerations are added": (
        {"tolerations": [{"key": "a"}]},
        {"tolerations": [{"key": "a", "effect": "NoExecute"}]},
        {"tolerations": [{"key": "a"}, {"key": "a", "effect": "NoExecute"}]},
    ),
    "spread constraints are added": (
        {"topologySpreadConstraints": [{"topologyKey": "a"}]},
        {"topologySpreadConstraints": [{"topologyKey": "b"}]},
        {"topologySpreadConstraints": [{"topologyKey": "a"}, {"topologyKey": "b"}]},
    ),
    "a label that is called as a list is": (
        {"nodeSelector": {"a": "b"}},
        {"nodeSelector": {"env": "prod"}},
        {"nodeSelector": {"a": "b", "env": "prod"}},
    ),
}


@pytest.mark.parametrize("case", MERGES)
def test_a_patch_is_merged_as_kubectl_does(case: str) -> None:
    base, patch, wanted = MERGES[case]
    before = copy.deepcopy((base, patch))
    assert merge_pod(base, patch) == wanted
    assert (base, patch) == before


def rank(**fields: Any) -> Json:
    return {"containers": [{"name": "rank", **fields}]}


# The patch, the field that is refused, and a part of what would be right.
REFUSALS: list[tuple[Any, str, str]] = [
    ("high", "pod", "expected `object`"),
    ({"restartPolicy": "Always"}, "pod.restartPolicy", "max_restarts"),
    ({"subdomain": "x"}, "pod.subdomain", "expected none"),
    ({"hostname": "x"}, "pod.hostname", "expected none"),
    ({"terminationGracePeriodSeconds": 1}, "pod.terminationGracePeriodSeconds", "stop_grace_s"),
    ({"activeDeadlineSeconds": 1}, "pod.activeDeadlineSeconds", "deadline_s"),
    ({"metadata": {"finalizers": []}}, "pod.metadata", "labels and annotations are options"),
    ({"spec": {"hostNetwork": True}}, "pod.spec", "without spec around them"),
    ({"env": []}, "pod.env", "in the one named 'rank'"),
    ({"containers": {"rank": {}}}, "pod.containers", "expected a list of objects"),
    ({"containers": None}, "pod.containers", "expected a list of objects"),
    ({"volumes": None}, "pod.volumes", "expected a list of objects"),
    ({"containers": ["rank"]}, "pod.containers[0]", "expected an object"),
    ({"containers": [{"image": "x"}]}, "pod.containers[0].name", "expected text"),
    ({"containers": [{"name": "web", "image": "x"}]}, "pod.containers[0].name", "initContainers"),
    ({"nodeSelector": "gpu"}, "pod.nodeSelector", "expected an object"),
    (rank(command=["x"]), "pod.containers[0].command", "command of the training"),
    (rank(args=["x"]), "pod.containers[0].args", "command of the training"),
    (rank(image="x"), "pod.containers[0].image", "image of the training"),
    (rank(terminationMessagePath="/x"), "pod.containers[0].terminationMessagePath", "ended"),
    (rank(env=None), "pod.containers[0].env", "expected a list of objects"),
    (rank(resources=None), "pod.containers[0].resources", "expected an object"),
    (rank(env=[{"name": "RANK", "value": "1"}]), "pod.containers[0].env[0].RANK", "atoll sets"),
    (rank(env=[{"name": "ATOLL_X"}]), "pod.containers[0].env[0].ATOLL_X", "atoll sets"),
    (
        rank(volumeMounts=[{"name": "x", "mountPath": "/atoll/agent"}]),
        "pod.containers[0].volumeMounts[0].mountPath",
        "outside /atoll",
    ),
    ({"initContainers": named("start-gate")}, "pod.initContainers[0].name", "another name"),
    ({"initContainers": named("atoll-fabric")}, "pod.initContainers[0].name", "another name"),
    ({"volumes": named("atoll-report")}, "pod.volumes[0].name", "another name"),
]


@pytest.mark.parametrize(("patch", "field", "words"), REFUSALS)
def test_what_atoll_relies_on_is_refused_by_name(patch: Any, field: str, words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        KubernetesExecutor(image="train:1", pod=patch)
    assert refused.value.field == field
    assert words in refused.value.expected


def test_fields_that_only_the_cluster_knows_are_left_to_it() -> None:
    assert pod_of(Options(pod={"fieldOfTomorrow": [1]}))["fieldOfTomorrow"] == [1]


def test_a_volume_that_takes_the_place_of_the_source_is_refused_with_a_source() -> None:
    options = Options(pod={"volumes": [{"name": "source", "emptyDir": {}}]})
    options.check(training().spec)
    with pytest.raises(ValidationError, match="volumes: 'source' is not valid"):
        options.check(training(command=None, source=Source(kind="script", content=b"1")).spec)


def test_a_runtime_class_of_the_patch_is_refused_with_a_gpu() -> None:
    options = Options(pod={"runtimeClassName": "kata"})
    with pytest.raises(ValidationError, match=r"^pod\.runtimeClassName: 'kata' is not valid"):
        options.check(training(resources=Resources(gpu_count=1)).spec)


def pod_of(options: Options, **spec: Any) -> Json:
    made = render_job(training(**spec), DesiredState(version=1, size=3), options)
    pod: Json = made["spec"]["template"]["spec"]
    return pod


# Each short name, and the patch that says the same.
SAME: dict[str, tuple[Any, Json]] = {
    "service_account": ("sa", {"serviceAccountName": "sa"}),
    "node_selector": ({"a": "b"}, {"nodeSelector": {"a": "b"}}),
    "tolerations": ([{"key": "k"}], {"tolerations": [{"key": "k"}]}),
    "affinity": ({"podAffinity": {"x": 1}}, {"affinity": {"podAffinity": {"x": 1}}}),
    "runtime_class_name": ("kata", {"runtimeClassName": "kata"}),
    "image_pull_policy": ("Never", rank(imagePullPolicy="Never")),
    "image_pull_secrets": (["s"], {"imagePullSecrets": named("s")}),
    "priority_class_name": ("p", {"priorityClassName": "p"}),
    "scheduler_name": ("v", {"schedulerName": "v"}),
    "env_from_secrets": (["s"], rank(envFrom=[{"secretRef": {"name": "s"}}])),
    "volumes": (named("d", emptyDir={}), {"volumes": named("d", emptyDir={})}),
    "volume_mounts": (
        named("d", mountPath="/d"),
        rank(volumeMounts=named("d", mountPath="/d")),
    ),
    "shm_size": (
        "1Gi",
        {
            "volumes": named("shm", emptyDir={"medium": "Memory", "sizeLimit": "1Gi"}),
            **rank(volumeMounts=named("shm", mountPath="/dev/shm")),
        },
    ),
    "is_host_network": (True, {"hostNetwork": True}),
    "is_process_namespace_shared": (False, {"shareProcessNamespace": None}),
    "security_context": ({"runAsUser": 1}, {"securityContext": {"runAsUser": 1}}),
    "container_security_context": ({"a": 1}, rank(securityContext={"a": 1})),
}
# The models, the gate and the record show that nothing of atoll's own is lost.
SPEC: Json = {"resources": Resources(cpu="1", gpu_count=1, gpu_models=["T4"])}


def test_every_short_name_has_its_place() -> None:
    assert set(SAME) == set(SHORT_NAMES) == set(ShortNames.__struct_fields__)


@pytest.mark.parametrize("name", SAME)
def test_a_short_name_is_the_same_as_its_patch(name: str) -> None:
    value, patch = SAME[name]
    more: Json = {"is_start_gated": True, "agent_image": "atoll:1"}
    if name == "volume_mounts":
        more["volumes"] = SAME["volumes"][0]
    short, long = Options(**{name: value}, **more), Options(pod=patch, **more)
    assert pod_of(short, **SPEC) == pod_of(long, **SPEC)
    assert pod_of(short, **SPEC) != pod_of(Options(**more), **SPEC)
    for render in (render_etcd, lambda *given: render_bench(*given, "token")):
        assert render(training(**SPEC), short, None) == render(training(**SPEC), long, None)


def test_the_patch_counts_where_a_short_name_says_otherwise() -> None:
    pod = {"priorityClassName": "high", "nodeSelector": {"a": None, "c": "d"}}
    options = Options(priority_class_name="low", node_selector={"a": "b"}, pod=pod)
    made = pod_of(options)
    assert (made["priorityClassName"], made["nodeSelector"]) == ("high", {"c": "d"})


def test_null_takes_away_a_label_of_the_gpu_table() -> None:
    options = Options(pod={"nodeSelector": {"nvidia.com/gpu.product": None}})
    assert "nodeSelector" not in pod_of(options, **SPEC)


def test_the_start_gate_has_what_the_patch_says_of_the_rank_and_is_the_last_to_wait() -> None:
    patch = rank(securityContext={"runAsUser": 1}, resources={"limits": {"memory": "1Gi"}})
    options = Options(
        is_start_gated=True, pod={**patch, "initContainers": named("fetch", image="busybox")}
    )
    fetch, gate = pod_of(options)["initContainers"]
    assert (fetch["name"], gate["name"]) == ("fetch", "start-gate")
    assert gate["securityContext"] == {"runAsUser": 1}
    assert gate["resources"]["limits"] == {"memory": "1Gi"}


@pytest.mark.parametrize(("count", "limit"), [(0, 3072), (1, 2457), (2, 2048)])
def test_the_record_of_a_rank_fits_its_share_of_what_containers_may_say(
    count: int, limit: int
) -> None:
    extra = named(*"ab"[:count], image="busybox")
    options = Options(is_start_gated=True, pod={"initContainers": extra})
    assert f" --limit={limit} " in pod_of(options)["containers"][0]["command"][2]


TOML = """
image = "train:1"
service_account = "trainer"

[pod]
priorityClassName = "high"
nodeSelector = { pool = "gpu" }

[[pod.containers]]
name = "rank"
securityContext = { runAsUser = 1000 }
"""


def test_a_table_of_the_configuration_file_may_say_it() -> None:
    made = pod_of(options_of(ClusterOptions, tomllib.loads(TOML)))
    assert made["serviceAccountName"] == "trainer"
    assert made["priorityClassName"] == "high"
    assert made["nodeSelector"] == {"pool": "gpu"}
    assert made["containers"][0]["securityContext"] == {"runAsUser": 1000}
    with pytest.raises(ValidationError, match=r"^pod\.restartPolicy: 'Never' is not valid"):
        options_of(ClusterOptions, {"pod": {"restartPolicy": "Never"}})
    with pytest.raises(ValidationError, match=r"^pod: "):
        options_of(ClusterOptions, {"pod": "high"})


def test_the_options_of_the_operator_may_say_it() -> None:
    text = '{"pod": {"priorityClassName": "high"}, "serviceAccount": "trainer"}'
    assert read_options(text) == {
        "pod": {"priorityClassName": "high"},
        "service_account": "trainer",
    }
    (deployment,) = (
        m for m in render_manifests(image="x", options=text) if m["kind"] == "Deployment"
    )
    assert deployment["spec"]["template"]["spec"]["containers"][0]["command"][-1] == text
    with pytest.raises(ValidationError, match=r"^--options: pod\.subdomain: "):
        render_manifests(image="x", options='{"pod": {"subdomain": "x"}}')
