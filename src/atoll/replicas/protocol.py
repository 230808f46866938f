"""`ServerlessExecutor`: what every executor of replicas can do, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from atoll.replicas.handle import ReplicaHandle
from atoll.replicas.surface import Entrypoint, ReplicaState


@runtime_checkable
class ServerlessExecutor(Protocol):
    """Launches replicas somewhere, and tells how they are and how they ended."""

    backend_name: str
    supports_inter_replica_network: bool  # replicas of a launch have a way to reach each other

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        gpu: str | int | None = None,
        timeout: float | None = 3600,
    ) -> list[ReplicaHandle]: ...

    def poll(self, handle: ReplicaHandle) -> ReplicaState: ...

    def stream_logs(self, handle: ReplicaHandle, n_lines: int = 200) -> str: ...

    def cancel(self, handle: ReplicaHandle) -> None: ...

    def collect(
        self, handles: Sequence[ReplicaHandle], timeout: float | None = None
    ) -> list[dict[str, Any]]: ...
