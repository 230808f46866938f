"""What every door asks before a training is stored: who will run it, and will they?"""

from __future__ import annotations

from msgspec.structs import replace

from atoll.core.errors import Temporary, ValidationError
from atoll.core.ports import Checking, Executor
from atoll.core.spec import TrainingSpec
from atoll.core.status import Training
from atoll.server.operations import Plane


def default_executor(plane: Plane) -> str | None:
    """Where a training runs that does not say."""
    return plane.setup.default_of(plane.executors)


def admitted(spec: TrainingSpec, plane: Plane) -> TrainingSpec:
    """As it is stored, its executor named. Raises ValidationError if none here will run it."""
    name = default_executor(plane) if spec.executor is None else spec.executor
    executor = plane.executors.get(name or "")
    if executor is None:
        raise ValidationError("executor", name, plane.setup.refusal(name, plane.executors))
    named = replace(spec, executor=name)
    if isinstance(executor, Checking):
        executor.check(named)
    return named


def executor_of(training: Training, plane: Plane) -> Executor:
    """The one that has its ranks, and their logs."""
    executor = plane.executors.get(training.executor)
    if executor is None:
        why = plane.setup.refusal(training.executor, plane.executors)
        raise Temporary(f"its executor {training.executor!r} is not here: {why}")
    return executor
