"""`EKSExecutor`: its arguments, and the Job that each of them leads to."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll import EKSExecutor, KubernetesExecutor
from atoll.core.errors import ValidationError
from kubernetes import client

Json = dict[str, Any]
COMMAND = ["python", "/app/train.py", "--out=$(REPLICA_RANK)", "$HOME"]
DEFAULTS = {
    "namespace": "default",
    "service_account_name": None,
    "node_selector": None,
    "tolerations": None,
    "runtime_class_name": None,
    "command": None,
    "cpu_request": "4",
    "memory_request": "16Gi",
    "ttl_seconds_after_finished": 3600,
    "backoff_limit": 0,
    "gpu_resource_key": "nvidia.com/gpu",
    "run_id": None,
    "batch_api": None,
    "core_api": None,
}


def official(kind: Any) -> Any:
    config = client.Configuration()
    config.host = "http://127.0.0.1:1"
    return kind(client.ApiClient(config))


def all_fifteen() -> Json:
    return {
        "image": "registry/train:1",
        "namespace": "team",
        "service_account_name": "trainer",
        "node_selector": {"pool": "gpu"},
        "tolerations": [
            client.V1Toleration(
                key="gpu", operator="Exists", effect="NoExecute", toleration_seconds=60
            ),
            {"key": "spot", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "old", "effect": "NoExecute", "toleration_seconds": 5},
        ],
        "runtime_class_name": None,
        "command": COMMAND,
        "cpu_request": "500m",
        "memory_request": "1Gi",
        "ttl_seconds_after_finished": 60,
        "backoff_limit": 2,
        "gpu_resource_key": "amd.com/gpu",
        "run_id": "Run_42",
        "batch_api": official(client.BatchV1Api),
        "core_api": official(client.CoreV1Api),
    }


def job_of(executor: KubernetesExecutor, **launch: Any) -> Json:
    entry = launch.pop("entrypoint", "train.py")
    args = launch.pop("args", {})
    *_, job = executor.render_replicas(launch.pop("n_replicas", 3), entry, args, **launch)
    return job


def pod_of(job: Json) -> Json:
    pod: Json = job["spec"]["template"]["spec"]
    return pod


def env_of(job: Json) -> Json:
    (container,) = pod_of(job)["containers"]
    return {row["name"]: row.get("value", row.get("valueFrom")) for row in container["env"]}


def test_the_signature_is_composers() -> None:
    image, *rest, more = list(inspect.signature(EKSExecutor).parameters.values())
    assert (image.name, image.kind) == ("image", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    assert image.default is inspect.Parameter.empty
    assert {p.name: p.default for p in rest} == DEFAULTS
    assert [p.name for p in rest] == list(DEFAULTS)
    assert {p.kind for p in rest} == {inspect.Parameter.KEYWORD_ONLY}
    assert more.kind is inspect.Parameter.VAR_KEYWORD


def test_every_argument_can_be_read_back() -> None:
    plain = EKSExecutor("train:1")
    assert {name: getattr(plain, name) for name in DEFAULTS} == DEFAULTS
    assert plain.image == "train:1"
    given = all_fifteen()
    executor = EKSExecutor(given.pop("image"), **given)
    assert {name: getattr(executor, name) for name in given} == given


def test_all_fifteen_are_in_the_job() -> None:
    executor = EKSExecutor(**all_fifteen())
    job = job_of(executor, args={"lr": 0.1, "rendezvous_uri": "s3://b/run"}, gpu="RX:2", timeout=9)
    spec, pod = job["spec"], pod_of(job)
    (container,) = pod["containers"]
    assert job["metadata"]["namespace"] == "team"
    assert job["metadata"]["name"].startswith("run-42-")
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (3, 3, "Indexed")
    assert spec["ttlSecondsAfterFinished"] == 60
    assert spec["backoffLimitPerIndex"] == 2
    assert spec["activeDeadlineSeconds"] == 9
    assert pod["serviceAccountName"] == "trainer"
    assert pod["nodeSelector"] == {"pool": "gpu"}
    assert pod["restartPolicy"] == "Never"
    assert pod["tolerations"][:3] == [
        {"key": "gpu", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
        {"key": "spot", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "old", "effect": "NoExecute", "tolerationSeconds": 5},
    ]
    assert "amd.com/gpu" not in {row["key"] for row in pod["tolerations"]}
    assert container["image"] == "registry/train:1"
    assert container["command"] == COMMAND
    assert "args" not in container
    assert container["resources"] == {
        "requests": {"cpu": "500m", "memory": "1Gi", "amd.com/gpu": "2"},
        "limits": {"amd.com/gpu": "2"},
    }
    env = env_of(job)
    assert env["ENTRYPOINT"] == "train.py"
    assert (env["LR"], env["RENDEZVOUS_URI"]) == ("0.1", "s3://b/run")
    assert json.loads(env["ATOLL_ENTRYPOINT_ARGS"]) == {"lr": 0.1, "rendezvous_uri": "s3://b/run"}
    assert env["REPLICA_RANK"] == {
        "fieldRef": {
            "fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        }
    }
    assert not pod.get("volumes")
    json.dumps(job)


def test_the_defaults_are_in_the_job() -> None:
    job = job_of(EKSExecutor("train:1", command=["run"]), gpu="A100")
    (container,) = pod_of(job)["containers"]
    assert job["metadata"]["namespace"] == "default"
    assert job["spec"]["ttlSecondsAfterFinished"] == 3600
    assert job["spec"]["backoffLimitPerIndex"] == 0
    assert job["spec"]["activeDeadlineSeconds"] == 3600
    assert container["resources"]["requests"] == {
        "cpu": "4",
        "memory": "16Gi",
        "nvidia.com/gpu": "1",
    }
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert gpu in pod_of(job)["tolerations"]
    assert (
        gpu
        not in pod_of(job_of(EKSExecutor("train:1", command=["run"], tolerations=[])))[
            "tolerations"
        ]
    )


def test_a_number_of_processors_is_a_quantity() -> None:
    executor = EKSExecutor("i", command=["x"], cpu_request=4)  # type: ignore[arg-type]
    (container,) = pod_of(job_of(executor))["containers"]
    assert container["resources"]["requests"]["cpu"] == "4"


def test_the_rank_is_under_the_name_of_the_caller_too() -> None:
    env = env_of(job_of(EKSExecutor("i", command=["x"]), args={"rank_env": "MY_RANK"}))
    assert env["MY_RANK"] == env["REPLICA_RANK"]
    assert env["ATOLL_ENTRYPOINT_ARGS"] == "{}"


def test_with_a_command_the_entrypoint_is_only_told() -> None:
    executor = EKSExecutor("i", command=("run", "me"))
    assert env_of(job_of(executor, entrypoint="nowhere to be found"))["ENTRYPOINT"] == (
        "nowhere to be found"
    )
    assert pod_of(job_of(executor))["containers"][0]["command"] == ["run", "me"]
    assert env_of(job_of(executor, entrypoint=Path("a.py")))["ENTRYPOINT"] == "a.py"
    for unnamed in (None, 7, ""):
        with pytest.raises(ValidationError, match="entrypoint"):
            job_of(executor, entrypoint=unnamed)
    with pytest.raises(ValidationError, match=r"entrypoint_args\.big"):
        job_of(executor, entrypoint="module:name", args={"big": "x" * 200_000})


@pytest.mark.parametrize("run_id", ["run42", "a" * 100, "Exp.7/b", "7b", "0" * 36])
def test_a_run_id_is_in_a_name_that_is_a_label(run_id: str) -> None:
    names = {job_of(EKSExecutor("i", command=["x"], run_id=run_id))["metadata"]["name"]
             for _ in range(2)}  # fmt: skip
    assert len(names) == 2
    for name in names:
        assert len(f"{name}-9999") <= 63
        assert "".join(filter(str.isalnum, run_id.lower()))[:36] in name.replace("-", "")


@pytest.mark.parametrize(
    ("field", "options", "word"),
    [
        ("memory_requst", {"memory_requst": "1Gi"}, "did you mean 'memory_request'?"),
        ("service_acount_name", {"service_acount_name": "a"}, "'service_account_name'"),
        ("nodeSelector", {"nodeSelector": {}}, "'node_selector'"),
        ("backofflimit", {"backofflimit": 1}, "'backoff_limit'"),
        ("qqq", {"qqq": 1}, "there is no such argument"),
        ("image", {"image": ""}, "expected an image"),
        ("image", {"image": None}, "expected an image"),
        ("backoff_limit", {"backoff_limit": -1}, "expected a whole number"),
        ("run_id", {"run_id": "___"}, "expected letters or digits"),
        ("run_id", {"run_id": 42}, "expected letters or digits"),
        ("batch_api", {"batch_api": object()}, "expected an API object"),
        ("core_api", {"core_api": object()}, "expected an API object"),
        ("tolerations", {"tolerations": {"key": "a"}}, "expected a list"),
        ("tolerations[0]", {"tolerations": ["a"]}, "V1Toleration"),
        ("node_selector", {"node_selector": ["pool"]}, "expected `object"),
        ("node_selector", {"node_selector": "pool=gpu"}, "expected `object"),
        ("affinity", {"affinity": []}, "expected `object"),
        ("volumes", {"volumes": {"name": "a"}}, "expected `array`"),
        ("tolerations[0].efect", {"tolerations": [{"efect": "x"}]}, "'effect'"),
        ("service_account", {"service_account": "a", "service_account_name": "b"}, "'b'"),
        ("service_account_name", {"service_account_name": "No Such"}, "expected"),
        ("namespace", {"namespace": "No Such"}, "expected"),
    ],
)
def test_bad_arguments_are_refused_by_name(field: str, options: Json, word: str) -> None:
    with pytest.raises(ValidationError) as refused:
        EKSExecutor(**{"image": "i"} | options)
    assert refused.value.field == field
    assert word in str(refused.value)


def test_an_unknown_argument_is_a_type_error_too() -> None:
    for kind in (EKSExecutor, KubernetesExecutor):
        with pytest.raises(TypeError, match="did you mean 'gpu_resource_key'"):
            kind("i", gpu_resource_kee="x")
    with pytest.raises(TypeError):
        EKSExecutor()  # type: ignore[call-arg]


def test_the_other_spelling_of_the_service_account() -> None:
    executor = EKSExecutor("i", service_account="trainer", command=["x"])
    assert executor.service_account_name == "trainer"
    assert pod_of(job_of(executor))["serviceAccountName"] == "trainer"


def test_two_ways_to_a_cluster_are_refused() -> None:
    with pytest.raises(ValidationError, match="kubeconfig"):
        EKSExecutor("i", batch_api=official(client.BatchV1Api), kubeconfig="/x")


def test_a_sandbox_with_a_gpu_must_be_insisted_on() -> None:
    sandboxed = {"runtime_class_name": "kata", "command": ["x"]}
    with pytest.raises(ValidationError, match="runtime_class_name"):
        job_of(EKSExecutor("i", **sandboxed), gpu="A100")
    meant = EKSExecutor("i", **sandboxed, is_runtime_class_with_gpu_meant=True)
    assert pod_of(job_of(meant, gpu="A100"))["runtimeClassName"] == "kata"
    assert pod_of(job_of(EKSExecutor("i", **sandboxed)))["runtimeClassName"] == "kata"


def test_without_a_command_the_code_is_sent_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text("print()")
    (tmp_path / "model.py").write_text("SIZE = 3")
    monkeypatch.chdir(tmp_path)
    executor = EKSExecutor("i", cpu_request=None, memory_request=None)
    code, world, _, job = executor.render_replicas(2, "train.py", {"lr": 0.1})
    assert code["metadata"]["name"].startswith("atoll-code-")
    assert [volume["name"] for volume in pod_of(job)["volumes"]][-3:-1] == [
        "atoll-archive",
        "atoll-code",
    ]
    executor = EKSExecutor("i", cpu_request=None, memory_request=None, code=False)
    world, _, job = executor.render_replicas(2, "train.py", {"lr": 0.1})
    assert "source" in world["binaryData"]
    (container,) = pod_of(job)["containers"]
    assert container["command"][-2:] == ["--lr", "0.1"]
    assert "resources" not in container
    with pytest.raises(ValidationError, match="entrypoint"):
        executor.render_replicas(2, "missing.py")


def test_without_its_extra_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightkube", None)
    with pytest.raises(RuntimeError, match=r"pip install '\.\[kubernetes\]'"):
        EKSExecutor("i")


def test_the_names_import_without_the_extra() -> None:
    import subprocess

    code = (
        "import sys; sys.modules['lightkube'] = None\n"
        "from atoll import EKSExecutor, KubernetesExecutor\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_pod_option_may_name_the_container_as_the_job_does() -> None:
    env = [{"name": "A", "value": "1"}]
    pod = {"containers": [{"name": "replica", "env": env}]}
    executor = KubernetesExecutor("image:1", pod=pod)
    *_, job = executor.render_replicas(1, "os")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["name"] == "replica"
    assert env[0] in container["env"]


def test_a_function_beside_a_command_is_ignored_with_a_note(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = EKSExecutor("i", command=["run", "me"])
    job = job_of(executor, entrypoint=json.dumps, args={"lr": 0.1})
    assert env_of(job)["ENTRYPOINT"] == "json:dumps"
    assert "replicas run command=; the function dumps is not sent to them" in caplog.text
    job = job_of(executor, entrypoint=lambda: None, args={"lr": 0.1})
    assert "ENTRYPOINT" not in env_of(job)
    assert env_of(job)["LR"] == "0.1"
    assert pod_of(job)["containers"][0]["command"] == ["run", "me"]


def test_composers_arguments_reach_an_image_that_runs_the_entrypoint_of_replicas() -> None:
    args = {"rendezvous_uri": "s3://b/run", "world_size": 3, "trainer_module": "m"}
    command = ["python", "-m", "atoll.replica_entrypoint"]
    env = env_of(job_of(EKSExecutor("i", command=command), entrypoint=command[-1], args=args))
    assert env["ENTRYPOINT"] == command[-1]
    assert json.loads(env["ATOLL_ENTRYPOINT_ARGS"]) == args
    assert "configMapKeyRef" in env["WORLD_SIZE"]


def test_replicas_are_given_no_way_to_each_other_unless_that_is_asked_for() -> None:
    for kind in (EKSExecutor, KubernetesExecutor):
        own_keys_only, together = kind("train:1"), kind("train:1", rendezvous_backend="c10d")
        assert own_keys_only.supports_inter_replica_network is False
        assert together.supports_inter_replica_network is True
        for executor in (own_keys_only, together):
            env = env_of(job_of(executor, entrypoint="package.train"))
            met = {name for name in env if name.startswith(("PET_", "MASTER_"))}
            assert bool(met) is (executor is together), met
            assert "configMapKeyRef" in env["WORLD_SIZE"]
            assert {"REPLICA_RANK", "RANK", "LOCAL_RANK"} <= env.keys()


def test_the_name_of_a_job_begins_with_the_run_id() -> None:
    for run_id in ("r", "Run_42", "x" * 80):
        job = job_of(EKSExecutor("train:1", run_id=run_id), entrypoint="package.train")
        start = run_id.lower().replace("_", "-")[:46]
        assert job["metadata"]["name"].startswith(f"{start}-"), job["metadata"]["name"]
        assert len(job["metadata"]["name"]) <= 55
