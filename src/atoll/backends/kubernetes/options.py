"""What a caller may say about how ranks run on a cluster, checked before anything is created."""

from __future__ import annotations

import functools
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from atoll.backends.kubernetes.gpus import GPU_NODES, GpuNodes, alternatives, check_gpu_nodes
from atoll.backends.kubernetes.names import SOURCE
from atoll.backends.kubernetes.podpatch import ShortNames, check_patch, merge_pod
from atoll.backends.launch import ETCD_BACKEND, needs_etcd
from atoll.core.checks import check_bounds, check_name, check_strings
from atoll.core.errors import ValidationError
from atoll.core.extras import missing_package
from atoll.core.mesh import split_endpoint
from atoll.core.quantities import check_quantity
from atoll.core.spec import MAX_SECONDS, IntegerSeconds, Seconds, TrainingSpec
from atoll.core.support import NO_STALL_RESTART, check_supported, ignore, refuse
from atoll.mesh.reach import DEADLINE_S

Json = dict[str, Any]
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
    kubelet_port: Port | None = (
        10_250  # where nodes are probed; None: only the cluster's own report counts
    )
    lost_node_s: IntegerSeconds = 30  # a node that does not answer loses its ranks after this
    gang_timeout_s: Patience | None = 600.0  # half a gang gives its room back after this
    gang_backoff_s: Patience = 60.0  # and asks again after this
    image_timeout_s: Patience = 300.0  # an image that cannot be pulled ends the training after this
    # A controller takes exits and keeps the deadline; unset: a script does, which may be killed.
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
        for field in ("cpu_request", "memory_request"):
            check_quantity(field, getattr(self, field))
        if self.command is not None:
            check_strings("command", self.command)
            if not self.command or not self.command[0]:
                raise ValidationError("command", self.command, "expected a program to run")
        check_gpu_nodes(self.gpu_nodes)
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
        self._check_mounts()

    def _check_mounts(self) -> None:
        volumes = {volume.get("name") for volume in self.own_pod.get("volumes", ())}
        mounts = {"volume_mounts": self.volume_mounts}
        for at, container in enumerate(self.pod.get("containers", ())):
            mounts[f"pod.containers[{at}].volumeMounts"] = container.get("volumeMounts", [])
        for field, entries in mounts.items():
            for at, mount in enumerate(entries):
                if mount.get("name") not in volumes:
                    raise ValidationError(
                        f"{field}[{at}]", mount.get("name"), "expected the name of one of volumes"
                    )
                if self.shm_size is not None and mount.get("mountPath") == "/dev/shm":
                    raise ValidationError(
                        "shm_size", self.shm_size, f"expected none: {field} has /dev/shm already"
                    )

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
                "rendezvous_uri", None, "expected the object store of the run: pods share no folder"
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
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
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
        """Whether its ranks can wait at the mesh gate: somebody finds out, and writes the keys."""
        is_etcd = spec.rendezvous.backend == ETCD_BACKEND
        return self.agent_image is not None and (spec.mesh or is_etcd)

    def has_own_etcd(self, spec: TrainingSpec) -> bool:
        is_needed = needs_etcd(spec.rendezvous.backend, has_mesh=spec.mesh)
        return is_needed and self.etcd_endpoint is None


class ClusterOptions(KubernetesOptions, frozen=True, dict=True):
    """What `[executors.NAME]` with `kind = "kubernetes"` may say.

    A control plane takes exits and keeps the deadline, so the Job stays until it has taken them.
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
