"""Admission: names the executor of a training before it is stored, and lets it refuse the spec."""

from __future__ import annotations

from msgspec.structs import replace

from atoll.core.errors import Conflict, Temporary, ValidationError
from atoll.core.ports import Executor
from atoll.core.spec import TrainingSpec, check_spec_size
from atoll.core.status import Training
from atoll.core.support import describe_unsupported, unsupported_fields
from atoll.server.http.operations import Plane


def default_executor(plane: Plane) -> str | None:
    """The executor of a training that names none."""
    return plane.setup.default_of(plane.executors)


def admitted(
    spec: TrainingSpec, plane: Plane, namespace: str, *, is_code_stored: bool = False
) -> TrainingSpec:
    """The spec to store, with its executor named. Raises ValidationError if none accepts it, and
    TooLarge. `is_code_stored`: its code may be a digest, as a training of this namespace has it."""
    check_spec_size(spec)
    is_digest = spec.code is not None and spec.code.is_digest
    if is_digest and not is_code_stored:  # it may be of somebody else's training
        raise ValidationError("code.content", "a digest", "expected the archive itself")
    name = default_executor(plane) if spec.executor is None else spec.executor
    executor = plane.executors.get(name or "")
    if executor is None:
        raise ValidationError("executor", name, plane.setup.refusal(name, plane.executors))
    plane.setup.check_namespace(name, namespace)
    spec = replace(spec, executor=name)
    executor.check(spec)
    return spec


def unsupported_message(training: Training, plane: Plane) -> str:
    """What of its spec has no effect with its executor, in one line; empty if that is nothing."""
    executor = plane.executors[training.executor]
    fields = unsupported_fields(training.spec, executor.SUPPORTS, executor.options)
    return describe_unsupported(training.executor, fields)


async def check_backend(spec: TrainingSpec, plane: Plane, namespace: str) -> None:
    """Raises ValidationError if the backend itself says that it will never take the spec."""
    await plane.executors[spec.executor or ""].dry_run(spec, namespace)


async def check_run(spec: TrainingSpec, plane: Plane, namespace: str) -> None:
    """Raises Conflict if the run of the spec is that of a training which has not ended."""
    if spec.run_id is None:
        return
    for other in (await plane.store.snapshot()).active:
        is_itself = (other.namespace, other.name) == (namespace, spec.name)
        if is_itself or other.status.phase.is_terminal or other.spec.run_id != spec.run_id:
            continue
        mine, theirs = (each.rendezvous.uri for each in (spec, other.spec))
        if mine == theirs and (mine is not None or other.executor == spec.executor):
            raise Conflict(
                f"run_id {spec.run_id!r} is in use by the training {other.name!r}, which is "
                f"{other.status.phase}: wait for its end, cancel it, or choose another run_id"
            )


def check_growth(training: Training, spec: TrainingSpec, plane: Plane) -> None:
    """Lets the executor refuse more ranks than it can ever hold. Raises ValidationError."""
    executor = plane.executors.get(training.executor)
    is_larger = spec.world_size.target > training.spec.world_size.target
    if is_larger and executor is not None:
        executor.check(spec)


def executor_of(training: Training, plane: Plane) -> Executor:
    """The executor that has the ranks and logs of a training. Raises Temporary without it."""
    executor = plane.executors.get(training.executor)
    if executor is None:
        why = plane.setup.refusal(training.executor, plane.executors)
        raise Temporary(f"the executor {training.executor!r} is not available: {why}")
    return executor
