"""Errors as RFC 9457 problem details, and problem details as the same errors again.

`type` is the class of the error, so a client raises what the server raised.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.core import errors
from atoll.core.fields import IN_PYTHON, ON_WIRE, rename_fields
from atoll.core.model import Model

PREFIX = "urn:atoll:"


class Problem(Model, frozen=True):
    """Members after `detail` are the attributes of the error, where it has them."""

    title: str
    status: int
    detail: str
    type: str = "about:blank"
    field: str | None = None
    value: str | None = None
    expected: str | None = None
    kind: str | None = None
    name: str | None = None
    version: int | None = None
    oldest: int | None = None
    phase: str | None = None
    requested_target: int | None = None
    requested: int | None = None
    min: int | None = None
    max: int | None = None
    retry_after_s: float | None = None


# For each error: the attributes that travel, and how it is built from them again.
_Maker = Callable[[Problem], errors.AtollError]
_TABLE: dict[type[errors.AtollError], tuple[tuple[str, ...], _Maker]] = {
    errors.ValidationError: (
        ("field", "expected"),
        lambda p: rename_fields(
            errors.ValidationError(p.field or "", PrintedValue(p.value or ""), p.expected or ""),
            IN_PYTHON,
        ),
    ),
    errors.NotFound: (("kind", "name"), lambda p: errors.NotFound(p.kind or "", p.name or "")),
    errors.Gone: (("version", "oldest"), lambda p: errors.Gone(p.version or 0, p.oldest or 0)),
    errors.UDTerminalState: (
        ("phase", "requested_target"),
        lambda p: errors.UDTerminalState(p.phase or "", p.requested_target, p.detail),
    ),
    errors.WorldSizeOutOfBounds: (
        ("requested", "min", "max"),
        lambda p: errors.WorldSizeOutOfBounds(p.requested or 0, p.min or 0, p.max or 0),
    ),
    errors.Temporary: (
        ("retry_after_s",),
        lambda p: errors.Temporary(p.detail, p.retry_after_s or 0.0),
    ),
    errors.Permanent: ((), lambda p: errors.Permanent(p.detail)),
    errors.Conflict: ((), lambda p: errors.Conflict(p.detail)),
    errors.Denied: ((), lambda p: errors.Denied(p.detail)),
}
_BY_TYPE = {f"{PREFIX}{kind.__name__}": maker for kind, (_, maker) in _TABLE.items()}


class PrintedValue(str):
    """A value of which only the repr is known; its own repr does not quote it again."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def problem_of(error: errors.AtollError, status: int) -> Problem:
    """The problem details of an error, with field names as on the wire."""
    if isinstance(error, errors.ValidationError):
        error = rename_fields(error, ON_WIRE)
    kind = next((kind for kind in type(error).__mro__ if kind in _TABLE), None)
    if kind is None:
        return Problem(title=type(error).__name__, status=status, detail=str(error))
    carried = {name: getattr(error, name) for name in _TABLE[kind][0]}
    if isinstance(error, errors.ValidationError):
        carried["value"] = errors.abbreviate(error.value)
    return Problem(
        type=f"{PREFIX}{kind.__name__}",
        title=kind.__name__,
        status=status,
        detail=str(error),
        **carried,
    )


def error_of(problem: Problem) -> errors.AtollError:
    """The error that the problem describes; for an unknown type, one by its HTTP status."""
    maker = _BY_TYPE.get(problem.type)
    if maker is not None:
        return maker(problem)
    kind = errors.Temporary if problem.status >= 500 else errors.Permanent
    return kind(f"{problem.detail or problem.title} (HTTP {problem.status})")
