"""Replicas on Modal, launched from a script: `ModalExecutor` and `ModalSpawnExecutor`."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Self

from atoll.backends.modal.options import ModalOptions
from atoll.core.checks import check_as, check_int, check_timeout
from atoll.core.errors import AtollError, ValidationError
from atoll.core.phase import TERMINAL
from atoll.core.spec import Deadline, RankCount
from atoll.core.stores import store_uri
from atoll.replicas.entrypoints import RANK_ENV, URI, WORLD
from atoll.replicas.protocol import Entrypoint, ReplicaHandle, ReplicaState, read_handle
from atoll.replicas.recorded import StoreReplicas
from atoll.replicas.surface import list_handles


class ModalExecutor(StoreReplicas):
    """Replicas as Sandboxes of Modal, one for each attempt of each.

    `image` is a name in a registry or a `modal.Image`, with Python and `atoll[store]`; `store` an
    object store that Modal and this machine reach, such as `s3://bucket/runs`, with the records and
    logs of all launches. Other `options` are those of `ModalOptions`. `command` runs exactly as it
    is, in the image; without it the code of the entrypoint is sent along, with the working
    directory unless `code` is False. `max_restarts`: how often each replica is restarted. Bad
    options raise ValidationError here.
    """

    backend_name = "modal"
    _launch_noun = "set of sandboxes"
    _options_type = ModalOptions
    _required = {"store": "expected s3://, gs:// or az://: records and logs of launches are there"}
    _found_by = ("store", "app")


log = logging.getLogger(__name__)

POLL_S = 2.0  # between two polls of calls that are waited for: each is a request
NO_LOGS = "(the logs of a Modal function are on the page of its app)"


class ModalSpawnExecutor:
    """Replicas as calls of `modal_function`, each with `rendezvous_uri`, `world_size`, `rank` and
    the arguments of the launch as keyword arguments.

    Replicas outlive the script; `close` and `with` end what was launched here.
    """

    backend_name = "modal-spawn"
    supports_inter_replica_network = False

    def __init__(self, modal_function: Any = None) -> None:
        ModalOptions.check_installed(type(self).__name__)
        if not callable(getattr(modal_function, "spawn", None)):
            expected = "expected a function decorated with @app.function()"
            raise ValidationError("modal_function", modal_function, expected)
        self.modal_function = modal_function
        self._calls: dict[str, Any] = {}  # by id, of those launched here
        self._overdue: set[str] = set()  # ids of calls that were ended at their deadline

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        gpu: str | int | None = None,
        timeout: float | None = 3600,
    ) -> list[ReplicaHandle]:
        """Spawns one call for each rank. `entrypoint` and `gpu` are the decorated function's.

        What still runs after `timeout` seconds is cancelled by the next poll, and has failed. If
        one call cannot be spawned, those before it are cancelled.
        """
        check_as("n_replicas", n_replicas, RankCount)
        check_as("timeout", timeout, Deadline | None)
        args = self._arguments(n_replicas, {} if entrypoint_args is None else entrypoint_args)
        log.info("modal_function runs; the entrypoint %r is ignored", entrypoint)
        if gpu is not None:
            log.warning("gpu=%r is not used: the decorator of modal_function chooses the GPU", gpu)
        uid = uuid.uuid4().hex
        launch = {"job_name": f"replicas-{uid}", "uid": uid, "timeout": timeout}
        deadline = None if timeout is None else time.time() + timeout
        handles: list[ReplicaHandle] = []
        try:
            for rank in range(n_replicas):
                call = self.modal_function.spawn(**args, world_size=n_replicas, rank=rank)
                call_fields = {"rank": rank, "call_id": call.object_id, "deadline": deadline}
                self._calls[call.object_id] = call
                handles.append(ReplicaHandle(rank, self.backend_name, launch | call_fields))
        except BaseException:
            for handle in handles:
                with contextlib.suppress(AtollError):
                    self.cancel(handle)
            raise
        return handles

    def poll(self, handle: ReplicaHandle) -> ReplicaState:
        """The state of the replica. Raises Temporary if Modal does not answer."""
        return self._report(handle)["status"]  # type: ignore[no-any-return]

    def stream_logs(self, handle: ReplicaHandle, n_lines: int = 200) -> str:
        """Return a placeholder: Modal shows the logs of functions on its page."""
        check_int("n_lines", n_lines, 1, 10_000_000)
        self._call_of(handle)
        return NO_LOGS

    def cancel(self, handle: ReplicaHandle) -> None:
        """Ends the replica. Already ended or unknown is success."""
        from atoll.backends.modal.client import cancel

        cancel(self._call_of(handle))

    def collect(
        self, handles: Sequence[ReplicaHandle], timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """How each replica ended, in the order of `handles`, once all have or time is up."""
        if timeout is not None:
            check_timeout(timeout)
        handles = list_handles(handles)
        due = None if timeout is None else time.monotonic() + timeout
        reports = []
        for handle in handles:
            report = self._report(handle)
            while report["status"] not in TERMINAL:
                left = POLL_S if due is None else due - time.monotonic()
                if left <= 0:
                    report["error"] = f"{report['status']} after {timeout:g} s of waiting"
                    break
                time.sleep(min(POLL_S, left))
                report = self._report(handle)
            reports.append(report)
        return reports

    def close(self) -> None:
        """Cancels everything that was launched here."""
        from atoll.backends.modal.client import cancel

        for id, call in list(self._calls.items()):
            cancel(call)
            del self._calls[id]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _arguments(self, n_replicas: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of every call, without its rank and its world size."""
        if not isinstance(values, Mapping):
            raise ValidationError("entrypoint_args", values, "expected names and values")
        args = {key: value for key, value in values.items() if key != RANK_ENV}
        if args.pop(WORLD, n_replicas) != n_replicas:
            expected = f"expected {n_replicas}: so many replicas are launched"
            raise ValidationError(f"entrypoint_args.{WORLD}", values[WORLD], expected)
        if "rank" in args:
            expected = "expected none: every call has its own"
            raise ValidationError("entrypoint_args.rank", args["rank"], expected)
        if args.get(URI) is None:
            expected = "expected an object store that all replicas reach, such as s3://bucket/run"
            raise ValidationError(f"entrypoint_args.{URI}", None, expected)
        store_uri(f"entrypoint_args.{URI}", args[URI], None)
        return args

    def _call_of(self, handle: ReplicaHandle) -> Any:
        from atoll.backends.modal.client import find_call

        metadata = read_handle(handle, self.backend_name).metadata
        id = metadata.get("call_id")
        if not isinstance(id, str) or not id:
            raise ValidationError("handle.metadata.call_id", id, "expected the id of a call")
        return self._calls.get(id) or find_call(id)

    def _report(self, handle: ReplicaHandle) -> dict[str, Any]:
        from atoll.backends.modal.client import cancel, inspect_call

        call, metadata = self._call_of(handle), handle.metadata
        call_state = inspect_call(call)
        state, error = call_state.state, call_state.error
        deadline = metadata.get("deadline")
        if state == "running" and deadline is not None and time.time() >= deadline:
            cancel(call)
            self._overdue.add(metadata["call_id"])
        if metadata["call_id"] in self._overdue and state != "succeeded":
            state, error = "failed", f"still running {metadata['timeout']:g} s after the start"
        return {
            "rank": handle.rank,
            "status": state,
            "exit_code": {"succeeded": 0, "failed": 1}.get(state),
            "error": error or None,
            "result": call_state.result,
            "job_name": metadata["job_name"],
            **dict.fromkeys(("signal", "reason", "host", "started_at", "ended_at")),
        }
