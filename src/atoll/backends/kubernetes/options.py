"""What a caller may say about how ranks run on a cluster.

The option `pod` is a partial pod spec, merged into what atoll renders as `kubectl patch` does:
objects field by field, lists of named things by name, other lists whole; null takes a field away.
`ShortNames` are options that each stand for one field of it. Checked here is what atoll itself
relies on; the API server checks the rest before anything is created.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from atoll.backends.kubernetes.gpus import GPU_NODES, GpuNodes, alternatives
from atoll.backends.kubernetes.names import (
    AGENT,
    ARCHIVE_VOLUME,
    CODE_VOLUME,
    CONTAINER,
    GATE,
    REPORT_VOLUME,
    SOURCE,
)
from atoll.core.checks import check_bounds, check_env, check_name
from atoll.core.errors import ValidationError, missing_package
from atoll.core.mesh import split_endpoint
from atoll.core.model import SpecModel, convert, decode_error
from atoll.core.ports import NO_STALL_RESTART, check_supported, ignore, refuse
from atoll.core.spec import MAX_SECONDS, IntegerSeconds, Seconds, TrainingSpec
from atoll.core.text import check_quantity
from atoll.mesh.watch import DEADLINE_S

Json = dict[str, Any]
PullPolicy = Literal["Always", "IfNotPresent", "Never"]
Port = Annotated[int, Meta(ge=1, le=65_535)]
Patience = Annotated[float, Meta(ge=1, le=MAX_SECONDS)]
NO_AGENT = "expected the executor option agent_image: an image with atoll"
SUPPORTS = (
    refuse(
        "gpu_models",
        "expected gpu_count above 0 too",
        when=lambda spec, options: not spec.resources.gpu_count,
    ),
    refuse("mesh", NO_AGENT, when=lambda spec, options: options.agent_image is None),
    refuse("bench", NO_AGENT, when=lambda spec, options: options.agent_image is None),
    refuse(
        "bench_placement",
        "expected 'preferred' with bench_require_gbps: the link is measured before the ranks have "
        "nodes",
        when=lambda spec, options: spec.bench.placement == "strict",
    ),
    NO_STALL_RESTART,
    *(
        refuse(action, f"it has no right to enter pods: use 'atoll exec NAME -r RANK -- {command}'")
        for action, command in (("kill", "kill -s SIGNAL PID"), ("stacks", "py-spy dump -p PID"))
    ),
    ignore(
        "min_gpu_memory_gb",
        "gpu_count is 0",
        when=lambda spec, options: not spec.resources.gpu_count,
    ),
    ignore(
        "stall_s",
        "this rank runs without atoll's wrapper, see is_exit_recorded",
        when=lambda spec, options: not options.records_exits(spec),
    ),
    ignore(
        "stall_s",
        "ranks report nowhere, as the option reports_uri is not set",
        when=lambda spec, options: not options.reports_uri,
    ),
)


def check_installed(name: str) -> None:
    """Raises RuntimeError, with what to type, if the packages of this backend are missing."""
    try:
        import lightkube  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_package(name, error, "kubernetes") from error


REPORT_SCHEMES = ("http://", "https://", "s3://", "gs://", "az://")
OWN_DIR = "/atoll"  # of a rank's container, for what atoll mounts there


class ListRule(NamedTuple):
    """How a list is merged: by this field of its entries, or joined where there is none."""

    key: str | None
    is_new_first: bool = False
    is_deep: bool = False  # entries of one key are merged, and not replaced


LISTS = {
    "containers": ListRule("name", is_deep=True),
    "initContainers": ListRule("name", is_deep=True),
    "volumes": ListRule("name", is_new_first=True),
    "volumeMounts": ListRule("mountPath", is_new_first=True),
    "env": ListRule("name"),  # new ones may use `$(NAME)` of those before them
    "imagePullSecrets": ListRule("name"),
    "tolerations": ListRule(None),
    "topologySpreadConstraints": ListRule(None),
}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
OBJECTS = ("affinity", "nodeSelector", "resources")

# What a patch may not say, with what would be right.
FIXED = {
    "restartPolicy": "expected none: ranks are restarted by max_restarts of the training",
    "subdomain": "expected none: ranks find each other by it",
    "hostname": "expected none: ranks find each other by it",
    "terminationGracePeriodSeconds": "expected as stop_grace_s of the training",
    "activeDeadlineSeconds": "expected as deadline_s of the training",
    "metadata": "expected the fields of a pod's spec; labels and annotations are options",
    "spec": "expected the fields of a pod's spec, without spec around them",
    "template": "expected the fields of a pod's spec, without template around them",
    **dict.fromkeys(
        ("args", "command", "env", "envFrom", "image", "imagePullPolicy", "volumeMounts"),
        f"expected in containers, in the one named {CONTAINER!r}",
    ),
}
FIXED_OF_RANK = {
    "command": "expected as command of the training",
    "args": "expected as command of the training",
    "image": "expected as image of the training; the option image is for those that name none",
    "restartPolicy": FIXED["restartPolicy"],
    "terminationMessagePath": "expected none: how a rank ended is read from there",
    "terminationMessagePolicy": "expected none: how a rank ended is read by it",
}
# What holds something of atoll's own or of the training's, so null may not take it away.
NEEDED = {"containers", "initContainers", "volumes", "env", "volumeMounts", "resources"}
OWN_NAMES = {
    "initContainers": {GATE, AGENT},
    "volumes": {GATE, REPORT_VOLUME, CODE_VOLUME, ARCHIVE_VOLUME},
}


def merge_pod(base: Json, patch: Json) -> Json:
    """Merges `patch` into `base`; neither is changed."""
    merged = dict(base)
    for field, value in patch.items():
        before = merged.get(field)
        if value is None:
            merged.pop(field, None)
        elif isinstance(value, dict):
            merged[field] = merge_pod(before if isinstance(before, dict) else {}, value)
        elif isinstance(value, list) and field in LISTS:
            merged[field] = _merge_list(LISTS[field], before or [], value)
        else:
            merged[field] = value
    return merged


def _merge_list(rule: ListRule, base: list[Json], patch: list[Json]) -> list[Json]:
    if rule.key is None:
        return [*base, *patch]
    merged = {entry.get(rule.key): entry for entry in base}
    known = set(merged)
    for entry in patch:
        key = entry.get(rule.key)
        before = merged.get(key, {}) if rule.is_deep else {}
        merged[key] = merge_pod(before, entry)
    existing = [entry for key, entry in merged.items() if key in known]
    new = [entry for key, entry in merged.items() if key not in known]
    return [*new, *existing] if rule.is_new_first else [*existing, *new]


def check_patch(patch: Json, field: str = "pod") -> None:
    """Raises ValidationError for what atoll relies on, and for what is clearly a mistake."""
    _check_fields(field, patch, FIXED)
    for at, container in enumerate(patch.get("containers", ())):
        _check_rank(f"{field}.containers[{at}]", container)
    for at, container in enumerate(patch.get("initContainers", ())):
        _check_fields(f"{field}.initContainers[{at}]", container, {})


def _check_fields(where: str, fields: Json, fixed: dict[str, str]) -> None:
    """Checks what the merge relies on; the API server checks the rest."""
    for name, value in fields.items():
        field = f"{where}.{name}"
        if name in fixed:
            raise ValidationError(field, value, fixed[name])
        if value is None and name not in NEEDED:
            continue
        if name in OBJECTS and not isinstance(value, dict):
            raise ValidationError(field, value, "expected an object")
        if name in LISTS:
            _check_entries(field, name, value)


def _check_entries(field: str, name: str, entries: object) -> None:
    if not isinstance(entries, list):
        raise ValidationError(field, entries, "expected a list of objects")
    key = LISTS[name].key
    for at, entry in enumerate(entries):
        if not isinstance(entry, dict):
            raise ValidationError(f"{field}[{at}]", entry, "expected an object")
        if key is None:
            continue
        if not isinstance(entry.get(key), str):
            raise ValidationError(f"{field}[{at}].{key}", entry.get(key), "expected text")
        if entry[key] in OWN_NAMES.get(name, ()):
            raise ValidationError(
                f"{field}[{at}].{key}", entry[key], "expected another name: atoll has one of it"
            )


def _check_rank(where: str, container: Json) -> None:
    if container["name"] != CONTAINER:
        raise ValidationError(
            f"{where}.name",
            container["name"],
            f"expected {CONTAINER!r}, the container of the rank; what is to run beside it belongs "
            "to initContainers, with restartPolicy Always, so that the pod ends with the rank",
        )
    _check_fields(where, container, FIXED_OF_RANK)
    for at, variable in enumerate(container.get("env", ())):
        check_env(f"{where}.env[{at}]", {variable["name"]: str(variable.get("value", ""))})
    for at, mount in enumerate(container.get("volumeMounts", ())):
        if f"{mount['mountPath']}/".startswith(f"{OWN_DIR}/"):
            raise ValidationError(
                f"{where}.volumeMounts[{at}].mountPath",
                mount["mountPath"],
                f"expected a path outside {OWN_DIR}, which is atoll's own",
            )


class ShortNames(SpecModel, frozen=True):
    """Options that each stand for one field of `pod`, by the table SHORT_NAMES."""

    service_account: str | None = None  # IRSA and Pod Identity go by this name
    node_selector: dict[str, str] = {}
    tolerations: list[Json] | None = None  # unset: the GPU toleration where there is a GPU
    affinity: Json | None = None
    runtime_class_name: str | None = None
    image_pull_policy: PullPolicy | None = None
    image_pull_secrets: list[str] = []
    priority_class_name: str | None = None
    scheduler_name: str | None = None
    env_from_secrets: list[str] = []
    volumes: list[Json] = []
    volume_mounts: list[Json] = []
    shm_size: str | None = None  # /dev/shm in memory, for data loaders and NCCL
    is_host_network: bool = False
    # The rank is then not process 1, which is deaf to signals it does not handle.
    is_process_namespace_shared: bool = True
    security_context: Json | None = None  # of the pods
    container_security_context: Json | None = None  # of the rank, and of its start gate

    def check_short_names(self) -> None:
        if self.service_account is not None:
            check_name("service_account", self.service_account)
        check_patch(self.with_short_names({}))

    def with_short_names(self, pod: Json) -> Json:
        for name, render in SHORT_NAMES.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                pod = merge_pod(pod, render(value))
        return pod


def _of_rank(**fields: Any) -> Json:
    return {"containers": [{"name": CONTAINER, **fields}]}


def _shm(size: str) -> Json:
    volume = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    mount = {"name": "shm", "mountPath": "/dev/shm"}
    return {"volumes": [volume], **_of_rank(volumeMounts=[mount])}


# The patch that each short name stands for.
SHORT_NAMES: dict[str, Callable[[Any], Json]] = {
    "service_account": lambda name: {"serviceAccountName": name},
    "node_selector": lambda labels: {"nodeSelector": labels},
    "tolerations": lambda entries: {"tolerations": entries},
    "affinity": lambda rules: {"affinity": rules},
    "runtime_class_name": lambda name: {"runtimeClassName": name},
    "image_pull_policy": lambda policy: _of_rank(imagePullPolicy=policy),
    "image_pull_secrets": lambda names: {"imagePullSecrets": [{"name": name} for name in names]},
    "priority_class_name": lambda name: {"priorityClassName": name},
    "scheduler_name": lambda name: {"schedulerName": name},
    "env_from_secrets": lambda names: _of_rank(
        envFrom=[{"secretRef": {"name": name}} for name in names]
    ),
    "shm_size": _shm,
    "volumes": lambda entries: {"volumes": entries},
    "volume_mounts": lambda entries: _of_rank(volumeMounts=entries),
    "is_host_network": lambda is_on: {"hostNetwork": is_on},
    "is_process_namespace_shared": lambda is_on: {"shareProcessNamespace": is_on},
    "security_context": lambda context: {"securityContext": context},
    "container_security_context": lambda context: _of_rank(securityContext=context),
}


class KubernetesOptions(ShortNames, frozen=True, dict=True):
    """The options of KubernetesExecutor. Unset means: as the cluster does it by default."""

    namespace: str | None = None  # unset: the training's own
    image: str | None = None  # for trainings that name none
    # What of the image runs, exactly as it is here, in place of the training's command; replicas of
    # a script only. The kubelet's report counts for its end.
    command: list[str] | None = None
    cpu_request: str | None = None  # for trainings that name none; requests, without limits
    memory_request: str | None = None
    pod: Json = {}  # what of the ranks' pods is to differ: a partial pod spec
    is_runtime_class_with_gpu_meant: bool = False
    gpu_resource_key: str = "nvidia.com/gpu"
    gpu_nodes: dict[str, GpuNodes] = msgspec.field(default_factory=lambda: GPU_NODES)
    gpu_memory_label: str = "nvidia.com/gpu.memory"  # MiB, on nodes
    ttl_seconds_after_finished: IntegerSeconds | None = 86_400
    kueue_queue: str | None = None
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    python: str = "python"  # runs a `source`
    # Where ranks hand on what they report: the address of the control plane, as they reach it, or
    # the URI of an object store that both have the rights for.
    reports_uri: str | None = None
    report_key: str = ""  # signs the tokens of ranks: the control plane's own
    # For rendezvous_backend="etcd-v2" and the mesh: host:port of one that all trainings share;
    # unset: each gets its own, of `etcd_image`. The v2 API ended with etcd 3.5.
    etcd_endpoint: str | None = None
    etcd_image: str = "quay.io/coreos/etcd:v3.5.21"
    agent_image: str | None = None  # has Python and atoll: for the mesh and the link bench
    mesh_deadline_s: Seconds = DEADLINE_S  # ranks are let in with what there is after this
    master_port: Port = 29_500
    deadline_margin_s: IntegerSeconds = 0  # by which the Job's deadline is after the training's
    kubelet_port: Port | None = 10_250  # to probe nodes; None: only the cluster's report counts
    lost_node_s: IntegerSeconds = 30  # a node that does not answer loses its ranks after this
    gang_timeout_s: Patience | None = 600.0  # an incomplete gang gives its nodes back after this
    gang_backoff_s: Patience = 60.0  # and tries again after this
    image_timeout_s: Patience = 300.0  # an image that cannot be pulled ends the training after this
    # A controller stores exits and enforces the deadline; False: a script does, and may be killed.
    is_controlled: bool = False
    # Pods stay until their exit is stored, whatever becomes of the controller: a node is not
    # drained without it.
    has_exit_finalizer: bool = False
    is_start_gated: bool = False  # ranks start together; the image needs sh and sleep
    # Ranks write how they ended, by agent/process.py; the image needs sh. Unset: those do that may
    # have peers and a start gate. False: the command runs exactly as given, and the kubelet's
    # word counts.
    is_exit_recorded: bool | None = None

    def __post_init__(self) -> None:
        for field in ("namespace", "kueue_queue"):
            if getattr(self, field) is not None:
                check_name(field, getattr(self, field))
        check_bounds(self)
        self._check_types()
        for field in ("cpu_request", "memory_request"):
            check_quantity(field, getattr(self, field))
        if self.command is not None and not (self.command and self.command[0]):
            raise ValidationError("command", self.command, "expected a program to run")
        if self.etcd_endpoint is not None and split_endpoint(self.etcd_endpoint) is None:
            raise ValidationError("etcd_endpoint", self.etcd_endpoint, "expected host:port")
        check_patch(self.pod)
        self.check_short_names()
        if "/" not in self.gpu_resource_key:
            raise ValidationError(
                "gpu_resource_key", self.gpu_resource_key, "expected a name like nvidia.com/gpu"
            )
        if self.reports_uri is not None and not self.reports_uri.startswith(REPORT_SCHEMES):
            expected = "expected the address of a control plane or the URI of an object store"
            raise ValidationError("reports_uri", self.reports_uri, expected)

    def _check_types(self) -> None:
        """Decoding checks them by itself, the constructor does not."""
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            try:
                convert(value, field.type)
            except msgspec.ValidationError as error:
                expected = decode_error(error, field.type, value).expected
                raise ValidationError(field.name, value, expected) from error

    @functools.cached_property
    def own_pod(self) -> Json:
        """What the options say of a pod's spec, merged once. Never change it."""
        return self.patched({})

    def patched(self, pod: Json) -> Json:
        """A pod's spec with what the short names say, and over them the option `pod`."""
        patched = merge_pod(self.with_short_names(pod), self.pod)
        # With the host's network, cluster names resolve only with this policy.
        if patched.get("hostNetwork") and not patched.get("dnsPolicy"):
            patched["dnsPolicy"] = "ClusterFirstWithHostNet"
        return patched

    def shared(self, *fields: str) -> Json:
        """Those of these fields that the pods of companions share with the ranks."""
        pod = self.own_pod
        return {field: pod[field] for field in fields if pod.get(field)}

    def check(self, spec: TrainingSpec) -> None:
        """Raises ValidationError if this training cannot run with these options."""
        if spec.image is None and self.image is None:
            raise ValidationError("image", None, "expected an image: ranks run in containers")
        needs, pod = spec.resources, self.own_pod
        runtime = pod.get("runtimeClassName")
        if needs.gpu_count and runtime and not self.is_runtime_class_with_gpu_meant:
            raise ValidationError(
                "runtime_class_name"
                if runtime == self.runtime_class_name
                else "pod.runtimeClassName",
                runtime,
                "expected none with a GPU, as most sandboxes hide it; "
                "is_runtime_class_with_gpu_meant=True insists",
            )
        check_supported(spec, SUPPORTS, self)
        self._check_models(needs.gpu_models)
        if spec.source is not None and any(v["name"] == SOURCE for v in pod.get("volumes", ())):
            raise ValidationError(
                "volumes", SOURCE, "expected another name: a training's source is in one of it"
            )
        if spec.run_id is not None and spec.rendezvous.uri is None:
            raise ValidationError(
                "rendezvous_uri", None, "expected the URI of an object store: pods share no folder"
            )

    def _check_models(self, models: list[str]) -> None:
        own = self.own_node_labels()
        for model in models:
            if model.upper() not in self.gpu_nodes and not own:
                known = ", ".join(self.gpu_nodes) or "none"
                raise ValidationError(
                    "gpu_models",
                    model,
                    f"expected one of {known}, or a node_selector for its nodes; gpu_nodes adds "
                    "more",
                )

    def own_node_labels(self) -> set[str]:
        """The labels of nodes that the caller asks for by a selector or an affinity."""
        pod = self.own_pod
        affinity = pod.get("affinity", {}).get("nodeAffinity", {})
        required = affinity.get(REQUIRED, {})
        rules = [
            rule
            for term in required.get("nodeSelectorTerms", ())
            for rule in term.get("matchExpressions", ())
        ]
        return {*pod.get("nodeSelector", {}), *(rule.get("key", "") for rule in rules)}

    def gpu_rows(self, models: list[str]) -> list[dict[str, list[str]]]:
        """The labels of nodes with these GPUs; empty where any node will do."""
        return alternatives(models, self.gpu_nodes, self.own_node_labels())

    def records_exits(self, spec: TrainingSpec) -> bool:
        if self.command is not None:
            return False
        if self.is_exit_recorded is not None:
            return self.is_exit_recorded
        return self.is_start_gated and spec.world_size.max > 1

    def gates_start(self, spec: TrainingSpec) -> bool:
        """Whether ranks wait for each other, or for their etcd; one alone may have neither."""
        return self.is_start_gated and (spec.world_size.target > 1 or self.has_own_etcd(spec))

    def has_gate(self, spec: TrainingSpec) -> bool:
        """Whether its ranks can wait at the mesh gate: agents check the mesh, and open the gate."""
        return self.agent_image is not None and spec.needs_etcd

    def has_own_etcd(self, spec: TrainingSpec) -> bool:
        return self.etcd_endpoint is None and spec.needs_etcd


class ClusterOptions(KubernetesOptions, frozen=True, dict=True):
    """What `[executors.NAME]` with `kind = "kubernetes"` may say.

    A control plane stores exits and enforces the deadline, so the Job stays until it has done so.
    """

    context: str | None = None  # unset: the current one
    kubeconfig: str | None = None  # unset: KUBECONFIG, else ~/.kube/config
    is_controlled: bool = True
    is_start_gated: bool = True
    ttl_seconds_after_finished: int | None = None
    deadline_margin_s: int = 60

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.command is not None:
            raise ValidationError(
                "command", self.command, "expected none: trainings have their own"
            )
