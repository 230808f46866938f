"""atoll: elastic, fault-tolerant training on one machine or a cluster.

Names load on first use, so that importing atoll in a rank costs nothing. Type checkers read them in
`__init__.pyi`.
"""

from __future__ import annotations

import importlib

__version__ = "0.2.0"

_HOME = {
    "AtollError": "core.errors",
    "BackendError": "core.errors",
    "BelowMinimumWorld": "core.errors",
    "BenchResult": "core.status",
    "Client": "sdk.client",
    "Conflict": "core.errors",
    "Denied": "core.errors",
    "DistributedError": "core.errors",
    "DistributedTraining": "sdk.training",
    "EKSExecutor": "replicas.kubernetes",
    "Gone": "core.errors",
    "KubernetesExecutor": "replicas.kubernetes",
    "LocalProcessExecutor": "replicas.local",
    "ModalExecutor": "replicas.modal",
    "ModalSpawnExecutor": "replicas.modal",
    "NotFound": "core.errors",
    "ObjectStoreAllReduce": "diloco.allreduce",
    "Permanent": "core.errors",
    "ProviderFilter": "core.spec",
    "RankExit": "core.status",
    "RankStatus": "core.status",
    "ReplicaHandle": "replicas.protocol",
    "ResultError": "core.errors",
    "SageMakerExecutor": "replicas.sagemaker",
    "ServerlessExecutor": "replicas.protocol",
    "SlurmExecutor": "replicas.slurm",
    "Temporary": "core.errors",
    "UDTerminalState": "core.errors",
    "ValidationError": "core.errors",
    "WorldSize": "core.spec",
    "WorldSizeOutOfBounds": "core.errors",
    "WorldStatus": "core.status",
    "distributed": "sdk.sweep",
    "mesh_status": "mesh.gate",
    "mesh_wait": "mesh.gate",
    "report": "agent.metrics",
    "report_settings": "agent.metrics",
    "set_result": "agent.result",
    "HFJobsExecutor": "replicas.hfjobs",
}

_EXTRA = {"ObjectStoreAllReduce": "store"}  # what imports only with these packages

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"atoll.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if name not in _EXTRA:
            raise
        from atoll.core.errors import class_without_package

        return class_without_package(name, error, _EXTRA[name])
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
