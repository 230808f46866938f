"""The base of everything that travels or is stored: frozen, camelCase, defaults elided.

Specs refuse unknown fields, so a typing mistake is an error; statuses accept them, so an old
client can read a new server. Unset is `None`; `[]` means none of them.
"""

from __future__ import annotations

import functools
import re
from _thread import allocate_lock
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from atoll.core.checks import bounds_of
from atoll.core.errors import ValidationError

T = TypeVar("T")
# msgspec 0.22 shows what it knows of a Struct to other threads before it has filled that in: two
# threads that decode, convert to, or create a decoder of related types for the first time crash the
# process (SIGSEGV). Structs share the types of their fields, so one lock serves all. A decoder that
# exists may be used by several threads.
_MAKING = allocate_lock()


class Model(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The base of statuses: unknown fields are accepted."""


class SpecModel(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename="camel",
    omit_defaults=True,
    forbid_unknown_fields=True,
):
    """The base of specs: unknown fields are refused.

    `option_prefix` is what options of `deploy_distributed` have before the names of these fields.
    """

    option_prefix: ClassVar[str] = ""


UNKNOWN_FIELD = "there is no such field"
_WHERE = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_BEYOND = re.compile(r"Expected `(int|float)` [<>]=")
_NO_CHOICE = "Invalid enum value"
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def decode(data: bytes | str, kind: type[T]) -> T:
    """`data` as a `kind`; raises ValidationError naming the field that is wrong."""
    try:
        return json_decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise decode_error(error, kind, _plain(data)) from error
    except RecursionError as error:
        raise ValidationError(
            "body", data[:40], "expected JSON that is not nested so deep"
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValidationError("body", data[:40], f"expected JSON ({error})") from error


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value)


def _plain(data: bytes | str) -> Any:
    """The JSON as plain values, so that an error can show a part; None if it is no JSON."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def decode_error(
    error: msgspec.ValidationError, kind: Any, document: Any = None
) -> ValidationError:
    """The refusal to decode `document` as a `kind`, with the field at fault and its value."""
    if isinstance(error.__cause__, ValidationError):
        return error.__cause__
    match = _WHERE.match(str(error))
    what = match["what"] if match else str(error)
    path = (match["path"] or "$") if match else "$"
    prefix = path.removeprefix("$").removeprefix(".")
    if unknown := _UNKNOWN.search(what):
        field = f"{prefix}.{unknown['name']}".strip(".")
        return ValidationError(field, unknown["name"], UNKNOWN_FIELD)
    if missing := _MISSING.search(what):
        field = f"{prefix}.{missing['name']}".strip(".")
        return ValidationError(field, None, "this field is required")
    if (known := _field_at(prefix, kind)) is not None:
        field, its_kind = known
        if _BEYOND.match(what) and (bounds := bounds_of(its_kind)) is not None:
            return ValidationError(field, _at(prefix, document), bounds.expected)
        if what.startswith(_NO_CHOICE) and (choices := _choices(its_kind)):
            expected = f"expected one of {', '.join(map(repr, choices))}"
            return ValidationError(prefix, _at(prefix, document), expected)
    return ValidationError(prefix or "body", _at(prefix, document), what[0].lower() + what[1:])


def _choices(kind: Any) -> tuple[Any, ...]:
    """What `Literal[…]`, or `Literal[…] | None`, may be."""
    kind = _struct_or_list(kind)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _field_at(path: str, kind: Any) -> tuple[str, Any] | None:
    """The name in Python of the field at `path` in a `kind`, and its type."""
    name = ""
    for key, number in _STEP.findall(path):
        kind = _struct_or_list(kind)
        if number:
            kind, name = next(iter(get_args(kind)), None), f"{name}[{number}]"
            continue
        fields = msgspec.structs.fields(kind) if hasattr(kind, "__struct_fields__") else ()
        field = next((field for field in fields if field.encode_name == key), None)
        if field is None:
            return None
        name, kind = getattr(kind, "option_prefix", "") + field.name, field.type
    return name, kind


def _struct_or_list(kind: Any) -> Any:
    """The type inside `Annotated[A, …] | None`: `A`."""
    if get_origin(kind) in (Union, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _at(path: str, value: Any) -> Any:
    """The part of `value` at a path such as `a.b[1]`. At `a[...]`, some item of `a`, it is `a`."""
    for name, number in _STEP.findall(path):
        try:
            value = value[int(number)] if number else value[name]
        except (LookupError, TypeError):
            return None
    return value


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The JSON decoder of a type. Modules create theirs when they load."""
    decoder: msgspec.json.Decoder[T] = _decoder_of(msgspec.json.Decoder, kind)
    return decoder


def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """The msgpack decoder of a type."""
    decoder: msgspec.msgpack.Decoder[T] = _decoder_of(msgspec.msgpack.Decoder, kind)
    return decoder


def convert(value: Any, kind: type[T], *, is_strict: bool = True) -> T:
    """Converts plain values. Raises msgspec.ValidationError."""
    _decoder_of(msgspec.json.Decoder, kind)
    return msgspec.convert(value, kind, strict=is_strict)


def _make(decoder: Any, kind: Any) -> Any:
    with _MAKING:
        return decoder(kind)


_decoder_of: Any = functools.cache(_make)
