"""Launches from scripts on backends whose ranks keep their own records.

A launch is found by its name alone, which holds its uid. Its spec is stored with the records, so
any process with the same options can follow it. What has ended stays until somebody removes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from atoll.backends.recorded import RecordedBackend
from atoll.backends.records import desired_of
from atoll.core.checks import check_as, check_strings
from atoll.core.errors import Permanent, Temporary, ValidationError
from atoll.core.model import decode, encode
from atoll.core.ports import Executor
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import DesiredState, Training
from atoll.replicas.entrypoints import Entry, InImage, Module, read_in_image
from atoll.replicas.kubernetes import RESTARTS
from atoll.replicas.plane import ScriptPlane, SharedBackend, StopCause
from atoll.replicas.protocol import Entrypoint
from atoll.replicas.surface import ReplicaSurface

TRAINING, CAUSE = "training", "cause"
PREFIX = "replicas-"


class RecordedReplicas(ReplicaSurface):
    """The surface of their library classes, which name the backend and its options.

    `_address` has the options that a process must share to follow a launch, by their names in the
    metadata of handles; `_argument_of` has the names of the arguments that differ from those.
    """

    _address: Mapping[str, str]
    _argument_of: Mapping[str, str] = {}
    _options: Any

    def _take(
        self, *, command: Sequence[str] | None, max_restarts: int, allow_pickle: bool, code: bool
    ) -> None:
        """The arguments that all of them have. Raises ValidationError."""
        check_as("max_restarts", max_restarts, RESTARTS)
        for field, value in (("allow_pickle", allow_pickle), ("code", code)):
            if not isinstance(value, bool):
                raise ValidationError(field, value, "expected True or False")
        if command is not None:
            check_strings("command", command)
        self.command = None if command is None else list(command)
        self._takes_only_variables = command is not None
        self.max_restarts = max_restarts
        self._allow_pickle = allow_pickle
        self._sends_code = code and command is None

    def _check_launch(self, spec: TrainingSpec) -> None:
        self._options.check(spec)

    def _python(self) -> str:
        """What replicas call it."""
        return str(self._options.python)

    def _read_entry(self, entrypoint: Entrypoint, args: Mapping[str, Any]) -> Entry:
        if self.command is not None:
            return read_in_image(entrypoint)
        return super()._read_entry(entrypoint, args)

    def _entry_fields(self, entry: Entry, uid: str) -> dict[str, Any]:
        match entry:
            case InImage():
                runs: dict[str, Any] = {"command": self.command}
            case Module(name, argv):
                runs = {"command": [self._python(), "-m", name, *argv]}
            case _:
                runs = super()._entry_fields(entry, uid)
        return runs | {"max_restarts": self.max_restarts}

    def _launch_name(self, uid: str) -> str:
        return f"{PREFIX}{uid}"

    def _metadata(self, training: Training, executor: Executor) -> dict[str, Any]:
        return {**super()._metadata(training, executor), **self._address}

    def _plane_for(self, metadata: Mapping[str, Any]) -> ScriptPlane:
        for field, own in self._address.items():
            value = metadata.get(field, own)
            if value != own:
                argument = self._argument_of.get(field, field)
                expected = f"expected {own!r}: an executor with {argument}={value!r} has it"
                raise ValidationError(f"handle.metadata.{field}", value, expected)
        return super()._plane_for(metadata)


class RecordedLaunches(SharedBackend, RecordedBackend):
    """To be placed before the class of a backend: its gangs can be followed by many."""

    async def apply(self, training: Training, desired: DesiredState) -> None:
        record_store = self.record_store_of(training)
        if desired.size == 0 and training.status.failing:
            cause = encode([training.status.failing, training.status.failing_message])
            await self._keep(training, CAUSE, cause)
        if desired.size and await self._ask(record_store.get, TRAINING) is None:
            await self.prepare(training)
            await self._keep(training, TRAINING, encode(as_record(training)))
        await super().apply(training, desired)

    async def find(self, job_name: str, uid: str | None) -> Training | None:
        own = job_name.removeprefix(PREFIX)
        if not own.isalnum() or uid not in (None, own):
            return None
        record_store = self.record_store_of(_unknown(own))
        data = await self._ask(record_store.get, TRAINING)
        if data is None:
            return None
        try:
            training = decode(data, Training)
        except ValidationError as error:
            raise Permanent(f"the launch {job_name} cannot be followed: {error}") from error
        desired = desired_of((await self._refreshed(training)).facts)
        if desired is None:
            return None
        cause = await self.stop_cause(training)
        is_cancelled = desired.size == 0 and not cause.reason
        status = replace(
            training.status,
            desired=desired,
            discarded_attempts=dict(desired.discarded_attempts),
            failing=cause.reason,
            failing_message=cause.message,
        )
        spec = replace(training.spec, cancel=is_cancelled, executor=self.name)
        return replace(training, spec=spec, status=status)

    async def stop_cause(self, training: Training) -> StopCause:
        data = await self._ask(self.record_store_of(training).get, CAUSE)
        return StopCause() if data is None else StopCause(*decode(data, tuple[str, str]))

    async def release(self, training: Training) -> None:
        """Nothing of it is left with the backend. The records stay to be read."""
        jobs = await self.list_jobs(training)
        active = [key for key, job in jobs.items() if job.is_active]
        if active:
            await self.stop_jobs(training, active)
            raise Temporary("the last ranks are about to end", retry_after_s=0.3)

    async def purge(self, training: Training) -> None:
        await super().release(training)
        await self._ask(self.record_store_of(training).delete, [TRAINING, CAUSE])
        await self.clear(training, with_logs=True)

    async def _keep(self, training: Training, name: str, data: bytes) -> None:
        await self._ask(self.record_store_of(training).put, name, data)

    async def _ask(self, question: Any, *message: Any) -> Any:
        try:
            return await asyncio.to_thread(question, *message)
        except OSError as error:
            raise Temporary(f"the records cannot be reached: {error.strerror}") from error


def as_record(training: Training) -> Training:
    """What of the launch another process needs; what runs is with the records already."""
    spec = training.spec
    if spec.source is not None:
        spec = replace(spec, source=spec.source.by_digest())
    if spec.code is not None:
        spec = replace(spec, code=spec.code.by_digest())
    return replace(training, spec=spec)


def _unknown(uid: str) -> Training:
    """Enough of a training to find its place."""
    world = WorldSize(min=1, target=1, max=1)
    spec = TrainingSpec(name="unknown", world_size=world, command=["true"])
    return Training(namespace="", uid=uid, spec=spec)
