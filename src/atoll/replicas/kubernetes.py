"""Replicas on a cluster, launched from a script: `KubernetesExecutor` and `EKSExecutor`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import fields, replace

from atoll.backends.kubernetes.gpus import EKS_GPU_NODES
from atoll.backends.kubernetes.names import CONTAINER, REPLICA
from atoll.backends.kubernetes.options import KubernetesOptions, check_installed
from atoll.core.checks import check_name
from atoll.core.errors import ValidationError
from atoll.core.status import DesiredState, Training
from atoll.replicas.protocol import Entrypoint
from atoll.replicas.surface import ReplicaRendezvous, ReplicaSurface

if TYPE_CHECKING:
    from atoll.backends.kubernetes.client import Cluster
    from atoll.backends.kubernetes.executor import KubernetesBackend

Json = dict[str, Any]

# A name has at most 63 characters, nine of which are the launch's own.
MAX_RUN_ID = 54
TOLERATION = ("key", "operator", "value", "effect", "tolerationSeconds")
OPTIONS = {field.name: field for field in fields(KubernetesOptions)}
# Options that are attributes of the executor as well.
READ_BACK = (
    *("node_selector", "runtime_class_name", "cpu_request", "memory_request"),
    *("ttl_seconds_after_finished", "gpu_resource_key"),
)


class UnknownArgument(ValidationError, TypeError):
    """An argument that the executor does not have; a TypeError, as Python's own."""


class KubernetesExecutor(ReplicaSurface):
    """Replicas as the pods of one Indexed Job a launch.

    `command` runs exactly as it is, in the image; without it the code of the entrypoint is sent
    along, with the working directory unless `code` is False. `backoff_limit`: how often each
    replica is restarted. The Job's name begins with `run_id`. With `rendezvous_backend="c10d"` the
    replicas of a launch meet in one world. `batch_api` and `core_api`, of the
    official client, are the way to the cluster; else `context` and `kubeconfig` choose it, by
    default the pod's own, `KUBECONFIG` or ~/.kube/config. Other `options` are those of
    `KubernetesOptions`. Bad ones raise ValidationError here, clashes at the launch.
    """

    backend_name = "kubernetes"
    _launch_noun = "Job"

    def __init__(
        self,
        image: str | None = None,
        *,
        service_account_name: str | None = None,
        tolerations: Sequence[Any] | None = None,
        command: Sequence[str] | None = None,
        backoff_limit: int = 0,
        run_id: str | None = None,
        batch_api: Any = None,
        core_api: Any = None,
        context: str | None = None,
        kubeconfig: str | None = None,
        allow_pickle: bool = False,
        code: bool = True,
        rendezvous_backend: ReplicaRendezvous = "none",
        **options: Any,
    ) -> None:
        check_installed(type(self).__name__)
        _check_known(options)
        self._take(
            command=command,
            backoff_limit=backoff_limit,
            allow_pickle=allow_pickle,
            code=code,
            rendezvous_backend=rendezvous_backend,
        )
        if service_account_name is not None:
            check_name("service_account_name", service_account_name)
        account = _one_account(service_account_name, options.pop("service_account", None))
        settings = {
            **options,
            "image": image,
            "service_account": account,
            "tolerations": plain_tolerations(tolerations),
            "command": self._command,
        }
        if type(settings.get("cpu_request")) in (int, float):
            settings["cpu_request"] = f"{settings['cpu_request']:g}"
        if isinstance(settings.get("pod"), dict):
            settings["pod"] = as_rank(settings["pod"])
        if settings.get("node_selector", {}) is None:
            settings["node_selector"] = {}
        self._options = KubernetesOptions(**settings)
        self._way = (context, kubeconfig)
        self._run = None if run_id is None else name_part("run_id", run_id)
        self.namespace = self._namespace = options.get("namespace") or "default"
        self.batch_api, self.core_api = batch_api, core_api
        self.image, self.tolerations, self.command = image, tolerations, command
        self.backoff_limit, self.run_id, self.service_account_name = backoff_limit, run_id, account
        for name in READ_BACK:
            setattr(self, name, options.get(name, getattr(self._options, name)))
        self._check_way()

    def _make_backend(self) -> KubernetesBackend:
        from atoll.backends.kubernetes.executor import KubernetesBackend

        cluster = self._connect()
        self.namespace = self._namespace = self._options.namespace or cluster.namespace
        return KubernetesBackend(cluster, replace(self._options, namespace=self._namespace))

    def _job_name(self, training: Training) -> str:
        from atoll.backends.kubernetes.render import gang_name

        return gang_name(training)

    @property
    def _address(self) -> dict[str, Any]:  # type: ignore[override]
        return {"namespace": self._namespace}

    def _launch_name(self, uid: str) -> str:
        if self._run is None:
            return super()._launch_name(uid)
        return f"{self._run[:MAX_RUN_ID].rstrip('-')}-{uid[:8]}"

    def render_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        gpu: str | int | None = None,
        timeout: float | None = 3600,
    ) -> list[Json]:
        """What such a launch would create, the Job last. Sends nothing to the cluster."""
        from atoll.backends.kubernetes.code import render_parts
        from atoll.backends.kubernetes.launches import as_launch
        from atoll.backends.kubernetes.render import render_gang

        training = self._new_training(n_replicas, entrypoint, entrypoint_args, gpu, timeout)
        desired = DesiredState(version=1, size=n_replicas)
        objects = render_parts(training.spec.code) if training.spec.code else []
        objects += render_gang(training, desired, self._options)
        as_launch(objects[-1], training.spec)
        for item in objects:
            item["metadata"]["namespace"] = self._namespace
        return objects

    def _check_way(self) -> None:
        api = "core_api" if self.batch_api is None else "batch_api"
        if getattr(self, api) is None:
            return
        for name, value in zip(("context", "kubeconfig"), self._way, strict=True):
            if value:
                raise ValidationError(name, value, f"expected none: {api} knows the cluster")
        self._official()

    def _official(self) -> Any:
        from atoll.backends.kubernetes.access import access_of

        return access_of(self.batch_api, self.core_api, self._namespace)

    def _connect(self) -> Cluster:
        from atoll.backends.kubernetes.client import Cluster

        if self.batch_api is None and self.core_api is None:
            return Cluster.connect(*self._way)
        return Cluster.reach(self._official())


