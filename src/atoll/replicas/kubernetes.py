"""Replicas on a cluster, launched from a script: `KubernetesExecutor` and `EKSExecutor`.

Should the script be killed, its Jobs go on until their deadline, and the cluster removes them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from atoll.core.errors import AtollError, ValidationError
from atoll.core.spec import TrainingSpec
from atoll.core.status import Training, Wish
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.executor import KubernetesBackend
from atoll.kubernetes.options import EKS_GPU_NODES, KubernetesOptions
from atoll.replicas.surface import ReplicaSurface


class KubernetesExecutor(ReplicaSurface):
    """Replicas as the pods of one Indexed Job a launch. `image` is one of `KubernetesOptions`.

    `context` and `kubeconfig` choose the cluster; by default it is the pod's own, `KUBECONFIG` or
    ~/.kube/config. Bad options raise ValidationError here, clashes at the launch.
    """

    backend_name = "kubernetes"
    supports_inter_replica_network = True

    def __init__(
        self, *, context: str | None = None, kubeconfig: str | None = None, **options: Any
    ) -> None:
        try:
            self.options = KubernetesOptions(**options)
        except TypeError as error:
            raise ValidationError("options", sorted(options), str(error)) from error
        self._given = options
        self._context = context
        self._kubeconfig = kubeconfig

    def make_executor(self) -> KubernetesBackend:
        cluster = Cluster.connect(self._context, self._kubeconfig)
        options = {"namespace": cluster.namespace, **self._given}
        return _CheckedJobs(check=self.check_launch, cluster=cluster, **options)

    def check_launch(self, spec: TrainingSpec) -> None:
        """Raises ValidationError where the launch cannot be done with these options."""
        self.options.check(spec)

    def close(self) -> None:
        """Nothing that was launched is left in the cluster, logs neither."""
        if "_gangs" in self.__dict__ and self._is_own():
            for gang in self._known.values():
                with contextlib.suppress(AtollError, RuntimeError):  # its ttl does it else
                    self.cancel_gang(gang)
        super().close()

    def cancel_gang(self, gang: Any) -> None:
        self._gangs.call(self._gangs.cancel(gang))
        self._gangs.call(self._gangs.executor.purge(gang.training))


class EKSExecutor(KubernetesExecutor):
    """KubernetesExecutor with EKS's node labels in the GPU table."""

    backend_name = "eks"

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"gpu_nodes": EKS_GPU_NODES} | options)


class _CheckedJobs(KubernetesBackend):
    """Refuses a launch by the name of the field, before anything is created."""

    def __init__(self, *, check: Callable[[TrainingSpec], None], **options: Any) -> None:
        super().__init__(**options)
        self._check_launch = check

    async def apply(self, training: Training, wish: Wish) -> None:
        self._check_launch(training.spec)
        await super().apply(training, wish)
