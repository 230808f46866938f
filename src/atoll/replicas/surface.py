"""Executors as a library: replicas launched from a script, with no server.

`ReplicaSurface` is written once over the verbs of `core/ports.Executor`; a backend adds how it
makes its executor and what its ranks run. Replicas are independent: one that fails does not stop
the others, and each has its own exit code.
"""

from __future__ import annotations

import atexit
import base64
import os
import pickle
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import atoll
from atoll.core.checks import ARGS_VARIABLE, check_as, check_int, check_timeout
from atoll.core.errors import NotFound
from atoll.core.ports import Executor
from atoll.core.spec import (
    Deadline,
    RankCount,
    RendezvousSpec,
    Source,
    TrainingSpec,
    WorldSize,
)
from atoll.core.status import Training
from atoll.local.executor import LocalExecutor
from atoll.rank.result import lines_expected, result_of, visible
from atoll.replicas.entrypoints import Call, Entry, Module, Script, read_entry
from atoll.replicas.gangs import Gang, Gangs
from atoll.replicas.guard import clear_abandoned, new_root, start_guard
from atoll.replicas.states import (
    FINAL,
    ReplicaState,
    error_of,
    rank_of,
    read_gpu,
    state_of,
)

Entrypoint = str | os.PathLike[str] | Callable[..., Any]