class EKSExecutor(KubernetesExecutor):
    """KubernetesExecutor with the GPUs of EKS, and the arguments and defaults of composer's.

    `more` are the other arguments of KubernetesExecutor.
    """

    backend_name = "eks"

    def __init__(
        self,
        image: str,
        *,
        namespace: str = "default",
        service_account_name: str | None = None,
        node_selector: dict[str, str] | None = None,
        tolerations: Sequence[Any] | None = None,
        runtime_class_name: str | None = None,
        command: Sequence[str] | None = None,
        cpu_request: str | None = "4",
        memory_request: str | None = "16Gi",
        ttl_seconds_after_finished: int | None = 3600,
        backoff_limit: int = 0,
        gpu_resource_key: str = "nvidia.com/gpu",
        run_id: str | None = None,
        batch_api: Any = None,
        core_api: Any = None,
        **more: Any,
    ) -> None:
        if not isinstance(image, str) or not image:
            raise ValidationError("image", image, "expected an image: replicas run in containers")
        super().__init__(
            image,
            namespace=namespace,
            service_account_name=service_account_name,
            node_selector=node_selector,
            tolerations=tolerations,
            runtime_class_name=runtime_class_name,
            command=command,
            cpu_request=cpu_request,
            memory_request=memory_request,
            ttl_seconds_after_finished=ttl_seconds_after_finished,
            backoff_limit=backoff_limit,
            gpu_resource_key=gpu_resource_key,
            run_id=run_id,
            batch_api=batch_api,
            core_api=core_api,
            **{"gpu_nodes": EKS_GPU_NODES} | more,
        )


def as_rank(pod: Json) -> Json:
    """A patch of pods that names the replica's container as its Job does."""
    containers = pod.get("containers")
    if not isinstance(containers, list):
        return pod
    named = [
        {**item, "name": CONTAINER}
        if isinstance(item, dict) and item.get("name") == REPLICA
        else item
        for item in containers
    ]
    return {**pod, "containers": named}


def plain_tolerations(entries: Sequence[Any] | None) -> list[Json] | None:
    """Tolerations with the names of the API, from dicts or objects of the official client."""
    if entries is None:
        return None
    if isinstance(entries, str | Mapping) or not isinstance(entries, Sequence):
        raise ValidationError("tolerations", entries, "expected a list of tolerations")
    return [_toleration(f"tolerations[{at}]", entry) for at, entry in enumerate(entries)]


def _toleration(field: str, entry: Any) -> Json:
    if not isinstance(entry, Mapping):
        to_dict = getattr(entry, "to_dict", None)
        entry = to_dict() if callable(to_dict) else entry
    if not isinstance(entry, Mapping):
        expected = "expected a dictionary or a V1Toleration of the kubernetes client"
        raise ValidationError(field, entry, expected)
    camel = {_camel(key): value for key, value in entry.items() if value is not None}
    for key, value in camel.items():
        if key not in TOLERATION:
            raise ValidationError(f"{field}.{key}", value, _meant(key, TOLERATION))
    return camel


def _camel(name: Any) -> str:
    return re.sub(r"_([a-z])", lambda part: part[1].upper(), str(name))


def name_part(field: str, text: Any) -> str:
    """`text` as part of a DNS label: lower case, with '-' for what a label cannot hold."""
    part = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") if isinstance(text, str) else ""
    if not part:
        raise ValidationError(field, text, "expected letters or digits, as part of a Job's name")
    return part


def _one_account(name: str | None, other: str | None) -> str | None:
    if name is not None and other is not None and name != other:
        expected = f"expected as service_account_name, which is {name!r}"
        raise ValidationError("service_account", other, expected)
    return other if name is None else name


def _check_known(options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in OPTIONS:
            named = KubernetesExecutor.__init__.__kwdefaults__ or {}
            raise UnknownArgument(name, value, _meant(name, [*OPTIONS, *named]))


def _meant(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return "there is no such argument" + (f": did you mean {close[0]!r}?" if close else "")
