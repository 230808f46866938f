"""Reads results of ranks as `agent/result.py` writes them.

Reading one runs no code, unless pickles are allowed.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

from atoll.agent.result import (
    ARRAY,
    COMPLEX,
    DTYPE,
    FROZENSET,
    INT,
    JSON,
    MSGPACK,
    NONE,
    PAIRS,
    PICKLE,
    SCALAR,
    SET,
    TENSOR,
    TUPLE,
    Result,
)
from atoll.core.errors import ResultError


def parse_result(data: bytes) -> Result:
    """Return the result in a file. Raises ResultError if it is none."""
    line, _, payload = data.partition(b"\n")
    try:
        header = json.loads(line)
        encoding, size = str(header["encoding"]), int(header["bytes"])
    except (ValueError, KeyError, TypeError) as error:
        raise ResultError(f"the result is damaged: {line[:80]!r}") from error
    if size != len(payload) or encoding not in (JSON, MSGPACK, PICKLE, NONE):
        raise ResultError(f"the result is damaged: {len(payload)} bytes where {size} should be")
    return Result(encoding, payload)


def decode_value(result: Result, *, allow_pickle: bool = False) -> Any:
    """Raises ResultError, in one line, where that cannot be done. Runs no code but for a pickle."""
    if result.encoding == NONE:
        raise ResultError(result.payload.decode(errors="replace"))
    if result.encoding == PICKLE and not allow_pickle:
        raise ResultError("the result is a pickle, which could run any code: allow_pickle takes it")
    try:
        return _decoded(result)
    except Exception as error:  # the payload may be anything; a pickle fails in its own way
        raise ResultError(f"the result cannot be read here: {error!r}") from error


def _decoded(result: Result) -> Any:
    if result.encoding == JSON:
        return json.loads(result.payload)
    if result.encoding == PICKLE:
        import pickle

        return pickle.loads(result.payload)
    import msgspec

    return msgspec.msgpack.decode(result.payload, ext_hook=_untagged)


def _tensor(dtype: str, shape: list[int], content: bytes) -> Any:
    torch = importlib.import_module("torch")
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"a tensor of {dtype!r}")
    if not content:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(content), dtype=kind).reshape(shape)


def _untagged(code: int, data: memoryview) -> Any:
    from msgspec.msgpack import decode

    if code == INT:
        return int(bytes(data))
    inner = decode(data, ext_hook=_untagged)
    if code in (ARRAY, SCALAR):
        numpy = importlib.import_module("numpy")
        dtype, shape, content = inner
        if not DTYPE.fullmatch(dtype):
            raise ValueError(f"an array of {dtype!r}")
        array = numpy.frombuffer(content, numpy.dtype(dtype)).reshape(shape).copy()
        return array if code == ARRAY else array[()]
    if code == TENSOR:
        return _tensor(*inner)
    if code == COMPLEX:
        return complex(*inner)
    if code == PAIRS:
        return dict(inner)
    return {TUPLE: tuple, SET: set, FROZENSET: frozenset}[code](inner)