NOTHING_YET = "(nothing to read yet)"
RESULT_TAIL = 64  # lines in which the end of a result is looked for first
_SHIPPED = (
    "import base64\nfrom atoll.rank.replica_entry import main\nmain(base64.b64decode('{}'))\n"
)
_ENTRY = (
    "import pathlib, sys; sys.path.append(sys.argv.pop(1)); "
    "from atoll.rank.replica_entry import main; main(pathlib.Path(sys.argv[1]).read_bytes())"
)


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
    namespace = "default"
    stop_grace_s = 5.0

    def make_executor(self) -> Executor:
        """Called once, in the thread that will use it."""
        raise NotImplementedError

    def what_runs(self, entry: Entry, uid: str) -> dict[str, Any]:
        """The part of the spec that says what a rank runs. By default code travels with it."""
        match entry:
            case Call(payload):
                content = _SHIPPED.format(base64.b64encode(payload).decode()).encode()
                return {"source": Source(kind="script", content=content, filename="replica.py")}
            case Module(name, argv, variable):
                command = ["python", "-m", name, *argv]
                return {"command": command, "env": {ARGS_VARIABLE: variable}}
            case Script(path, argv, variable):
                source = Source(kind="script", content=path.read_bytes(), filename=path.name)
                return {"source": source, "args": argv, "env": {ARGS_VARIABLE: variable}}

    def launch_replicas(
        self,
        n_replicas: int,
        entrypoint: Entrypoint,
        entrypoint_args: Mapping[str, Any] | None = None,
        *,
        gpu: str | int | None = None,
        timeout: float | None = 3600,
    ) -> list[ReplicaHandle]:
        """`n_replicas` replicas have been asked for; `handles[i].rank == i`.

        All of `entrypoint_args` reaches each of them: a script or module gets `--key value` and
        the whole as JSON in ATOLL_ENTRYPOINT_ARGS, a function gets keyword arguments. What is
        still running after `timeout` seconds is stopped and has failed. Bad input raises
        ValidationError, a ValueError, and nothing is launched.
        """
        check_as("n_replicas", n_replicas, RankCount)
        check_as("timeout", timeout, Deadline | None)
        args = {} if entrypoint_args is None else entrypoint_args
        entry = read_entry(entrypoint, args)
        self._gangs.check_open()
        uid = uuid.uuid4().hex
        spec = TrainingSpec(
            name=f"replicas-{uid[:12]}",
            world_size=WorldSize(min=1, target=n_replicas, max=n_replicas),
            rendezvous=RendezvousSpec(uri=args.get("rendezvous_uri")),
            resources=read_gpu(gpu),
            deadline_s=timeout,
            stop_grace_s=self.stop_grace_s,
            **self.what_runs(entry, uid),
        )
        training = Training(namespace=self.namespace, uid=uid, spec=spec, created_at=time.time())
        self._known[uid] = self._gangs.launch(training)
        return [ReplicaHandle(rank, uid, self.backend_name) for rank in range(n_replicas)]

    def poll(self, handle: ReplicaHandle) -> ReplicaState:
        """How the replica is. Raises what keeps the backend from telling."""
        gang = self._gang(handle)
        if gang.fault is not None and not gang.is_over:
            raise gang.fault
        return state_of(gang.training, handle.rank)

    def stream_logs(self, handle: ReplicaHandle, n_lines: int = 200) -> str:
        """The last `n_lines` lines it has printed; a placeholder while there are none."""
        check_int("n_lines", n_lines, 1, 10_000_000)
        lines = self._log(handle, n_lines)
        shown = [text for text in map(visible, lines) if text is not None]
        if len(shown) < len(lines) == n_lines:  # the rest was a result: look above it
            shown = [t for t in map(visible, self._log(handle, None)) if t is not None][-n_lines:]
        return "\n".join(shown) if shown else NOTHING_YET

    def cancel(self, handle: ReplicaHandle) -> None:
        """The whole gang of this replica is stopped. Over or being stopped already is success.

        Raises when the backend did not take it: what may still run is not called cancelled.
        """
        self._gangs.call(self._gangs.cancel(self._gang(handle)))

    def collect(
        self, handles: Sequence[ReplicaHandle], timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """How each replica ended, in the order of `handles`, once all have.

        After `timeout` seconds those that have not ended are told as they are, with an `error`
        saying so; collecting again goes on waiting.
        """
        if timeout is not None:
            check_timeout(timeout)
        gangs = [self._gang(handle) for handle in handles]
        deadline = None if timeout is None else time.monotonic() + min(timeout, 1e12)
        pairs = list(zip(gangs, handles, strict=True))

        def is_done() -> bool:
            return all(state_of(gang.training, handle.rank) in FINAL for gang, handle in pairs)

        self._gangs.call(self._gangs.wait(list(dict.fromkeys(gangs)), is_done, deadline))
        return [self._report(gang, handle, timeout) for gang, handle in pairs]

    def close(self) -> None:
        """Nothing that was launched is left, running or on disk."""
        if "_gangs" in self.__dict__ and self._is_own():
            self._gangs.close()
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
    def _gangs(self) -> Gangs:
        self._pid  # noqa: B018  whose they are
        atexit.register(self.close)
        return Gangs(self.make_executor)

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
            lines = self._gangs.executor.logs(gang.training, ranks=[handle.rank], tail=tail)
            return [line.text async for line in lines]

        return self._gangs.call(read())

    def _report(self, gang: Gang, handle: ReplicaHandle, timeout: float | None) -> dict[str, Any]:
        found = rank_of(gang.training, handle.rank)
        state = state_of(gang.training, handle.rank)
        ended = found.exit
        result, trouble = self._result(gang, handle) if state in FINAL else (None, "")
        error = error_of(gang.training, found, state)
        if state not in FINAL:
            error = f"{state} after {timeout:g} s of waiting"
            error += f": {found.message}" if found.message else ""
        return {
            "rank": handle.rank,
            "status": state,
            "exit_code": ended.code if ended else None,
            "error": error or trouble or None,
            "result": result,
            "signal": ended.signal if ended else None,
            "reason": ended.reason if ended else None,
            "host": found.node,
            "started_at": found.started_at,
            "ended_at": ended.at if ended else None,
        }

    def _result(self, gang: Gang, handle: ReplicaHandle) -> tuple[Any, str]:
        """What the replica gave, and what is wrong with it."""
        if handle.rank not in gang.results:
            payload = self._result_payload(handle)
            try:
                found = (None if payload is None else pickle.loads(payload), "")
            except Exception as error:  # a class that only the replica has, for example
                found = (None, f"the result cannot be read here: {error!r}")
            gang.results[handle.rank] = found
        outcome: tuple[Any, str] = gang.results[handle.rank]
        return outcome

    def _result_payload(self, handle: ReplicaHandle) -> bytes | None:
        tail = self._log(handle, RESULT_TAIL)
        count = lines_expected(tail)
        if count == 0:
            return None if len(tail) < RESULT_TAIL else result_of(self._log(handle, None))
        return result_of(tail) or result_of(self._log(handle, count + RESULT_TAIL))


class LocalProcessExecutor(ReplicaSurface):
    """Replicas as processes of this machine. They end when the script that launched them does."""

    backend_name = "local"
    supports_inter_replica_network = True

    def make_executor(self) -> Executor:
        return LocalExecutor(self._root / "gangs")

    @cached_property
    def _root(self) -> Path:
        """Guarded from its first instant."""
        clear_abandoned()
        root = new_root()
        self._guard = start_guard(root)
        return root

    def what_runs(self, entry: Entry, uid: str) -> dict[str, Any]:
        source = str(Path(atoll.__file__).parents[1])
        env = {}
        match entry:
            case Call(payload):
                place = self._root / f"{uid}.pkl"
                place.write_bytes(payload)
                command = [sys.executable, "-c", _ENTRY, source, str(place)]
            case Module(name, argv, variable):
                command, env = [sys.executable, "-m", name, *argv], {ARGS_VARIABLE: variable}
            case Script(path, argv, variable):
                command, env = [sys.executable, str(path), *argv], {ARGS_VARIABLE: variable}
        return {"command": command, "env": env, "working_dir": os.getcwd()}

    def close(self) -> None:
        super().close()
        if "_guard" in self.__dict__ and self._guard.returncode is None and self._is_own():
            shutil.rmtree(self._root, ignore_errors=True)
            self._guard.kill()
            self._guard.wait()
