"""Replicas on backends whose ranks keep their own records: what their library classes share.

A launch is found by its name alone, which holds its uid. Its spec is stored with the records, so
any process with the same options can follow it. What has ended stays until somebody removes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from atoll.backends.base import BackendOptions, StoreOptions
from atoll.backends.local.state import state_dir
from atoll.backends.recorded import LAUNCH_PREFIX
from atoll.core.config import options_of
from atoll.core.errors import ValidationError
from atoll.core.executors import load
from atoll.core.ports import Executor
from atoll.replicas.surface import ReplicaRendezvous, ReplicaSurface


class RecordedReplicas(ReplicaSurface):
    """The surface of their library classes, which name the backend and its options."""

    _options_type: type[BackendOptions]
    _required: Mapping[str, str] = {}  # arguments without which nothing runs, and what is expected

    def __init__(
        self,
        image: Any = None,
        *,
        command: Sequence[str] | None = None,
        max_restarts: int = 0,
        allow_pickle: bool = False,
        code: bool = True,
        rendezvous_backend: ReplicaRendezvous = "none",
        **options: Any,
    ) -> None:
        self._options_type.check_installed(type(self).__name__)
        self._take(
            command=command,
            max_restarts=max_restarts,
            allow_pickle=allow_pickle,
            code=code,
            rendezvous_backend=rendezvous_backend,
        )
        for field, expected in self._required.items():
            value = image if field == "image" else options.get(field)
            if not isinstance(value, str) or not value:
                raise ValidationError(field, value, expected)
        self._options = options_of(self._options_type, options)
        self.image, self.command, self.max_restarts = image, self._command, max_restarts

    def _make_backend(self) -> Executor:
        backend: Any = load(self.backend_name)
        backend = backend.from_options(self._options, state_dir())
        backend.check_machine()
        return backend  # type: ignore[no-any-return]

    def _launch_name(self, uid: str) -> str:
        return f"{LAUNCH_PREFIX}{uid}"


class StoreReplicas(RecordedReplicas):
    """The surface of services whose replicas keep their records in an object store."""

    supports_inter_replica_network = False
    _options_type: type[StoreOptions]
    _found_by: Sequence[str] = ("store",)  # options that a process must share to follow a launch

    def __init__(self, image: Any = None, *, store: str | None = None, **options: Any) -> None:
        if "rendezvous_backend" in options:
            expected = "expected none: replicas of services meet in the store alone"
            raise ValidationError("rendezvous_backend", options["rendezvous_backend"], expected)
        super().__init__(image, store=store, **options)
        # The image may be an object of a client, which no table can hold.
        self._options = replace(self._options, image=image, store=store and store.rstrip("/"))
        self.store = self._options.store
        self._address = {field: getattr(self._options, field) for field in self._found_by}
