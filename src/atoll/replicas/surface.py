"""Executors as a library: replicas launched from a script, with no server.

`ReplicaSurface` is written once: a launch is a training of a control plane inside the script. A
backend adds how it makes its executor and what its ranks run. Replicas are independent: one that
fails does not stop the others, and each has its own exit code.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self

from msgspec.structs import fields, replace

from atoll.agent.result import PICKLE, Result
from atoll.code.results import decode_value
from atoll.core.checks import (
    ENTRYPOINT_VARIABLE,
    QUORUM_VARIABLE,
    RESULTS_VARIABLE,
    TOGETHER_VARIABLE,
    check_as,
    check_choice,
    check_int,
    check_strings,
    check_timeout,
    is_text,
)
from atoll.core.describe import describe_exit
from atoll.core.errors import BackendError, NotFound, ValidationError
from atoll.core.phase import TERMINAL, Phase, PhaseReason
from atoll.core.ports import Executor, describe_unsupported, unsupported_fields
from atoll.core.spec import (
    MAX_GPUS,
    MAX_WORLD,
    Code,
    Deadline,
    RankCount,
    RendezvousSpec,
    Resources,
    TrainingSpec,
    WorldSize,
)
from atoll.core.status import Exit, RankStatus, Status, Training
from atoll.core.stores import store_uri
from atoll.replicas.entrypoints import (
    URI,
    Entry,
    is_function,
    read_arguments,
    read_entry,
    read_in_image,
)
from atoll.replicas.plane import Gang, ScriptPlane
from atoll.replicas.protocol import (
    Entrypoint,
    LaunchAddress,
    ReplicaHandle,
    ReplicaState,
    read_handle,
)

log = logging.getLogger(__name__)


NOTHING_YET = "(nothing to read yet)"

# "none": each replica is a world of its own, and so is a torchrun in it.
ReplicaRendezvous = Literal["none", "c10d", "static"]

RESTARTS = next(field.type for field in fields(TrainingSpec) if field.name == "max_restarts")
STATES: dict[str, ReplicaState] = {
    "Pending": "pending",
    "Running": "running",
    "Succeeded": "succeeded",
    "Failed": "failed",
}


class ReplicaSurface:
    """launch_replicas, poll, stream_logs, cancel, collect, attach; for any executor.

    Replicas go on when the script ends, unless `ends_with_script`; `close` and `with` end what was
    launched. `allow_pickle`: functions may return whatever can be pickled. A replica can then run
    code here, so it is off by default.
    """

    backend_name: str = ""
    supports_inter_replica_network: bool = False
    _sends_code: bool = False  # the working directory travels to the replicas
    _has_shared_folder: bool = False  # replicas see the launcher's files under the same paths
    _rendezvous_backend: ReplicaRendezvous = "none"
    _namespace = "default"
    _stop_grace_s = 5.0
    _ends_with_script = False
    _allow_pickle = False
    _launch_noun = "launch"  # what the backend calls one
    _options: Any = None  # of the backend, which check a spec before there is one
    _command: list[str] | None = None  # of the image, in place of code that is sent along
    _image: str | None = None  # where it is of the spec, and not an option of the backend
    _restarts = 0  # of each replica
    # Options that a process must share to follow a launch, as the metadata of handles has them.
    _address: Mapping[str, Any] = {}
    _argument_of: Mapping[str, str] = {}  # the names of arguments that differ from those

    def _take(
        self,
        *,
        command: Sequence[str] | None = None,
        allow_pickle: bool = False,
        code: bool = False,
        rendezvous_backend: ReplicaRendezvous = "none",
        **restarts: int,
    ) -> None:
        """The arguments that executors have in common; `restarts` by its own name.

        A rendezvous is for a backend whose replicas can reach each other. Raises ValidationError.
        """
        for name, self._restarts in restarts.items():
            check_as(name, self._restarts, RESTARTS)
        for field, value in (("allow_pickle", allow_pickle), ("code", code)):
            if not isinstance(value, bool):
                raise ValidationError(field, value, "expected True or False")
        if command is not None:
            check_strings("command", command)
        check_choice("rendezvous_backend", rendezvous_backend, ReplicaRendezvous)
        self._command = None if command is None else list(command)
        self._allow_pickle = allow_pickle
        self._sends_code = code and command is None
        self._rendezvous_backend = rendezvous_backend
        if rendezvous_backend != "none":
            self.supports_inter_replica_network = True

    def _make_backend(self) -> Executor:
        """Called once, in the thread that will use it."""
        raise NotImplementedError

    @property
    def _python(self) -> str:
        """What replicas call it."""
        return str(getattr(self._options, "python", None) or "python")

    @property
    def _runs_in_place(self) -> bool:
        """Whether replicas run in the working directory of the launcher, which they see."""
        return self._has_shared_folder and not self._sends_code

    def _launch_name(self, uid: str) -> str:
        """The name of a new launch, a DNS label."""
        return f"replicas-{uid[:12]}"

    def _check_launch(self, spec: TrainingSpec) -> None:
        """Raises ValidationError, naming the field, if the spec can never run here."""
        (self._options or self._plane.executor).check(spec)

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        gpu: str | int | None = None,
        timeout: float | None = 3600,
    ) -> list[ReplicaHandle]:
        """Launches `n_replicas` replicas and returns their handles; `handles[i].rank == i`.

        All of `entrypoint_args` reaches each of them: scalars as upper-cased variables, the whole
        as JSON in ATOLL_ENTRYPOINT_ARGS, `--key value` for a script or module, keyword arguments
        for a function. `rank_env` among them names a variable for the rank. What is still running
        after `timeout` seconds is stopped and has failed. Bad input raises ValidationError, a
        ValueError, and nothing is launched.
        """
        for plane in self._planes.values():
            plane.check_open()
        training = self._new_training(n_replicas, entrypoint, entrypoint_args, gpu, timeout)
        executor = self._plane.executor
        spec = replace(training.spec, executor=executor.name)
        training = replace(training, namespace=self._namespace, spec=spec)
        self._plane.call(executor.dry_run(spec, self._namespace))
        ignored = unsupported_fields(spec, executor.SUPPORTS, executor.options)
        if note := describe_unsupported(executor.name, ignored):
            log.warning("%s", note)
        gang = self._plane.launch(training)
        self._gangs_by_name[self._job_name(training)] = gang
        self._note_launch(training)
        return self._handles(training, executor)

    def _new_training(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any] | None,
        gpu: str | int | None,
        timeout: float | None,
    ) -> Training:
        """The training that a launch is. Raises ValidationError for what cannot be launched."""
        check_as("n_replicas", n_replicas, RankCount)
        check_as("timeout", timeout, Deadline | None)
        is_called = is_function(entrypoint) and self._command is None
        own = {} if entrypoint_args is None else entrypoint_args
        args = read_arguments(own, n_replicas=n_replicas, is_function=is_called)
        if self._command is None:
            python, in_place = self._python, self._runs_in_place
            entry = read_entry(entrypoint, args.values, python=python, is_in_place=in_place)
        else:
            entry = read_in_image(entrypoint, self._command)
        folder = os.getcwd() if self._has_shared_folder else None
        uri = store_uri(f"entrypoint_args.{URI}", args.values.get(URI), folder)
        uid = uuid.uuid4().hex
        is_pickled = self._allow_pickle and entry.is_function
        spec = TrainingSpec(
            name=self._launch_name(uid),
            world_size=WorldSize(min=1, target=n_replicas, max=n_replicas),
            rendezvous=RendezvousSpec(backend=self._rendezvous_backend, uri=uri),
            resources=read_gpu(gpu),
            deadline_s=timeout,
            stop_grace_s=self._stop_grace_s,
            env={
                **args.env,
                **({ENTRYPOINT_VARIABLE: entry.name} if entry.name else {}),
                **start_variables(n_replicas),
                **({RESULTS_VARIABLE: PICKLE} if is_pickled else {}),
            },
            code=self._code_of(entry),
            max_restarts=self._restarts,
            image=self._image,
            working_dir=os.getcwd() if self._runs_in_place else None,
            **entry.fields,
        )
        self._check_launch(spec)
        return Training(namespace=self._namespace, uid=uid, spec=spec, created_at=time.time())

    def _code_of(self, entry: Entry) -> Code | None:
        """The working directory, where it travels. Raises ValidationError if it is too large."""
        if not self._sends_code:
            return None
        from atoll.code.archive import pack, refusal_of

        if explanation := refusal_of("."):
            log.warning("no code is sent: %s; code=False sends none on purpose", explanation)
            return None
        folders = [entry.folder] if entry.folder else []
        code = pack(".", [*folders, *sys.path])
        if code is not None:
            end = "code: %d files, %d bytes packed, sha256 %s"
            log.info(end, code.files, code.size, code.digest[:12])
        return code

    def attach(self, job_name: str) -> list[ReplicaHandle]:
        """The handles of a launch again, from any process. Raises NotFound if there is none."""
        if not is_text(job_name) or not job_name:
            raise ValidationError("job_name", job_name, "expected the job_name of a launch")
        address = LaunchAddress(job_name, None, {})
        gang = self._find_gang(address)
        if gang is None or gang.plane is None or gang.is_deleted:
            raise NotFound(f"{self.backend_name} launch", job_name)
        return self._handles(gang.training, gang.plane.executor)

    def poll(self, handle: ReplicaHandle) -> ReplicaState:
        """The state of the replica. Raises the error with which the backend failed."""
        gang = self._gang(handle)
        if gang.plane is not None and not gang.is_over and (fault := gang.plane.fault_of(gang)):
            raise fault
        return state_of(gang.training, handle.rank)

    def stream_logs(self, handle: ReplicaHandle, n_lines: int = 200) -> str:
        """The last `n_lines` lines it has printed; a placeholder while there are none."""
        check_int("n_lines", n_lines, 1, 10_000_000)
        gang = self._gang(handle)

        async def read(plane: ScriptPlane) -> list[str]:
            lines = plane.executor.logs(gang.training, ranks=[handle.rank], tail=n_lines)
            with contextlib.suppress(NotFound):  # deleted
                return [line.text async for line in lines]
            return []

        texts = gang.plane.call(read(gang.plane)) if gang.plane is not None else []
        return "\n".join(texts) if texts else NOTHING_YET

    def cancel(self, handle: ReplicaHandle) -> None:
        """Stops the whole gang of this replica. Already ended, being stopped or unknown is
        success.

        Raises if the backend did not accept it: the replicas go on then, and a refused cancel is
        not carried out later.
        """
        gang = self._gang(handle)
        if gang.plane is not None and not gang.is_over:
            gang.plane.call(gang.plane.cancel(gang))

    def collect(
        self, handles: Sequence[ReplicaHandle], timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """How each replica ended, in the order of `handles`, once all have.

        After `timeout` seconds those that have not ended are reported as they are, with an `error`
        that says so; another call continues to wait.
        """
        if timeout is not None:
            check_timeout(timeout)
        handles = list_handles(handles)
        gangs = self._gangs(handles)
        deadline = None if timeout is None else time.monotonic() + min(timeout, 1e12)
        pairs = list(zip(gangs, handles, strict=True))
        for gang, handle in pairs:
            has_ended = partial(_has_ended, gang, handle.rank)
            if gang.plane is not None and not has_ended():
                gang.plane.call(gang.plane.wait([gang], has_ended, deadline))
        return [self._report(gang, handle, timeout) for gang, handle in pairs]

    def close(self) -> None:
        """Stop and remove everything that was launched here. Attached launches keep running."""
        if self._is_own():
            for plane in self._planes.values():
                plane.close()
        atexit.unregister(self._end_with_script)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_own(self) -> bool:
        """False in a fork of the script, which must not end what it did not launch."""
        return self._pid == os.getpid()

    @cached_property
    def _pid(self) -> int:
        return os.getpid()

    @cached_property
    def _planes(self) -> dict[Path | None, ScriptPlane]:
        """Those that are in use, by the directory of what they follow, if it is another one."""
        return {}

    @property
    def _plane(self) -> ScriptPlane:
        return self._plane_in(None, self._make_backend)

    def _plane_in(self, directory: Path | None, make: Callable[[], Executor]) -> ScriptPlane:
        if directory not in self._planes:
            self._pid  # noqa: B018  whose it is
            atexit.register(self._end_with_script)
            self._planes[directory] = ScriptPlane(make)
        return self._planes[directory]

    def _end_with_script(self) -> None:
        if self._ends_with_script:
            self.close()
        elif self._is_own():
            for plane in self._planes.values():
                plane.leave()

    def _job_name(self, training: Training) -> str:
        """The name of a launch, as the backend has it."""
        return training.name

    def _metadata(self, training: Training, executor: Executor) -> dict[str, Any]:
        """What another process needs, with name and uid, to find the launch, as JSON."""
        return {"namespace": training.namespace, **self._address}

    def _plane_for(self, metadata: Mapping[str, Any]) -> ScriptPlane:
        """Who follows a launch with this metadata. Raises ValidationError if it cannot be one of
        this executor."""
        plane = self._plane
        for field, own in self._address.items():
            value = metadata.get(field, own)
            if value != own:
                argument = self._argument_of.get(field, field)
                expected = f"expected {own!r}: an executor with {argument}={value!r} has it"
                raise ValidationError(f"handle.metadata.{field}", value, expected)
        return plane

    def _note_launch(self, training: Training) -> None:
        """Called when a launch has succeeded."""

    def _handles(self, training: Training, executor: Executor) -> list[ReplicaHandle]:
        shared = {
            "job_name": self._job_name(training),
            "uid": training.uid,
            **self._metadata(training, executor),
        }
        return [
            ReplicaHandle(rank, self.backend_name, {**shared, "rank": rank})
            for rank in range(training.spec.world_size.target)
        ]

    @cached_property
    def _gangs_by_name(self) -> dict[str, Gang]:
        return {}

    @cached_property
    def _turn(self) -> threading.Lock:
        return threading.Lock()

    def _gang(self, handle: ReplicaHandle) -> Gang:
        """The gang of the handle, adopted where needed; one that is cancelled if there is none."""
        (gang,) = self._gangs([handle])
        return gang

    def _gangs(self, handles: Sequence[ReplicaHandle]) -> list[Gang]:
        """Check all handles before any request; find each launch once."""
        addresses = [read_handle(handle, self.backend_name) for handle in handles]
        by_launch: dict[tuple[str, str | None], Gang] = {}
        for address in addresses:
            launch = address.job_name, address.uid
            if launch not in by_launch:
                by_launch[launch] = self._find_gang(address) or absent_gang(address)
        gangs = [by_launch[address.job_name, address.uid] for address in addresses]
        for gang, handle in zip(gangs, handles, strict=True):
            size = gang.training.spec.world_size.target
            if handle.rank >= size:
                raise ValidationError(
                    "handle.rank", handle.rank, f"expected below {size}: so many were launched"
                )
        return gangs

    def _find_gang(self, address: LaunchAddress) -> Gang | None:
        with self._turn:
            gang = self._gangs_by_name.get(address.job_name)
            if gang is None:
                plane = self._plane_for(address.metadata)
                gang = plane.call(plane.adopt(address.job_name, address.uid))
                if gang is not None:
                    self._gangs_by_name[address.job_name] = gang
        is_other = gang is not None and address.uid not in (None, gang.training.uid)
        return None if is_other else gang

    def _report(self, gang: Gang, handle: ReplicaHandle, timeout: float | None) -> dict[str, Any]:
        rank = rank_of(gang.training, handle.rank)
        state = state_of(gang.training, handle.rank)
        ended = rank.exit
        result, trouble = self._result(gang, handle.rank) if state in TERMINAL else (None, "")
        error = error_of(gang.training, rank, state)
        job_name = handle.metadata["job_name"]
        if gang.is_deleted and state == "cancelled":
            error = f"the {self._launch_noun} {job_name} no longer exists"
        if state not in TERMINAL:
            error = f"{state} after {timeout:g} s of waiting"
            error += f": {rank.message}" if rank.message else ""
        return {
            "rank": handle.rank,
            "status": state,
            "exit_code": ended.code if ended else None,
            "error": error or trouble or None,
            "result": result,
            "job_name": job_name,
            "signal": ended.signal if ended else None,
            "reason": str(ended.reason) if ended and ended.reason else None,
            "host": rank.node,
            "started_at": rank.started_at,
            "ended_at": ended.at if ended else None,
        }

    def _result(self, gang: Gang, rank: int) -> tuple[Any, str]:
        """The result of the replica, or None and why there is none."""
        if rank not in gang.results:
            gang.results[rank] = self._read_result(gang, rank)
        return gang.results[rank]

    def _read_result(self, gang: Gang, rank: int) -> tuple[Any, str]:
        is_pickled = gang.training.spec.env.get(RESULTS_VARIABLE) == PICKLE
        if gang.plane is None:
            return None, ""
        try:
            if result := gang.plane.call(gang.plane.executor.result(gang.training, rank)):
                allow_pickle = self._allow_pickle and is_pickled
                return decode_value(Result(*result), allow_pickle=allow_pickle), ""
        except NotFound:  # deleted
            pass
        except (BackendError, ValueError) as error:
            return None, str(error)
        return None, ""


def _has_ended(gang: Gang, rank: int) -> bool:
    return gang.is_over or state_of(gang.training, rank) in TERMINAL


def absent_gang(address: LaunchAddress) -> Gang:
    """The gang of a launch that does not exist, or does so no longer: it is cancelled."""
    world = WorldSize(min=1, target=MAX_WORLD, max=MAX_WORLD)
    spec = TrainingSpec(name="absent", world_size=world, command=["true"], cancel=True)
    status = Status(phase=Phase.CANCELLED)
    training = Training(namespace="", uid=address.uid or "", spec=spec, status=status)
    gang = Gang(training, None, is_own=False)
    gang.is_deleted = True
    return gang


def list_handles(handles: object) -> list[Any]:
    """The handles of any iterable. Raises ValidationError for what is none, such as one handle."""
    if isinstance(handles, str | bytes | Mapping) or not isinstance(handles, Iterable):
        raise ValidationError("handles", handles, "expected a list of handles")
    return list(handles)


def rank_of(training: Training, rank: int) -> RankStatus:
    matching = (r for r in training.status.ranks if r.rank == rank)
    return next(matching, RankStatus(rank=rank))


def state_of(training: Training, rank: int) -> ReplicaState:
    """The state of a rank. One that was stopped or never ran ended the way its gang did."""
    phase = rank_of(training, rank).phase
    is_unfinished = phase == "Pending" and not training.status.phase.is_terminal
    if phase in ("Running", "Succeeded", "Failed") or is_unfinished:
        return STATES[phase]
    is_ended_by_us = training.spec.cancel or training.deletion_requested_at is not None
    return "cancelled" if is_ended_by_us and not training.status.failing else "failed"


def error_of(training: Training, rank: RankStatus, state: ReplicaState) -> str:
    """Why the rank failed or was cancelled, in one line; empty if it ended well."""
    status, ended = training.status, rank.exit
    if state == "cancelled":
        return f"cancelled: it {describe_exit(ended)}" if ended else "cancelled before it started"
    if state != "failed":
        return ""
    explanation = status.failing_message or status.message
    if ended is None:
        return explanation or "it did not start"
    end = describe_exit(ended)
    if ended.is_stopped or ended_at_deadline(training, ended):
        return f"{explanation}; it {end}" if explanation else end
    last = next((line.strip() for line in reversed(ended.log_tail) if line.strip()), "")
    return end if ended.message or not last else f"{end}: {last}"


def ended_at_deadline(training: Training, ended: Exit) -> bool:
    """Whether the backend itself has ended the rank, at the deadline of the gang."""
    deadline_s = training.spec.deadline_s
    if training.status.failing != PhaseReason.DEADLINE_EXCEEDED or deadline_s is None:
        return False
    return not ended.is_success and ended.at >= training.created_at + deadline_s - 1.0


def start_variables(n_replicas: int) -> dict[str, str]:
    """Variables that describe the launch to its replicas.

    Failures are independent, agreement is not: a run begins with more than half of the launch, so
    two parts of it can never begin separate runs. `atoll.diloco.replica_config` has what later
    rounds need.
    """
    return {TOGETHER_VARIABLE: str(n_replicas), QUORUM_VARIABLE: str(n_replicas // 2 + 1)}


def read_gpu(gpu: str | int | None) -> Resources:
    """The resources of each replica for `2`, `"H100"` or `"H100:2"`."""
    if gpu is None:
        return Resources()
    if isinstance(gpu, int):
        check_int("gpu", gpu, 1, MAX_GPUS)
        return Resources(gpu_count=gpu)
    model, _, count = str(gpu).partition(":")
    if not isinstance(gpu, str) or not model or (":" in gpu and not count.isdecimal()):
        raise ValidationError("gpu", gpu, "expected a count, 'H100' or 'H100:2'")
    number = int(count or 1)
    check_int("gpu", number, 1, MAX_GPUS)
    return Resources(gpu_count=number, gpu_models=[model])
