"""Checks on single values. Each error names the field, the value and what was expected.

Bounds of numbers are written once, in the types: `Annotated[int, Meta(ge=1, le=10)]`. The checks
here, the words of decoding errors, both schemas and the command line read them from there.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from atoll.core.errors import ValidationError

# Set by atoll for every rank; a value from the user would mislead the script.
RESERVED_ENV = frozenset({"RANK", "REPLICA_RANK", "WORLD_SIZE", "NODE_NAME"})
RESERVED_ENV_PREFIXES = ("ATOLL_", "BASILICA_")
# The launcher of replicas sets these, through the spec.
ARGS_VARIABLE = "ATOLL_ENTRYPOINT_ARGS"
TOGETHER_VARIABLE = "ATOLL_STARTED_TOGETHER"
QUORUM_VARIABLE = "ATOLL_QUORUM"
RANK_ENV_VARIABLE = "ATOLL_RANK_ENV"  # the name of one more variable with the rank
RESULTS_VARIABLE = "ATOLL_RESULTS"  # "pickle": results may be pickles
LAUNCH_VARIABLES = (
    *(ARGS_VARIABLE, TOGETHER_VARIABLE, QUORUM_VARIABLE),
    *(RANK_ENV_VARIABLE, RESULTS_VARIABLE),
    "ATOLL_STACKS",  # `0`: ranks do without the hook of `agent/stacks.py`
)
ENTRYPOINT_VARIABLE = "ENTRYPOINT"  # what replicas run, as their launcher named it

NAME_PATTERN = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
RUN_ID_PATTERN = "^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$"
TEXT = "expected text in UTF-8 without NUL bytes"
_NAME = re.compile(NAME_PATTERN)
_RUN_ID = re.compile(RUN_ID_PATTERN)
ENV_PATTERN = "[A-Za-z_][A-Za-z0-9_]*"
_ENV_NAME = re.compile(ENV_PATTERN)


def check_name(field: str, value: object) -> None:
    """Names are DNS-1123 labels: they become host names, paths and URLs."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValidationError(
            field,
            value,
            "expected 1 to 63 lower-case letters, digits or '-', starting and ending with a "
            "letter or digit",
        )


def check_run_id(field: str, value: object) -> None:
    """The name of a run in an object store: a folder there."""
    if not isinstance(value, str) or not _RUN_ID.fullmatch(value):
        raise ValidationError(
            field,
            value,
            "expected 1 to 80 letters, digits, '.', '_' or '-', starting with a letter or digit",
        )


class Bounds(NamedTuple):
    """The numbers that a field may hold, both ends included."""

    low: float
    high: float
    is_integer: bool
    is_optional: bool = False

    @property
    def expected(self) -> str:
        if self.is_integer:
            return f"expected a whole number from {self.low} to {self.high}"
        return f"expected a number from {self.low:.15g} to {self.high:.15g}"

    def check(self, field: str, value: object) -> None:
        if value is None and self.is_optional:
            return
        kind = int if self.is_integer else int | float
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not self.low <= value <= self.high:  # type: ignore[operator]
            raise ValidationError(field, value, self.expected)


def check_int(field: str, value: object, low: int, high: int) -> None:
    Bounds(low, high, is_integer=True).check(field, value)


def check_number(field: str, value: object, low: float, high: float) -> None:
    Bounds(low, high, is_integer=False).check(field, value)


def bounds_of(annotation: Any) -> Bounds | None:
    """The bounds that an annotation carries; None where it has none."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = get_args(annotation)
        inner = next(filter(None, map(bounds_of, kinds)), None)
        return inner and inner._replace(is_optional=NoneType in kinds)
    if get_origin(annotation) is not Annotated:
        return None
    kind, *extras = get_args(annotation)
    for extra in extras:
        if isinstance(extra, msgspec.Meta) and extra.ge is not None and extra.le is not None:
            return Bounds(extra.ge, extra.le, is_integer=kind is int)
    return None


def check_as(field: str, value: object, annotation: Any) -> None:
    """Raises ValidationError unless the value is within the bounds of this type."""
    bounds = bounds_of(annotation)
    assert bounds is not None, f"{annotation} has no bounds"
    bounds.check(field, value)


@functools.cache
def field_bounds(kind: type[msgspec.Struct]) -> Mapping[str, Bounds]:
    """The bounds of a struct's fields, by their names in Python."""
    pairs = ((field.name, bounds_of(field.type)) for field in msgspec.structs.fields(kind))
    return {name: bounds for name, bounds in pairs if bounds is not None}


