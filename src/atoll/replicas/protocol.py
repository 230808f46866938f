"""What every executor of replicas has in common: its protocol, and the handles of its replicas."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from atoll.core.checks import is_text
from atoll.core.errors import ValidationError

Entrypoint = str | os.PathLike[str] | Callable[..., Any]
ReplicaState = Literal["pending", "running", "succeeded", "failed", "cancelled"]


@runtime_checkable
class ServerlessExecutor(Protocol):
    """Launches replicas, reports their states and collects their results."""

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


EXPECTED = "expected a ReplicaHandle of launch_replicas, attach or from_json"


@dataclass(frozen=True)
class ReplicaHandle:
    """One replica of one launch, for `poll`, `stream_logs`, `cancel` and `collect` of an executor.

    `metadata` is JSON: `job_name` is the launch, `uid` distinguishes it from another one of that
    name, and the other fields are what the backend needs to find it. A handle can be pickled.
    """

    rank: int
    backend_name: str
    metadata: dict[str, Any] = field(default_factory=dict)

    def __hash__(self) -> int:
        launch = self.metadata.get("job_name") if isinstance(self.metadata, dict) else None
        return hash((self.rank, self.backend_name, str(launch)))

    def to_json(self) -> str:
        """One line of JSON, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes | Mapping[str, Any]) -> ReplicaHandle:
        """The handle that `to_json` wrote, as text or already parsed. Raises ValidationError.

        The executor that uses the handle checks its `metadata`.
        """
        try:
            document = json.loads(text) if isinstance(text, str | bytes) else dict(text)
        except (ValueError, TypeError) as error:
            raise ValidationError(
                "handle", text, f"expected the output of to_json ({error})"
            ) from error
        names = {"rank", "backend_name", "metadata"}
        if not isinstance(document, dict) or set(document) != names:
            raise ValidationError("handle", text, f"expected {', '.join(sorted(names))}")
        handle = cls(**document)
        _check_shape(handle)
        return handle


class LaunchAddress(NamedTuple):
    """How to find the launch of a handle."""

    job_name: str
    uid: str | None
    metadata: dict[str, Any]


def read_handle(handle: object, backend_name: str | None = None) -> LaunchAddress:
    """Raises ValidationError for what is no handle, or one of another backend."""
    if not isinstance(handle, ReplicaHandle):
        raise ValidationError("handle", handle, EXPECTED)
    _check_shape(handle)
    if backend_name is not None and handle.backend_name != backend_name:
        raise ValidationError(
            "handle.backend_name",
            handle.backend_name,
            f"expected {backend_name!r}: the handle belongs to another backend",
        )
    for key in ("job_name", "uid", "namespace", "directory"):
        value = handle.metadata.get(key)
        is_missing = value is None and key != "job_name"
        if not is_missing and not (is_text(value) and value):
            raise ValidationError(f"handle.metadata.{key}", value, f"expected text; {EXPECTED}")
    return LaunchAddress(handle.metadata["job_name"], handle.metadata.get("uid"), handle.metadata)


def _check_shape(handle: ReplicaHandle) -> None:
    if not isinstance(handle.rank, int) or isinstance(handle.rank, bool) or handle.rank < 0:
        raise ValidationError("handle.rank", handle.rank, "expected an integer, 0 or more")
    if not isinstance(handle.backend_name, str):
        raise ValidationError("handle.backend_name", handle.backend_name, "expected text")
    if not isinstance(handle.metadata, dict):
        raise ValidationError("handle.metadata", handle.metadata, "expected names and values")
