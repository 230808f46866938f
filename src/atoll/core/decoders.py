"""The decoders of all types: one for each, and never two made at the same moment.

msgspec 0.22 shows what it knows of a Struct to other threads before it has filled that in: a thread
that decodes a type, converts to one or makes a decoder of one while another does so for the first
time reads a null pointer, and the process dies of SIGSEGV. Structs share the types of their fields,
so one lock is for all. A decoder that is made may be used by several threads.
"""

from __future__ import annotations

import functools
from _thread import allocate_lock
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_MAKING = allocate_lock()


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """The decoder of JSON that is a `kind`. Modules make those of their types when they load."""
    decoder: msgspec.json.Decoder[T] = _made(msgspec.json.Decoder, kind)
    return decoder


def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """The decoder of msgpack that is a `kind`."""
    decoder: msgspec.msgpack.Decoder[T] = _made(msgspec.msgpack.Decoder, kind)
    return decoder


def convert(value: Any, kind: type[T], *, is_strict: bool = True) -> T:
    """Plain values as a `kind`. Raises msgspec.ValidationError."""
    _made(msgspec.json.Decoder, kind)
    return msgspec.convert(value, kind, strict=is_strict)


def _make(decoder: Any, kind: Any) -> Any:
    with _MAKING:
        return decoder(kind)


_made: Any = functools.cache(_make)
