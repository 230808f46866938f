"""What is asked of the cluster: against golden files, and the schemas of several versions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from atoll.agent import process
from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.backends.kubernetes.render import (
    gang_name,
    render_job,
    render_service,
    render_world,
)
from atoll.backends.metrics_token import read_token
from atoll.core.errors import Permanent, ValidationError
from atoll.core.spec import BenchSpec, Code, ProviderFilter, RendezvousSpec, WorldSize
from atoll.core.status import DesiredState
from atoll.replicas.kubernetes import EKSExecutor, KubernetesExecutor
from tests.unit.backends.kubernetes.kube import Json, Options, Resources, Source, training

GOLDEN = Path(__file__).parents[3] / "golden" / "kubernetes"
VERSIONS = ("1.29", "1.31", "1.33", "1.34", "1.35", "1.37")

CODE = Code(
    content=b"x" * 2_000_000, size=2_000_000, unpacked=9_000_000, files=3, path=["src", "."]
)

# Everything that can be said about a training and an executor, in typical requests.
CASES: dict[str, tuple[Any, Options]] = {
    "plain": (training(), Options()),
    "gpu": (
        training(
            resources=Resources(
                cpu="8", memory="64Gi", gpu_count=8, gpu_models=["H100"], min_gpu_memory_gb=80
            ),
            max_restarts=3,
            deadline_s=3600.5,
            ttl_seconds=60,
            nccl_env={"NCCL_DEBUG": "INFO"},
            topology_spread="pack",
            bench=BenchSpec(mode="on-start"),
        ),
        Options(
            service_account="trainer",
            node_selector={"pool": "gpu"},
            is_controlled=True,
            has_exit_finalizer=True,
            is_start_gated=True,
        ),
    ),
    "source": (
        training(
            command=None,
            source=Source(kind="script", content=b"print('$(RANK)')\n", filename="train.py"),
            args=["--lr", "0.1 x"],
            pip_packages=["einops>=0.8"],
            rendezvous=RendezvousSpec(backend="etcd-v2", uri="s3://bucket/run42"),
            topology_spread="region-aware",
            provider_filter=ProviderFilter(include=["aws", "gcp"], exclude=["azure"]),
        ),
        Options(etcd_endpoint="etcd.infra:2379", shm_size="8Gi", kueue_queue="research"),
    ),
    "code": (training(code=CODE, pip_packages=["einops"]), Options(is_controlled=True)),
    "everything": (
        training(working_dir="/work", env={"HOME": "$HOME $(RANK)"}),
        Options(
            namespace="jobs",
            service_account="trainer",
            node_selector={"pool": "cpu"},
            tolerations=[{"key": "spot", "operator": "Exists"}],
            affinity={
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "arch", "operator": "Exists"}]}
                        ]
                    }
                }
            },
            runtime_class_name="gvisor",
            ttl_seconds_after_finished=600,
            image_pull_policy="Always",
            image_pull_secrets=["registry"],
            priority_class_name="high",
            scheduler_name="volcano",
            labels={"team": "a"},
            annotations={"note": "x"},
            env_from_secrets=["wandb"],
            volumes=[{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            volume_mounts=[{"name": "data", "mountPath": "/data"}],
            is_host_network=True,
            security_context={"runAsNonRoot": True},
        ),
    ),
    "patched": (
        training(env={"LR": "0.1"}, resources=Resources(gpu_count=1), mesh=True),
        Options(
            agent_image="atoll:1",
            is_start_gated=True,
            service_account="trainer",
            pod={
                "priorityClassName": "high",
                "hostNetwork": True,
                "enableServiceLinks": None,
                "tolerations": [{"key": "spot", "operator": "Exists"}],
                "containers": [
                    {
                        "name": "rank",
                        "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
                        "resources": {"limits": {"rdma/ib": "1"}},
                        "env": [
                            {"name": "LR", "value": "0.2"},
                            {"name": "WHO", "value": "$(RANK)"},
                        ],
                        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                    }
                ],
                "initContainers": [{"name": "fetch", "image": "fetch:1"}],
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}],
            },
        ),
    ),
}


def rendered(name: str) -> list[Json]:
    given, options = CASES[name]
    desired = DesiredState(version=1, size=given.spec.world_size.target)
    world = render_world(given, desired, options, None)
    for part in ("process.py", "unpack.py"):
        if part in world["data"]:
            assert world["data"][part] == Path(process.__file__).with_name(part).read_text()
            world["data"][part] = f"the text of agent/{part}"
    return [
        world,
        render_service(given, options, None),
        render_job(given, desired, options),
    ]


@pytest.mark.parametrize("name", CASES)
def test_requests_are_the_golden_ones(name: str, request: pytest.FixtureRequest) -> None:
    path = GOLDEN / f"{name}.json"
    if request.config.getoption("--update-golden", default=False):
        path.write_text(json.dumps(rendered(name), indent=1) + "\n")
    assert path.exists(), f"{path} is missing: run pytest --update-golden, and read it"
    assert json.loads(path.read_text()) == rendered(name)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CASES)
def test_requests_fit_the_published_schemas(name: str, version: str) -> None:
    for manifest in rendered(name):
        kubernetes_validate.validate(manifest, version, strict=True)


def job_of(options: Options | None = None, **spec: Any) -> Json:
    given = training(**spec)
    return render_job(given, DesiredState(version=1, size=3), options or Options())


def pod_of(made: Json) -> Json:
    return made["spec"]["template"]["spec"]


def container_of(made: Json) -> Json:
    return pod_of(made)["containers"][0]


def environment(made: Json) -> Json:
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container_of(made)["env"]}


def test_the_gang_is_one_indexed_job_of_the_wished_size() -> None:
    spec = job_of(max_restarts=2, deadline_s=10.2)["spec"]
    assert (spec["completions"], spec["parallelism"]) == (3, 3)
    assert spec["completionMode"] == "Indexed"
    assert spec["backoffLimitPerIndex"] == 2
    assert spec["activeDeadlineSeconds"] == 11
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_every_rank_finds_its_number_and_the_size_of_the_world_now() -> None:
    env = environment(job_of())
    index = {
        "fieldRef": {
            "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        }
    }
    for name in ("RANK", "REPLICA_RANK", "ATOLL_RANK", "BASILICA_RANK"):
        assert env[name] == index
    size = {"configMapKeyRef": {"name": gang_name(training()), "key": "size"}}
    for name in ("WORLD_SIZE", "ATOLL_WORLD_TARGET", "BASILICA_WORLD_TARGET"):
        assert env[name] == size
    assert env["NODE_NAME"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
    name = gang_name(training())
    assert env["MASTER_ADDR"] == f"{name}-0.{name}"
    assert env["BASILICA_RDZV_ENDPOINT"] == f"{name}-0.{name}:29500"
    world = (env["ATOLL_WORLD_MIN"], env["ATOLL_WORLD_MAX"])
    assert world == ("2", "8")


def test_dollars_reach_the_rank_as_they_were_written() -> None:
    made = job_of(command=["sh", "-c", "echo $$ $(RANK) $HOME"], env={"A": "$(RANK)"})
    assert container_of(made)["command"][2] == "echo $$$$ $$(RANK) $$HOME"
    assert environment(made)["A"] == "$$(RANK)"


KINDS = {
    "script": ["python", "/atoll/source/code"],
    "shell": ["sh", "/atoll/source/code"],
    "function": ["python", "-m", "atoll.agent.entrypoint", "function", "/atoll/source/code"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_shipped_code_is_run_by_its_kind(kind: Any) -> None:
    source = Source(kind=kind, content=b"x", filename="code")
    made = job_of(command=None, source=source, args=["a"])
    assert container_of(made)["command"] == [*KINDS[kind], "a"]


def test_names_leave_room_for_the_index_and_differ_by_uid() -> None:
    long = training(name="a" * 63)
    assert len(f"{gang_name(long)}-9999") <= 63
    assert gang_name(training(name="7b-run")).startswith("t7b-run-")
    assert not gang_name(training(name="a" * 45 + "-b")).count("--")
    other = training()
    assert gang_name(other) == gang_name(training())


def test_gpu_counts_are_strings_under_the_configured_key() -> None:
    needs = Resources(gpu_count=2)
    made = job_of(Options(gpu_resource_key="amd.com/gpu"), resources=needs)
    assert container_of(made)["resources"]["limits"] == {"amd.com/gpu": "2"}
    assert pod_of(made)["tolerations"][0]["key"] == "amd.com/gpu"


def test_the_callers_node_selector_wins_over_the_gpu_table() -> None:
    needs = Resources(gpu_count=1, gpu_models=["a100"])
    own = {"nvidia.com/gpu.product": "NVIDIA-A100-PCIE-40GB"}
    assert pod_of(job_of(Options(node_selector=own), resources=needs))["nodeSelector"] == own


def test_several_gpu_models_are_alternatives() -> None:
    made = job_of(resources=Resources(gpu_count=1, gpu_models=["A10G", "T4"]))
    required = pod_of(made)["affinity"]["nodeAffinity"]
    (term,) = required["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [
        {
            "key": "nvidia.com/gpu.product",
            "operator": "In",
            "values": ["NVIDIA-A10G", "Tesla-T4", "NVIDIA-T4"],
        }
    ]


def test_the_callers_tolerations_replace_the_gpu_one() -> None:
    needs = Resources(gpu_count=1)
    own = [{"key": "mine", "operator": "Exists"}]
    keys = [
        t["key"] for t in pod_of(job_of(Options(tolerations=own), resources=needs))["tolerations"]
    ]
    assert keys[0] == "mine"
    assert "nvidia.com/gpu" not in keys


# Each option with a value, and where in the Job it must be found.
REACHES: dict[str, tuple[Any, str]] = {
    "image": ("img:2", "spec.template.spec.containers.0.image=img:2"),
    "command": (["$(X)"], "spec.template.spec.containers.0.command.0=$(X)"),
    "cpu_request": ("4", "spec.template.spec.containers.0.resources.requests.cpu=4"),
    "memory_request": ("9Gi", "spec.template.spec.containers.0.resources.requests.memory=9Gi"),
    "reports_uri": (
        "s3://b",
        "ATOLL_REPORTS=s3://b/atoll-ranks/5f1c3b1e-0000-4000-8000-000000000001/metrics",
    ),
    "pod": ({"hostIPC": True}, "spec.template.spec.hostIPC=True"),
    "service_account": ("sa", "spec.template.spec.serviceAccountName=sa"),
    "node_selector": ({"a": "b"}, "spec.template.spec.nodeSelector.a=b"),
    "tolerations": ([{"key": "k"}], "spec.template.spec.tolerations.0.key=k"),
    "affinity": (
        {"podAntiAffinity": {"x": "y"}},
        "spec.template.spec.affinity.podAntiAffinity.x=y",
    ),
    "runtime_class_name": ("kata", "spec.template.spec.runtimeClassName=kata"),
    "gpu_resource_key": (
        "amd.com/gpu",
        "spec.template.spec.containers.0.resources.limits.amd~com/gpu=1",
    ),
    "gpu_nodes": ({"T4": {"gpu": "t4"}}, "spec.template.spec.nodeSelector.gpu=t4"),
    "gpu_memory_label": ("mem", "memory label=mem"),
    "ttl_seconds_after_finished": (5, "spec.ttlSecondsAfterFinished=5"),
    "image_pull_policy": ("Never", "spec.template.spec.containers.0.imagePullPolicy=Never"),
    "image_pull_secrets": (["s"], "spec.template.spec.imagePullSecrets.0.name=s"),
    "priority_class_name": ("p", "spec.template.spec.priorityClassName=p"),
    "scheduler_name": ("v", "spec.template.spec.schedulerName=v"),
    "kueue_queue": ("q", "metadata.labels.kueue~x-k8s~io/queue-name=q"),
    "labels": ({"team": "a"}, "spec.template.metadata.labels.team=a"),
    "annotations": ({"note": "n"}, "spec.template.metadata.annotations.note=n"),
    "env_from_secrets": (["s"], "spec.template.spec.containers.0.envFrom.0.secretRef.name=s"),
    "volumes": ([{"name": "d", "emptyDir": {}}], "spec.template.spec.volumes.0.name=d"),
    "volume_mounts": (
        [{"name": "d", "mountPath": "/d"}],
        "spec.template.spec.containers.0.volumeMounts.0.mountPath=/d",
    ),
    "shm_size": ("1Gi", "spec.template.spec.volumes.0.emptyDir.sizeLimit=1Gi"),
    "is_host_network": (True, "spec.template.spec.hostNetwork=True"),
    "is_process_namespace_shared": (True, "spec.template.spec.shareProcessNamespace=True"),
    "deadline_margin_s": (7, "spec.activeDeadlineSeconds=17"),
    "security_context": ({"runAsUser": 1}, "spec.template.spec.securityContext.runAsUser=1"),
    "container_security_context": (
        {"privileged": False},
        "spec.template.spec.containers.0.securityContext.privileged=False",
    ),
    "python": ("python3.12", "spec.template.spec.containers.0.command.0=python3.12"),
    "etcd_endpoint": ("e:2379", "BASILICA_RDZV_ENDPOINT=e:2379"),
    "agent_image": ("atoll:1", "spec.template.spec.initContainers.0.image=atoll:1"),
    "master_port": (1234, "MASTER_PORT=1234"),
    "lost_node_s": (7, "spec.template.spec.tolerations.1.tolerationSeconds=7"),
    "has_exit_finalizer": (True, "spec.template.metadata.finalizers.0=atoll.dev/exit"),
    "is_start_gated": (True, "spec.template.spec.initContainers.0.name=start-gate"),
    "is_exit_recorded": (True, "spec.template.spec.volumes.0.name=atoll-report"),
}
# These steer the executor and are not the Job's business.
NOT_OF_THE_JOB = {
    "namespace",
    "report_key",  # signs the token beside `reports_uri`
    "is_controlled",  # takes the deadline from it
    "is_runtime_class_with_gpu_meant",
    "gang_timeout_s",
    "gang_backoff_s",
    "image_timeout_s",
    "mesh_deadline_s",
    "etcd_image",  # of the Deployment beside it
    "kubelet_port",
}


def test_the_table_names_every_option() -> None:
    assert set(REACHES) | NOT_OF_THE_JOB == set(Options.__struct_fields__)


@pytest.mark.parametrize("option", REACHES)
def test_every_option_reaches_the_job(option: str) -> None:
    value, where = REACHES[option]
    given = {option: value}
    if option == "volume_mounts":
        given["volumes"] = REACHES["volumes"][0]
    spec: Json = {"resources": Resources(gpu_count=1, gpu_models=["T4"], min_gpu_memory_gb=10)}
    if option == "image":
        spec["image"] = None
    if option == "runtime_class_name":
        given["is_runtime_class_with_gpu_meant"] = True
    if option in ("etcd_endpoint", "agent_image"):
        spec["rendezvous"] = RendezvousSpec(backend="etcd-v2")
    if option == "deadline_margin_s":
        spec["deadline_s"] = 10
    if option == "python":
        spec |= {"command": None, "source": Source(kind="script", content=b"1")}
    made = job_of(Options(**given), **spec)
    path, _, wanted = where.partition("=")
    if option == "gpu_memory_label":
        assert f'"key": "{wanted}"' in json.dumps(pod_of(made)["affinity"])
    elif path.isupper():
        assert environment(made)[path] == wanted
    else:
        found: Any = made
        for part in path.split("."):
            found = found[int(part) if part.isdigit() else part.replace("~", ".")]
        assert str(found) == wanted


def test_the_namespace_option_decides_where_the_job_is_made() -> None:
    executor = KubernetesBackend(object(), Options(namespace="jobs"))
    assert executor._object_key(training())[0] == "jobs"
    assert KubernetesBackend(object(), Options())._object_key(training())[0] == "team-a"


def test_a_rank_that_reports_by_http_has_a_token_of_its_training_alone() -> None:
    key = b"k" * 32
    options = Options(reports_uri="https://plane:7878/", report_key=key.hex())
    env = environment(job_of(options))
    assert env["ATOLL_REPORTS"] == f"https://plane:7878/v1/trainings/{training().name}/metrics"
    spoken = read_token(key, env["ATOLL_REPORTS_TOKEN"])
    assert spoken == (training().namespace, training().uid)
    assert "ATOLL_REPORTS" not in environment(job_of(Options()))
    with pytest.raises(ValidationError, match="reports_uri"):
        Options(reports_uri="plane:7878")


CLASHES: list[tuple[str, Json, Json]] = [
    ("image", {}, {"image": None}),
    ("runtime_class_name", {"runtime_class_name": "kata"}, {"resources": Resources(gpu_count=1)}),
    ("gpu_models", {}, {"resources": Resources(gpu_models=["A100"])}),
    ("gpu_models", {}, {"resources": Resources(gpu_count=1, gpu_models=["RTX"])}),
    ("mesh", {}, {"mesh": True}),
    ("bench", {}, {"bench": BenchSpec(mode="on-start")}),
    (
        "bench_placement",
        {"agent_image": "atoll:1"},
        {"bench": BenchSpec(mode="on-start", placement="strict", require_gbps=1.0)},
    ),
]


@pytest.mark.parametrize(("field", "options", "spec"), CLASHES)
def test_clashes_are_refused_before_anything_is_created(
    field: str, options: Json, spec: Json
) -> None:
    executor = KubernetesBackend(object(), Options(**options))  # any request would fail
    with pytest.raises(ValidationError) as refused:
        executor.check(training(**spec).spec)
    assert refused.value.field == field
    with pytest.raises(Permanent, match=field):
        asyncio.run(executor.apply(training(**spec), DesiredState(version=1, size=1)))


BAD_OPTIONS: list[tuple[str, Json]] = [
    ("image_pull_policy", {"image_pull_policy": "Sometimes"}),
    ("namespace", {"namespace": "No Such"}),
    ("master_port", {"master_port": 0}),
    ("ttl_seconds_after_finished", {"ttl_seconds_after_finished": -1}),
    ("volume_mounts", {"volume_mounts": {"name": "x", "mountPath": "/x"}}),
    ("no_such_option", {"no_such_option": 1}),
    ("etcd_endpoint", {"etcd_endpoint": "http://e/v2"}),
    ("cpu_request", {"cpu_request": "four"}),
    ("memory_request", {"memory_request": 16}),
    ("command", {"command": "python train.py"}),
    ("command", {"command": []}),
    ("gpu_nodes", {"gpu_nodes": {"T4": "t4"}}),
    ("mesh_deadline_s", {"mesh_deadline_s": -1}),
]


@pytest.mark.parametrize(("field", "options"), BAD_OPTIONS)
def test_bad_options_are_refused_by_name(field: str, options: Json) -> None:
    with pytest.raises(ValidationError) as refused:
        EKSExecutor(**{"image": "train:1"} | options)
    assert refused.value.field == field


def test_a_launch_that_clashes_is_a_value_error() -> None:
    executor = KubernetesExecutor(image="train:1", runtime_class_name="kata")
    with pytest.raises(ValueError, match="runtime_class_name"):
        executor._check_launch(training(resources=Resources(gpu_count=1)).spec)


def test_a_runtime_class_with_a_gpu_may_be_insisted_on() -> None:
    options = Options(runtime_class_name="kata", is_runtime_class_with_gpu_meant=True)
    options.check(training(resources=Resources(gpu_count=1)).spec)


def test_a_source_that_no_config_map_can_hold_is_refused() -> None:
    big = training(command=None, source=Source(kind="script", content=b"x" * 1_000_000))
    with pytest.raises(Permanent, match="put it into the image"):
        render_world(big, DesiredState(version=1, size=1), Options(), None)


def test_a_rank_whose_exit_is_recorded_runs_under_the_wrapper() -> None:
    made = job_of(Options(is_start_gated=True), command=["train", "$HOME"])
    shell, _, script, _, *command = container_of(made)["command"]
    assert (shell, command) == ("sh", ["train", "$$HOME"])
    assert "exec python3 -S -I /atoll/agent/process.py --record=/dev/termination-log" in script
    mount = {"name": "atoll-report", "mountPath": "/atoll/agent", "readOnly": True}
    assert mount in container_of(made)["volumeMounts"]
    made = job_of(Options(is_start_gated=True, python="/opt/py"), command=["train"])
    assert "exec /opt/py -S -I" in container_of(made)["command"][2]


AS_GIVEN: dict[str, tuple[Options, Json]] = {
    "no start gate": (Options(), {}),
    "said so": (Options(is_start_gated=True, is_exit_recorded=False), {}),
    "no peers": (Options(is_start_gated=True), {"world_size": WorldSize(min=1, target=1, max=1)}),
}


@pytest.mark.parametrize("case", AS_GIVEN)
def test_the_command_is_exactly_as_given_where_no_record_is_asked_for(case: str) -> None:
    options, spec = AS_GIVEN[case]
    made = job_of(options, command=["train"], **spec)
    assert container_of(made)["command"] == ["train"]
    world = render_world(training(**spec), DesiredState(version=1, size=1), options, None)
    assert "process.py" not in world["data"]
    assert "atoll-report" not in json.dumps(made)


def test_the_largest_source_and_the_wrapper_fit_into_a_config_map() -> None:
    big = training(command=None, source=Source(kind="script", content=b"x" * 900_000))
    world = render_world(big, DesiredState(version=1, size=1), Options(is_start_gated=True), None)
    assert sum(map(len, world["data"].values())) + 900_000 < 2**20
