"""Admission: picks the executor of a training before it is stored, and lets it refuse the spec."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

from atoll.core.errors import AtollError, Conflict, Temporary, ValidationError
from atoll.core.executors import LOCAL, ExecutorList, ExecutorStatus
from atoll.core.ports import Executor, describe_unsupported, unsupported_fields
from atoll.core.spec import TrainingSpec, check_spec_size
from atoll.core.status import Training

if TYPE_CHECKING:
    from atoll.server.http.operations import Plane

PROBE_S = 3.0  # `atoll executors` waits for it: longer feels broken


@dataclass(frozen=True)
class Setup:
    """How a control plane was started: its executors and its configuration file."""

    kinds: Mapping[str, str] = field(default_factory=dict)
    unusable: Mapping[str, str] = field(
        default_factory=dict
    )  # configured, but not usable: the reason
    default: str | None = None
    # By executor: its one namespace, where it cannot isolate the ranks of several.
    only: Mapping[str, str] = field(default_factory=dict)
    config: str | None = None  # the file
    is_changed: Callable[[], bool] = lambda: False
    notes: Callable[[], Sequence[str]] = lambda: ()  # further messages about the executors
    # Since when statuses cannot be written, and the reason; None if they can.
    stale: Callable[[], tuple[float, str] | None] = lambda: None
    new_token: str = "atoll token create"  # the command that makes a token here
    restart: str = ""  # how to restart with a new file; empty if that is not possible

    def default_of(self, executors: Mapping[str, Executor]) -> str | None:
        """The executor of a training without one: `local` if it is configured, else the first."""
        if self.default is not None:
            return self.default
        return LOCAL if LOCAL in executors else next(iter(executors), None)

    def refusal(self, name: str | None, executors: Mapping[str, Executor]) -> str:
        """Why no training can start on that executor, and what to do about it."""
        if name is not None and name in self.unusable:
            return f"{self.unusable[name]}; once that is put right, {self.restart}"
        text = f"this control plane has: {', '.join(sorted(executors)) or 'none'}"
        if not self.restart:
            return text
        origin = "without an atoll.toml" if self.config is None else f"with {self.config}"
        changed = ", which has changed since" if self.is_changed() else ""
        return f"{text}; it was started {origin}{changed}; to restart it, {self.restart}"

    def check_namespace(self, name: str | None, namespace: str) -> None:
        """Raises ValidationError if the executor cannot isolate ranks of this namespace."""
        owner = self.only.get(name or "", namespace)
        if namespace != owner:
            raise ValidationError(
                "executor",
                name,
                f"its ranks all run as one user, so those of the namespace {namespace!r} could "
                f"read and stop everything of {owner!r}: 'atoll serve --shared-namespaces' allows "
                "it where all who have a token trust each other",
            )

    def message(self) -> str:
        """A message for readers of the list of executors; may be empty."""
        changed = f"{self.config} has changed since the control plane was started: {self.restart}"
        return "\n".join([*([changed] if self.is_changed() else []), *self.notes()])


def default_executor(plane: Plane) -> str | None:
    """The executor of a training without one."""
    return plane.setup.default_of(plane.executors)


def admit(
    spec: TrainingSpec, plane: Plane, namespace: str, *, is_code_stored: bool = False
) -> TrainingSpec:
    """Returns the spec to store, with its executor. Raises ValidationError if that refuses it, and
    TooLarge. With `is_code_stored`, the code may be a digest of a training in this namespace."""
    check_spec_size(spec)
    is_digest = spec.code is not None and spec.code.is_digest
    if is_digest and not is_code_stored:  # it may be the code of another namespace
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
    """Names the fields of the spec that its executor ignores, in one line; empty if none."""
    executor = plane.executors[training.executor]
    fields = unsupported_fields(training.spec, executor.SUPPORTS, executor.options)
    return describe_unsupported(training.executor, fields)


async def check_backend(spec: TrainingSpec, plane: Plane, namespace: str) -> None:
    """Raises ValidationError if the backend will never accept the spec."""
    await plane.executors[spec.executor or ""].dry_run(spec, namespace)


async def check_run(spec: TrainingSpec, plane: Plane, namespace: str) -> None:
    """Raises Conflict if an active training uses the same run_id."""
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
    """Raises ValidationError if the executor can never hold so many ranks."""
    executor = plane.executors.get(training.executor)
    is_larger = spec.world_size.target > training.spec.world_size.target
    if is_larger and executor is not None:
        executor.check(spec)


def executor_of(training: Training, plane: Plane) -> Executor:
    """The executor of a training. Raises Temporary if this control plane does not have it."""
    executor = plane.executors.get(training.executor)
    if executor is None:
        error = plane.setup.refusal(training.executor, plane.executors)
        raise Temporary(f"the executor {training.executor!r} is not available: {error}")
    return executor


async def probe_executors(executors: Mapping[str, Executor], setup: Setup) -> ExecutorList:
    """Probes all executors at once; each has `PROBE_S` to answer."""
    default = setup.default_of(executors)
    reasons = await asyncio.gather(*(_probe_error(executor) for executor in executors.values()))
    errors = {**dict(zip(executors, reasons, strict=True)), **setup.unusable}
    items = [
        ExecutorStatus(
            name=name,
            kind=setup.kinds.get(name, name),
            is_reachable=not error,
            message=error,
            is_default=name == default,
            resources=executors[name].capacity() if name in executors else [],
        )
        for name, error in sorted(errors.items())
    ]
    return ExecutorList(items=items, config=setup.config, message=setup.message())


async def _probe_error(executor: Executor) -> str:
    """The reason why an executor cannot be reached, in one line; empty if it answers."""
    try:
        async with asyncio.timeout(PROBE_S):
            await executor.probe()
    except TimeoutError:
        return f"it did not answer within {PROBE_S:g} s"
    except (AtollError, OSError) as error:
        return " ".join(str(error).split())
    return ""
