"""The kinds of executor and their classes, each imported when it is first used."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from atoll.core.checks import check_bounds
from atoll.core.errors import Permanent, ValidationError, to_install
from atoll.core.model import Model, SpecModel
from atoll.core.phase import ConditionType
from atoll.core.text import check_memory, check_quantity, format_bytes, parse_quantity

if TYPE_CHECKING:
    from atoll.core.ports import Executor
    from atoll.core.status import Training

LOCAL = "local"
MAX_SLOTS = 10_000  # ranks at once that were tried on one machine

KINDS = {
    LOCAL: "atoll.backends.local.executor:LocalBackend",
    "kubernetes": "atoll.backends.kubernetes.executor:KubernetesBackend",
    "slurm": "atoll.backends.slurm.executor:SlurmBackend",
    "modal": "atoll.backends.modal.executor:ModalBackend",
    "sagemaker": "atoll.backends.sagemaker.executor:SageMakerBackend",
    "hfjobs": "atoll.backends.hfjobs.executor:HFJobsBackend",
}
# Kinds that need packages which a plain install does not bring.
EXTRAS = {
    "kubernetes": "kubernetes",
    "modal": "modal",
    "sagemaker": "sagemaker",
    "hfjobs": "hfjobs",
}


class PlaneContext(NamedTuple):
    """The control plane that an executor works for."""

    state_dir: Path
    plane: str  # its id, with which everything it starts elsewhere is marked
    directory: Path = Path()  # that relative paths in the options start from


class ResourceUse(Model, frozen=True, omit_defaults=False):
    """What ranks were admitted with, of what an executor counts: slots, cpu, memory in bytes, gpus.

    It is counted and not fenced: a rank may use more, or less.
    """

    name: str
    used: float
    total: float

    @property
    def free(self) -> float:
        return max(0.0, self.total - self.used)

    def text(self, amount: float) -> str:
        return format_bytes(amount) if self.name == "memory" else f"{amount:g}"


class Limits(SpecModel, frozen=True):
    """What ranks of this machine may ask for in all. A field that is not set stays as it is."""

    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] | None = None
    cpu: str | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        check_bounds(self)
        check_quantity("cpu", self.cpu)
        check_memory("memory", self.memory)
        for field in ("cpu", "memory"):
            text = getattr(self, field)
            if text is not None and parse_quantity(text) == 0:
                raise ValidationError(field, text, "expected more than 0: else nothing can start")


class ExecutorStatus(Model, frozen=True):
    """One executor of a control plane. `message` says why it cannot be reached."""

    name: str
    kind: str
    is_reachable: bool
    message: str = ""
    is_default: bool = False
    resources: list[ResourceUse] = []


class ExecutorList(Model, frozen=True):
    """`config` is the file that the control plane was started with; `message` a remark on it."""

    items: list[ExecutorStatus]
    config: str | None = None
    message: str = ""


def executor_problem(training: Training) -> str:
    """The condition that its executor is missing or unreachable; empty while it is available."""
    problems = (ConditionType.EXECUTOR_MISSING, ConditionType.EXECUTOR_UNREACHABLE)
    return next((c.type for c in training.status.conditions if c.type in problems), "")


def check_kind(field: str, kind: object) -> None:
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValidationError(field, kind, "expected one of " + ", ".join(KINDS))


def load(kind: str) -> type[Executor]:
    """The class of a kind. Raises Permanent, with what to type, if its packages are missing."""
    check_kind("kind", kind)
    module, _, name = KINDS[kind].partition(":")
    try:
        executor_class: type[Executor] = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(kind)
        if extra is None or (error.name or "").partition(".")[0] == "atoll":
            raise
        message = f"the kind {kind!r} needs the package {error.name!r}: {to_install(extra)}"
        raise Permanent(message) from error
    return executor_class
