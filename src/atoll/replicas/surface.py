"""Executors as a library: replicas launched from a script, with no server.

`ReplicaSurface` is written once: a launch is a training of a control plane inside the script. A
backend adds how it makes its executor and what its ranks run. Replicas are independent: one that
fails does not stop the others, and each has its own exit code.
"""

from __future__ import annotations

import atexit
import base64
import os
import pickle
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

from atoll.core.checks import (
    ENTRYPOINT_VARIABLE,
    QUORUM_VARIABLE,
    TOGETHER_VARIABLE,
    check_as,
    check_int,
    check_timeout,
)
from atoll.core.errors import NotFound, ValidationError
from atoll.core.narrate import exit_in_words
from atoll.core.ports import Checking, Executor
from atoll.core.spec import (
    MAX_GPUS,
    Deadline,
    RankCount,
    RendezvousSpec,
    Resources,
    Source,
    TrainingSpec,
    WorldSize,
)
from atoll.core.status import RankStatus, Training
from atoll.rank.result import lines_expected, result_of, visible
from atoll.replicas.arguments import URI, read_arguments, store_uri
from atoll.replicas.entrypoints import (
    Entry,
    FunctionCall,
    InImage,
    Module,
    Script,
    is_function,
    name_of,
    read_entry,
)
from atoll.replicas.plane import Gang, ScriptPlane

Entrypoint = str | os.PathLike[str] | Callable[..., Any]

NOTHING_YET = "(nothing to read yet)"
RESULT_TAIL = 64  # number of last lines in which the end of a result is looked for first
_SHIPPED = (
    "import base64\nfrom atoll.rank.replica_entry import main\nmain(base64.b64decode('{}'))\n"
)

ReplicaState = Literal["pending", "running", "succeeded", "failed", "cancelled"]

FINAL = frozenset({"succeeded", "failed", "cancelled"})
STATES: dict[str, ReplicaState] = {
    "Pending": "pending",
    "Running": "running",
    "Succeeded": "succeeded",
    "Failed": "failed",
}


@dataclass(frozen=True)
class ReplicaHandle:
    """One replica of one launch. Only the executor that launched it knows it."""

    rank: int
    gang: str
    backend: str


