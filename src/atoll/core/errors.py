"""Every error atoll raises. Callers branch on type and attributes, never on text.

AtollError
├── ValidationError(field, value, expected)      also a ValueError
│   └── TooLarge
├── NotFound(kind, name)
├── Conflict
├── Gone(oldest)                                 the log of changes begins after that version
├── Denied                                       no token, or one that may not do this
├── RankError                                    an exception of a rank, of a type unknown here
├── ResultError                                  a result that cannot be had; also a ValueError
├── DistributedError
│   ├── BelowMinimumWorld(ready, required_min, timeout, rank_exits)
│   ├── UDTerminalState(phase, requested_target)
│   └── WorldSizeOutOfBounds(requested, min, max)
└── BackendError
    ├── Temporary(retry_after_s)                 try again later
    └── Permanent                                trying again will not help
        ├── ObjectTooLarge                       it takes smaller objects only
        ├── StoreDenied                          an object store refused the key; also Denied
        └── StatusRefused                        the store refuses the status
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atoll.core.status import RankExit


class AtollError(Exception):
    """Base class of all errors that atoll raises on purpose."""

    hint: str | None = None  # what to do about it, if whoever raised it knows

    def _render_traceback_(self) -> list[str]:
        """What notebooks show: not the frames of atoll and of the libraries below it."""
        from atoll.core.html import short_traceback

        return short_traceback(self)


class ValidationError(AtollError, ValueError):
    """A value was refused before anything happened."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"{field}: {abbreviate(value)} is not valid: {expected}")
        self.field = field
        self.value = value
        self.expected = expected

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.expected)


class TooLarge(ValidationError):
    """A value was refused for its size."""


class NotFound(AtollError):
    """Nothing of this kind and name exists in this namespace."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__(f"{kind} {name!r} not found")
        self.kind = kind
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.kind, self.name)


class Conflict(AtollError):
    """Somebody else changed it first, the name is in use, or its state does not allow it."""


class Gone(AtollError):
    """The server no longer has the changes since this version."""

    def __init__(self, version: int, oldest: int) -> None:
        super().__init__(
            f"version {version} is no longer kept (oldest: {oldest}): read again, then watch"
        )
        self.version = version
        self.oldest = oldest

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.version, self.oldest)


class Denied(AtollError):
    """The token is missing or unknown, or it does not allow this."""


class RankError(AtollError):
    """An exception that a rank raised, of a type that this process does not have."""


class ResultError(AtollError, ValueError):
    """The result of a rank is not available: too large, not plain data, or never set."""


class DistributedError(AtollError):
    """Base class of errors about the world of a training."""


class BelowMinimumWorld(DistributedError):
    """The world did not reach the size that the caller waited for, or the training failed."""

    def __init__(
        self,
        message: str = "",
        *,
        ready: int = 0,
        required_min: int = 0,
        timeout: float | None = None,
        rank_exits: Sequence[RankExit] = (),
    ) -> None:
        waited = "" if timeout is None else f" after {timeout:g} s"
        super().__init__(message or f"{ready} of {required_min} ranks ready{waited}")
        self.ready = ready
        self.required_min = required_min
        self.timeout = timeout
        self.rank_exits = list(rank_exits)


class UDTerminalState(DistributedError):
    """The training has ended, so this is not possible."""

    def __init__(self, phase: str, requested_target: int | None = None, message: str = "") -> None:
        refusal = "" if requested_target is None else f": it cannot scale to {requested_target}"
        state = "was cancelled" if phase == "cancelled" else f"has {phase}"
        super().__init__(message or f"the training {state}{refusal}")
        self.phase = phase
        self.requested_target = requested_target

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.phase, self.requested_target, str(self))


class WorldSizeOutOfBounds(DistributedError):
    """A target outside `[min, max]`."""

    def __init__(self, requested: int, min: int, max: int) -> None:
        super().__init__(f"target {requested!r} is outside [{min}, {max}]")
        self.requested = requested
        self.min = min
        self.max = max

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.requested, self.min, self.max)


class BackendError(AtollError):
    """The backend of an executor, or the store of trainings, refused or failed."""


class Temporary(BackendError):
    """The same request may succeed later."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Permanent(BackendError):
    """The same request will never succeed."""


class ObjectTooLarge(Permanent):
    """An object is larger than the backend, or its reader, takes."""


class StoreDenied(Permanent, Denied):
    """An object store refused the key, or there is none."""


class StatusRefused(Permanent):
    """The store refuses the status: it is too large, say. Its plan may still be performed."""


MAX_REPR_CHARS = 80  # a line of a terminal


def abbreviate(value: object) -> str:
    """The beginning of its repr. Costs the same however large the value is."""
    text = repr(_head(value))
    return text if len(text) <= MAX_REPR_CHARS else text[: MAX_REPR_CHARS - 3] + "..."


def _head(value: object) -> object:
    if isinstance(value, str | bytes):
        return value if len(value) <= MAX_REPR_CHARS else value[: MAX_REPR_CHARS + 1]
    if isinstance(value, list | tuple) and len(value) > MAX_REPR_CHARS:
        return [_head(item) for item in value[:MAX_REPR_CHARS]]
    if isinstance(value, list):
        return [_head(item) for item in value]
    if isinstance(value, dict):
        return {key: _head(value[key]) for key in list(value)[:MAX_REPR_CHARS]}
    return value


# Names whose packages may be missing: they always import, and say what to install when used.


def to_install(extra: str) -> str:
    """What to type for the packages of an extra."""
    return f"pip install '.[{extra}]' in a clone of atoll"


def missing_package(name: str, error: ModuleNotFoundError, extra: str) -> RuntimeError:
    """What is raised where `name` is used without its packages."""
    message = f"{name} needs {error.name}: {to_install(extra)}"
    raised = RuntimeError(message)
    raised.__cause__ = error
    return raised


def class_without_package(name: str, error: ModuleNotFoundError, extra: str) -> type:
    """Stands in for the class `name`, whose module cannot be imported.

    Raises the error itself if it is a module of atoll that is missing.
    """
    if (error.name or "").partition(".")[0] == "atoll":
        raise error

    def refuse(*_: Any, **__: Any) -> None:
        raise missing_package(name, error, extra)

    return type(name, (), {"__init__": refuse, "__doc__": f"Needs atoll[{extra}]."})
