"""Errors as RFC 9457 problem details, and problem details as the same errors again.

`type` is the class of the error, so a client raises what the server raised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from msgspec.structs import fields

from atoll.core import errors
from atoll.core.checks import Bounds, field_bounds
from atoll.core.errors import ValidationError
from atoll.core.model import Model, SpecModel
from atoll.core.spec import (
    BenchSpec,
    ProviderFilter,
    RendezvousSpec,
    Resources,
    Source,
    TrainingSpec,
    WorldSize,
)

# The names of a field: in Python, on the wire, as an option of the command line.
#
# Errors are raised with the name in `deploy_distributed` (`gpu_count`); on the wire the field is
# `resources.gpuCount`. An error that crosses that border is renamed, also the fields in its text.

_SECTIONS: Mapping[str, type[SpecModel]] = {
    "world_size": WorldSize,
    "source": Source,
    "resources": Resources,
    "provider_filter": ProviderFilter,
    "bench": BenchSpec,
    "rendezvous": RendezvousSpec,
}
_SHORT = {"bench_mode": "bench"}
_NAME = re.compile(r"\w+(?:\.\w+)*")


def _names() -> Iterator[tuple[str, str]]:
    for field in fields(TrainingSpec):
        yield field.name, field.encode_name
    for section, kind in _SECTIONS.items():
        wire = TrainingSpec.__struct_encode_fields__[TrainingSpec.__struct_fields__.index(section)]
        for part in fields(kind):
            name = f"{kind.option_prefix}{part.name}"
            yield _SHORT.get(name, name), f"{wire}.{part.encode_name}"


def option_bounds() -> dict[str, Bounds]:
    """The bounds of every number in a spec, by its name in Python."""
    kinds: list[type[SpecModel]] = [TrainingSpec, *_SECTIONS.values()]
    return {
        f"{kind.option_prefix}{name}": bounds
        for kind in kinds
        for name, bounds in field_bounds(kind).items()
    }


ON_WIRE: Mapping[str, str] = dict(_names())
IN_PYTHON: Mapping[str, str] = {wire: python for python, wire in ON_WIRE.items()}


def rename_fields(error: ValidationError, names: Mapping[str, str]) -> ValidationError:
    """The same error with the fields under these names. A field not among them keeps its name."""

    def rename_match(match: re.Match[str]) -> str:
        # A plain word such as "command" may be an ordinary word of the sentence.
        name = match[0]
        is_plain = name.isalpha() and name.islower()
        return name if is_plain else names.get(name, name)

    expected = _NAME.sub(rename_match, error.expected)
    return ValidationError(_rename_field(error.field, names), error.value, expected)


def _rename_field(field: str, names: Mapping[str, str]) -> str:
    """The new name of a field, or of a part of one: `nccl_env.A`, `gpu_models[0]`."""
    for end in [len(field), *(at for at in range(len(field))[::-1] if field[at] in ".[")]:
        known, suffix = field[:end], field[end:]
        if known in names:
            name = names[known]
            # `bench.surprise` is in the section `bench`, not in the option of that name.
            is_section = suffix.startswith(".") and name.startswith(f"{known}.")
            return field if is_section else name + suffix
    return field


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