class ReplicaSurface:
    """launch_replicas, poll, stream_logs, cancel, collect; for any executor."""

    backend_name: str = ""
    supports_inter_replica_network: bool = False
    has_shared_folder: bool = False  # replicas see the launcher's files under the same paths
    namespace = "default"
    stop_grace_s = 5.0

    def make_executor(self) -> Executor:
        """Called once, in the thread that will use it."""
        raise NotImplementedError

    def read_entry(self, entrypoint: Entrypoint, args: Mapping[str, Any]) -> Entry:
        """What runs, with its arguments. Raises ValidationError for what cannot."""
        return read_entry(entrypoint, args)

    def what_runs(self, entry: Entry, uid: str) -> dict[str, Any]:
        """The fields of the spec that say what a rank runs. By default they hold the code."""
        match entry:
            case FunctionCall(payload):
                content = _SHIPPED.format(base64.b64encode(payload).decode()).encode()
                return {"source": Source(kind="script", content=content, filename="replica.py")}
            case Module(name, argv):
                return {"command": ["python", "-m", name, *argv]}
            case Script(path, argv):
                source = Source(kind="script", content=path.read_bytes(), filename=path.name)
                return {"source": source, "args": argv}
            case InImage(name):
                raise ValidationError("entrypoint", name, "expected code that can be shipped")

    def launch_name(self, uid: str) -> str:
        """The name of a new launch, a DNS label."""
        return f"replicas-{uid[:12]}"

    def check_launch(self, spec: TrainingSpec) -> None:
        """Raises ValidationError, naming the field, if the spec can never run here."""
        executor = self._plane.executor
        if isinstance(executor, Checking):
            executor.check(spec)

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
        check_as("n_replicas", n_replicas, RankCount)
        check_as("timeout", timeout, Deadline | None)
        given = {} if entrypoint_args is None else entrypoint_args
        args = read_arguments(given, is_function=is_function(entrypoint))
        entry = self.read_entry(entrypoint, args.values)
        uri = store_uri(args.values.get(URI), is_shared_folder=self.has_shared_folder)
        self._plane.check_open()
        uid = uuid.uuid4().hex
        spec = TrainingSpec(
            name=self.launch_name(uid),
            world_size=WorldSize(min=1, target=n_replicas, max=n_replicas),
            rendezvous=RendezvousSpec(uri=uri),
            resources=read_gpu(gpu),
            deadline_s=timeout,
            stop_grace_s=self.stop_grace_s,
            executor=self._plane.executor.name,
            env={
                **args.env,
                **({ENTRYPOINT_VARIABLE: name} if (name := name_of(entrypoint)) else {}),
                **start_variables(n_replicas),
            },
            **self.what_runs(entry, uid),
        )
        self.check_launch(spec)
        training = Training(namespace=self.namespace, uid=uid, spec=spec, created_at=time.time())
        self._known[uid] = self._plane.launch(training)
        return [ReplicaHandle(rank, uid, self.backend_name) for rank in range(n_replicas)]

    def poll(self, handle: ReplicaHandle) -> ReplicaState:
        """The state of the replica. Raises the error that keeps the backend from telling it."""
        gang = self._gang(handle)
        fault = self._plane.fault_of(gang)
        if fault is not None and not gang.is_over:
            raise fault
        return state_of(gang.training, handle.rank)

    def stream_logs(self, handle: ReplicaHandle, n_lines: int = 200) -> str:
        """The last `n_lines` lines it has printed; a placeholder while there are none."""
        check_int("n_lines", n_lines, 1, 10_000_000)
        lines = self._log(handle, n_lines)
        printed = [text for text in map(visible, lines) if text is not None]
        if len(printed) < len(lines) == n_lines:  # the rest was a result: look above it
            printed = [t for t in map(visible, self._log(handle, None)) if t is not None][-n_lines:]
        return "\n".join(printed) if printed else NOTHING_YET

    def cancel(self, handle: ReplicaHandle) -> None:
        """Stops the whole gang of this replica. Already ended or being stopped is success.

        Raises if the backend did not accept it: the replicas may still run then.
        """
        self._plane.call(self._plane.cancel(self._gang(handle)))

    def collect(
        self, handles: Sequence[ReplicaHandle], timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """How each replica ended, in the order of `handles`, once all have.

        After `timeout` seconds those that have not ended are reported as they are, with an `error`
        that says so; another call continues to wait.
        """
        if timeout is not None:
            check_timeout(timeout)
        gangs = [self._gang(handle) for handle in handles]
        deadline = None if timeout is None else time.monotonic() + min(timeout, 1e12)
        pairs = list(zip(gangs, handles, strict=True))

        def is_done() -> bool:
            return all(state_of(gang.training, handle.rank) in FINAL for gang, handle in pairs)

        self._plane.call(self._plane.wait(list(dict.fromkeys(gangs)), is_done, deadline))
        return [self._report(gang, handle, timeout) for gang, handle in pairs]

    def close(self) -> None:
        """Stops everything that was launched and removes its files."""
        if "_plane" in self.__dict__ and self._is_own():
            self._plane.close()
        atexit.unregister(self.close)

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
    def _plane(self) -> ScriptPlane:
        self._pid  # noqa: B018  whose it is
        atexit.register(self.close)
        return ScriptPlane(self.make_executor)

    @cached_property
    def _known(self) -> dict[str, Gang]:
        return {}

    def _gang(self, handle: ReplicaHandle) -> Gang:
        if not isinstance(handle, ReplicaHandle) or handle.gang not in self._known:
            raise NotFound("replica", str(handle))
        return self._known[handle.gang]

    def _log(self, handle: ReplicaHandle, tail: int | None) -> list[str]:
        gang = self._gang(handle)

        async def read() -> list[str]:
            lines = self._plane.executor.logs(gang.training, ranks=[handle.rank], tail=tail)
            return [line.text async for line in lines]

        return self._plane.call(read())

    def _report(self, gang: Gang, handle: ReplicaHandle, timeout: float | None) -> dict[str, Any]:
        rank = rank_of(gang.training, handle.rank)
        state = state_of(gang.training, handle.rank)
        ended = rank.exit
        result, trouble = self._result(gang, handle) if state in FINAL else (None, "")
        error = error_of(gang.training, rank, state)
        if state not in FINAL:
            error = f"{state} after {timeout:g} s of waiting"
            error += f": {rank.message}" if rank.message else ""
        return {
            "rank": handle.rank,
            "status": state,
            "exit_code": ended.code if ended else None,
            "error": error or trouble or None,
            "result": result,
            "signal": ended.signal if ended else None,
            "reason": ended.reason if ended else None,
            "host": rank.node,
            "started_at": rank.started_at,
            "ended_at": ended.at if ended else None,
        }

    def _result(self, gang: Gang, handle: ReplicaHandle) -> tuple[Any, str]:
        """The result of the replica, or None and why there is none."""
        if handle.rank not in gang.results:
            payload = self._result_payload(handle)
            try:
                outcome = (None if payload is None else pickle.loads(payload), "")
            except Exception as error:  # a class that only the replica has, for example
                outcome = (None, f"the result cannot be read here: {error!r}")
            gang.results[handle.rank] = outcome
        return gang.results[handle.rank]

    def _result_payload(self, handle: ReplicaHandle) -> bytes | None:
        tail = self._log(handle, RESULT_TAIL)
        count = lines_expected(tail)
        if count == 0:
            return None if len(tail) < RESULT_TAIL else result_of(self._log(handle, None))
        return result_of(tail) or result_of(self._log(handle, count + RESULT_TAIL))


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
    """Why the rank failed, in one line; empty if it did not."""
    if state != "failed":
        return ""
    status, ended = training.status, rank.exit
    why = status.failing_message or status.message
    if ended is None:
        return why or "it was never started"
    words = exit_in_words(ended)
    if ended.is_stopped:
        return f"{why}; it {words}" if why else words
    last = next((line.strip() for line in reversed(ended.log_tail) if line.strip()), "")
    return words if ended.message or not last else f"{words}: {last}"


def start_variables(n_replicas: int) -> dict[str, str]:
    """What replicas are told of their launch: failures are independent, agreement is not.

    A run of theirs begins with more than half of the launch, so two parts of it can never begin
    apart. `atoll.diloco.allreduce.start` has what later rounds need.
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
    if not isinstance(gpu, str) or not model or (":" in gpu and not count.isdigit()):
        raise ValidationError("gpu", gpu, "expected a count, 'H100' or 'H100:2'")
    return Resources(gpu_count=int(count or 1), gpu_models=[model])
