"""Admission: names the executor of a training before it is stored, and lets it refuse the spec."""

from __future__ import annotations

from msgspec.structs import replace

from atoll.core.errors import Temporary, ValidationError
from atoll.core.ports import Checking, Executor
from atoll.core.spec import TrainingSpec, check_spec_size
from atoll.core.status import Training
from atoll.server.operations import Plane


def default_executor(plane: Plane) -> str | None:
    """The executor of a training that names none."""
    return plane.setup.default_of(plane.executors)


def admitted(spec: TrainingSpec, plane: Plane, namespace: str) -> TrainingSpec:
    """The spec to store, with its executor named. Raises ValidationError if none accepts it, and
    TooLarge."""
    check_spec_size(spec)
    name = default_executor(plane) if spec.executor is None else spec.executor
    executor = plane.executors.get(name or "")
    if executor is None:
        raise ValidationError("executor", name, plane.setup.refusal(name, plane.executors))
    plane.setup.check_namespace(name, namespace)
    spec = replace(spec, executor=name)
    if isinstance(executor, Checking):
        executor.check(spec)
    return spec


def check_growth(training: Training, spec: TrainingSpec, plane: Plane) -> None:
    """Lets the executor refuse more ranks than it can ever hold. Raises ValidationError."""
    executor = plane.executors.get(training.executor)
    is_larger = spec.world_size.target > training.spec.world_size.target
    if is_larger and isinstance(executor, Checking):
        executor.check(spec)


def executor_of(training: Training, plane: Plane) -> Executor:
    """The executor that has the ranks and logs of a training. Raises Temporary without it."""
    executor = plane.executors.get(training.executor)
    if executor is None:
        why = plane.setup.refusal(training.executor, plane.executors)
        raise Temporary(f"the executor {training.executor!r} is not available: {why}")
    return executor