def check_bounds(struct: msgspec.Struct, prefix: str = "") -> None:
    """Checks that every number of the struct is within its bounds: decoding does that by itself,
    the constructor does not."""
    for name, bounds in field_bounds(type(struct)).items():
        bounds.check(f"{prefix}{name}", getattr(struct, name))


class Pattern(NamedTuple):
    """What a text has to match, all of it: `Annotated[str, Pattern("[a-z]+", "expected …")]`."""

    pattern: str
    expected: str


def check_fields(struct: msgspec.Struct, prefix: str = "") -> None:
    """Checks each field against its type, patterns included: the constructor does not."""
    for field in msgspec.structs.fields(type(struct)):
        _check_value(f"{prefix}{field.name}", getattr(struct, field.name), field.type)


def _check_value(field: str, value: Any, kind: Any) -> None:
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin in (Union, UnionType):
        if value is None and NoneType in inner:
            return
        others = [each for each in inner if each is not NoneType]
        is_list = isinstance(value, list)
        fit = [each for each in others if (get_origin(each) is list) == is_list]
        _check_value(field, value, (fit or others)[0])
    elif origin is Annotated:
        for extra in inner[1:]:
            if isinstance(extra, Pattern):
                if not is_text(value) or not re.fullmatch(extra.pattern, value):
                    raise ValidationError(field, value, extra.expected)
        if bounds := bounds_of(kind):
            bounds.check(field, value)
    elif origin is Literal:
        check_choice(field, value, kind)
    elif origin is list:
        if not isinstance(value, list | tuple):
            raise ValidationError(field, value, "expected a list of strings")
        for at, item in enumerate(value):
            _check_value(f"{field}[{at}]", item, inner[0])
    elif origin is dict:
        if not isinstance(value, dict):
            raise ValidationError(field, value, "expected names and values")
        for key, item in value.items():
            _check_value(field, key, inner[0])
            _check_value(f"{field}.{key}", item, inner[1])
    elif origin is str and not is_text(value):
        raise ValidationError(field, value, TEXT)
    elif origin is bool and not isinstance(value, bool):
        raise ValidationError(field, value, "expected True or False")
    elif isinstance(origin, type) and issubclass(origin, msgspec.Struct):
        if not isinstance(value, origin):
            names = ", ".join(each.name for each in msgspec.structs.fields(origin))
            raise ValidationError(
                field, value, f"expected the fields of {origin.__name__}: {names}"
            )
        check_fields(value, f"{field}.")


def check_timeout(value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value >= 0:  # type: ignore[operator]
        raise ValidationError("timeout", value, "expected seconds, 0 or more")


def check_choice(field: str, value: object, choices: Any) -> None:
    if value not in choices.__args__:
        raise ValidationError(field, value, "expected " + " or ".join(map(repr, choices.__args__)))


def is_text(value: object) -> bool:
    """Whether a program can take it as an argument: no NUL, and all of it encodes as UTF-8."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_strings(field: str, values: object) -> None:
    if not isinstance(values, list | tuple):
        raise ValidationError(field, values, "expected a list of strings")
    for at, value in enumerate(values):
        if not is_text(value):
            expected = TEXT if isinstance(value, str) else "expected text"
            raise ValidationError(f"{field}[{at}]", value, expected)


def is_env_name(value: object) -> bool:
    return isinstance(value, str) and _ENV_NAME.fullmatch(value) is not None


def check_env(field: str, env: object) -> None:
    if not isinstance(env, dict):
        raise ValidationError(field, env, "expected names and values")
    for name, value in env.items():
        if not is_env_name(name):
            raise ValidationError(field, name, "expected letters, digits and '_', no digit first")
        if not is_text(value):
            raise ValidationError(f"{field}.{name}", value, TEXT)
        if name == RANK_ENV_VARIABLE and not is_env_name(value):
            raise ValidationError(f"{field}.{name}", value, "expected the name of a variable")
        is_ours = name.startswith(RESERVED_ENV_PREFIXES) and name not in LAUNCH_VARIABLES
        if name in RESERVED_ENV or is_ours:
            raise ValidationError(f"{field}.{name}", value, "atoll sets this one for every rank")
