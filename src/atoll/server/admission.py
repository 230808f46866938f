"""What every door asks before a training is stored: who will run it, and will they?"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from atoll.core.errors import Temporary, ValidationError
from atoll.core.ports import Checking, Executor
from atoll.core.spec import TrainingSpec
from atoll.core.status import Training

Executors = Mapping[str, Executor]


def default_executor(executors: Executors) -> str | None:
    """Where a training runs that does not say: `local` if that is here, else the first."""
    return "local" if "local" in executors else next(iter(executors), None)


def admitted(spec: TrainingSpec, executors: Executors) -> TrainingSpec:
    """As it is stored, its executor named. Raises ValidationError if none here will run it."""
    name = default_executor(executors) if spec.executor is None else spec.executor
    if name is None or name not in executors:
        known = ", ".join(sorted(executors)) or "none"
        raise ValidationError("executor", name, f"this server has: {known}")
    executor = executors[name]
    named = replace(spec, executor=name)
    if isinstance(executor, Checking):
        executor.check(named)
    return named


def executor_of(training: Training, executors: Executors) -> Executor:
    """The one that has its ranks, and their logs."""
    found = executors.get(training.executor)
    if found is None:
        raise Temporary(f"the executor {training.executor!r} is not set up on this server")
    return found
