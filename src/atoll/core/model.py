"""The base of everything that travels or is stored: frozen, camelCase, defaults elided.

Specs refuse unknown fields, so a typing mistake is an error; statuses accept them, so an old
client can read a new server. Unset is `None`; `[]` means none of them.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from atoll.core.errors import ValidationError

T = TypeVar("T")


class Model(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """What was seen: unknown fields are accepted."""


class SpecModel(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename="camel",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """What was asked for: unknown fields are refused."""


UNKNOWN_FIELD = "there is no such field"
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def decode(data: bytes | str, kind: type[T]) -> T:
    """`data` as a `kind`; raises ValidationError naming the field that is wrong."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise named(error, _plain(data)) from error
    except RecursionError as error:
        raise ValidationError(
            "body", data[:40], "expected JSON that is not nested so deep"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValidationError("body", data[:40], f"expected JSON ({error})") from error


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _plain(data: bytes | str) -> Any:
    """What was sent, to show a part of it; nothing where the rest of it is broken too."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def named(error: msgspec.ValidationError, given: Any = None) -> ValidationError:
    """The same refusal with its field, and the value that `given` has there."""
    if isinstance(error.__cause__, ValidationError):
        return error.__cause__
    found = _WHERE.match(str(error))
    what = found["what"] if found else str(error)
    path = (found["path"] or "$") if found else "$"
    prefix = path.removeprefix("$").removeprefix(".")
    if unknown := _UNKNOWN.search(what):
        field = f"{prefix}.{unknown['name']}".strip(".")
        return ValidationError(field, unknown["name"], UNKNOWN_FIELD)
    if missing := _MISSING.search(what):
        field = f"{prefix}.{missing['name']}".strip(".")
        return ValidationError(field, None, "this field is required")
    return ValidationError(prefix or "body", _at(prefix, given), what[0].lower() + what[1:])


def _at(path: str, given: Any) -> Any:
    """The value at `a.b[1]`. Of `a[...]`, some value in `a`, it is all of `a`."""
    for name, number in _STEP.findall(path):
        try:
            given = given[int(number)] if number else given[name]
        except (LookupError, TypeError):
            return None
    return given
