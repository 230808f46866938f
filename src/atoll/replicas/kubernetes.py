"""Replicas on a cluster, launched from a script: `KubernetesExecutor` and `EKSExecutor`.

Should the script be killed, its Jobs go on until their deadline, and the cluster removes them.
"""

from __future__ import annotations

from typing import Any

from atoll.core.errors import ValidationError
from atoll.core.spec import TrainingSpec
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.executor import JobExecutor
from atoll.kubernetes.options import EKS_GPU_NODES, Options
from atoll.replicas.surface import ReplicaSurface


class KubernetesExecutor(ReplicaSurface):
    """Replicas as the pods of one Indexed Job a launch. Options: see `Options`; `image` is one.

    `context` and `kubeconfig` choose the cluster; by default it is the pod's own, `KUBECONFIG` or
    ~/.kube/config. Bad options raise ValidationError here, clashes at the launch.
    """

    backend_name = "kubernetes"
    supports_inter_replica_network = True

    def __init__(
        self, *, context: str | None = None, kubeconfig: str | None = None, **options: Any
    ) -> None:
        try:
            self.options = Options(**options)
        except TypeError as error:
            raise ValidationError("options", sorted(options), str(error)) from error
        self._given = options
        self._context = context
        self._kubeconfig = kubeconfig

    def make_executor(self) -> JobExecutor:
        cluster = Cluster.connect(self._context, self._kubeconfig)
        options = {"namespace": cluster.namespace, **self._given}
        return JobExecutor(cluster=cluster, **options)

    def check_launch(self, spec: TrainingSpec) -> None:
        """Raises ValidationError where the launch cannot be done with these options."""
        self.options.check(spec)


class EKSExecutor(KubernetesExecutor):
    """KubernetesExecutor with EKS's node labels in the GPU table."""

    backend_name = "eks"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"gpu_nodes": EKS_GPU_NODES} | options)
