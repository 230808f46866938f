"""The result of a rank as marked lines of its log, on every backend.

A mark names the launch by a nonce, the call that made it, how the value is written and which part
of it the line holds. A value is JSON where it can be, else msgpack with tags for tuples, sets,
arrays and tensors; a pickle only where it was asked for. Reading one runs no code, unless pickles
are allowed.

Each line fits into one atomic write to a pipe, so that other output of the rank never breaks it.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, NamedTuple

from atoll.core.errors import ResultError
from atoll.core.lines import RESULT_MARK as MARK

MAX_BYTES = 16 * 2**20
NEAR_END = 64  # number of last lines in which a result is looked for first
UID_VARIABLE = "ATOLL_UID"
RESULTS_VARIABLE = "ATOLL_RESULTS"  # "pickle": whoever launched this takes pickles
JSON, MSGPACK, PICKLE, NONE = "json", "msgpack", "pickle", "none"
_CHUNK = 3000  # base64 of this and the mark stay below 4096 bytes
_MARK = re.compile(
    r"(?P<nonce>[0-9a-f]{32}) (?P<call>[0-9a-f]{8}) (?P<encoding>json|msgpack|pickle|none) "
    r"(?P<at>[0-9]{1,4}) (?P<count>[0-9]{1,4}) (?P<data>[A-Za-z0-9+/]*={0,2})"
)
# Tags of what msgpack has no type for.
_TUPLE, _SET, _FROZENSET, _PAIRS, _COMPLEX, _INT, _ARRAY, _SCALAR, _TENSOR = range(1, 10)
_DTYPE = re.compile(r"[<>|][biufcSU][0-9]{1,6}")


class Result(NamedTuple):
    """A value as it travels. With the encoding `none`, the payload says why there is no value."""

    encoding: str
    payload: bytes


class Reading(NamedTuple):
    """What a log says of a rank's result. `trouble` is for people.

    `is_torn`: the rank gave one, and only a part of it is in the log.
    """

    result: Result | None
    trouble: str = ""
    is_torn: bool = False


class ResultPart(NamedTuple):
    call: str
    encoding: str
    at: int
    total: int  # number of parts
    data: bytes


def set_result(value: Any, *, pickled: bool | None = None) -> None:
    """Hands in `value` as the result of this rank: `collect` and `training.result()` have it.

    The last call counts. Plain data, bytes, tuples, sets, numpy arrays and torch tensors can be
    handed in, and with `pickled=True` whatever can be pickled, for a reader who allows
    pickles. Raises TypeError or ValueError for anything else. Does nothing
    where atoll has not started the process.
    """
    if pickled is None:
        pickled = os.environ.get(RESULTS_VARIABLE) == PICKLE
    result = encode_value(value, pickled=pickled)
    if len(result.payload) > MAX_BYTES:
        raise ValueError(
            f"the result has {len(result.payload) / 2**20:.0f} MiB, expected at most "
            f"{MAX_BYTES // 2**20}: write it to a store and return its address"
        )
    _print(result)


def hand_in(value: Any) -> None:
    """The result of a function that has ended well: if it cannot be handed in, that is told."""
    try:
        set_result(value)
    except Exception as error:  # a class of the user may fail in any way while it is pickled
        words = f"the result cannot be returned: {error}"
        sys.stderr.write(f"atoll: {words}\n")
        _print(Result(NONE, words.encode(errors="replace")[:_CHUNK]))


def nonce_of(uid: str) -> str:
    """The nonce of the launch or training with this uid."""
    import hashlib

    return hashlib.sha256(f"atoll-result {uid}".encode()).hexdigest()[:32]


def result_lines(result: Result, nonce: str, call: str) -> list[bytes]:
    """The lines that a rank prints. Each states its number and how many there are."""
    payload = result.payload
    chunks = [payload[at : at + _CHUNK] for at in range(0, len(payload), _CHUNK)] or [b""]
    head = f"{MARK}{nonce} {call} {result.encoding}"
    return [
        f"{head} {at} {len(chunks)} ".encode() + base64.b64encode(chunk) + b"\n"
        for at, chunk in enumerate(chunks)
    ]


def parts_expected(lines: Iterable[str], nonce: str) -> int:
    """The number of lines that the last result in these lines has; 0 without one."""
    return max((part.total for line in lines if (part := _part(line, nonce))), default=0)


def read_result(lines: Iterable[str], nonce: str) -> Reading:
    """The last complete result in the log. Marks of others and broken ones are counted only."""
    pieces: dict[str, dict[int, bytes]] = {}
    last: Result | None = None
    bad = 0
    for line in lines:
        if MARK not in line:
            continue
        part = _part(line, nonce)
        if part is None:
            bad += 1
            continue
        mine = pieces.setdefault(part.call, {})
        mine[part.at] = part.data
        if len(mine) == part.total and part.total - 1 in mine:
            last = Result(part.encoding, b"".join(mine[at] for at in range(part.total)))
            del pieces[part.call]
    if last is None and pieces:
        words = "the result is not complete in the log: the rank ended while it wrote it, or it was"
        return Reading(None, f"{words} cut off", is_torn=True)
    if bad:
        words = f"{bad} marked line{'s' if bad > 1 else ''} of its log ignored"
        return Reading(last, f"{words}: broken, or the result of another launch")
    return Reading(last)


async def find_result(texts: Callable[[int | None], AsyncIterator[str]], nonce: str) -> Reading:
    """The result in a log, of which `texts` gives the last lines, or all.

    The whole log is read only where its end does not have the result.
    """
    marked, count = await _marked(texts(NEAR_END))
    if count < NEAR_END:
        return read_result(marked, nonce)
    if parts := parts_expected(marked, nonce):
        marked, _ = await _marked(texts(parts + NEAR_END))
        reading = read_result(marked, nonce)
        if reading.result is not None:
            return reading
    marked, _ = await _marked(texts(None))
    return read_result(marked, nonce)


async def _marked(texts: AsyncIterator[str]) -> tuple[list[str], int]:
    """The lines with a mark, and the number of all."""
    marked, count = [], 0
    async for text in texts:
        count += 1
        if MARK in text:
            marked.append(text)
    return marked, count


def _part(line: str, nonce: str) -> ResultPart | None:
    """None if the line is no mark of this launch."""
    _, mark, rest = line.partition(MARK)
    match = _MARK.fullmatch(rest.rstrip("\r\n")) if mark else None
    if match is None or match["nonce"] != nonce:
        return None
    at, count = int(match["at"]), int(match["count"])
    try:
        data = base64.b64decode(match["data"], validate=True)
    except binascii.Error:
        return None
    is_whole = at < count and len(data) <= _CHUNK and count <= MAX_BYTES // _CHUNK + 1
    return ResultPart(match["call"], match["encoding"], at, count, data) if is_whole else None


def _print(result: Result) -> None:
    uid = os.environ.get(UID_VARIABLE)
    if not uid:
        return
    sys.stdout.flush()
    for line in result_lines(result, nonce_of(uid), os.urandom(4).hex()):
        while line:
            line = line[os.write(1, line) :]


def encode_value(value: Any, *, pickled: bool = False) -> Result:
    """Raises TypeError if the value is not plain data, and pickles are not asked for."""
    if pickled:
        import cloudpickle

        return Result(PICKLE, bytes(cloudpickle.dumps(value)))
    try:
        if _is_json(value):
            return Result(JSON, json.dumps(value, ensure_ascii=False).encode())
        import msgspec

        return Result(MSGPACK, msgspec.msgpack.encode(_tagged(value)))
    except RecursionError as error:
        raise ValueError("the result is nested too deeply, or holds itself") from error
    except UnicodeEncodeError as error:
        raise ValueError(
            f"expected text that UTF-8 can hold, not {error.object[:80]!a}: return the bytes of a "
            "file name, as os.fsencode does"
        ) from error


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


def _is_json(value: Any) -> bool:
    """Whether JSON gives back the very same value."""
    kind = type(value)
    if kind is float:
        return bool(value - value == 0)  # neither infinite nor NaN
    if kind is list:
        return all(map(_is_json, value))
    if kind is dict:
        return all(type(key) is str and _is_json(item) for key, item in value.items())
    return value is None or kind in (bool, int, str)


def _tagged(value: Any) -> Any:
    """The value in types of msgpack, other ones as extensions. Raises TypeError."""
    from msgspec.msgpack import Ext, encode

    kind = type(value)
    if value is None or kind in (bool, float, str, bytes):
        return value
    if kind is int:
        is_short = -(2**63) <= value < 2**64
        return value if is_short else Ext(_INT, str(value).encode())
    if kind is list:
        return [_tagged(item) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: _tagged(item) for key, item in value.items()}
    if kind is dict:
        return Ext(_PAIRS, encode([[_tagged(key), _tagged(item)] for key, item in value.items()]))
    for code, sequence in ((_TUPLE, tuple), (_SET, set), (_FROZENSET, frozenset)):
        if kind is sequence:
            return Ext(code, encode([_tagged(item) for item in value]))
    if kind is complex:
        return Ext(_COMPLEX, encode([value.real, value.imag]))
    if kind.__module__ == "numpy" and _DTYPE.fullmatch(getattr(value.dtype, "str", "")):
        code = _ARRAY if kind.__name__ == "ndarray" else _SCALAR
        return Ext(code, encode([value.dtype.str, list(value.shape), value.tobytes()]))
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in ("torch.Tensor", "torch.nn.parameter.Parameter") and value.layout is _strided():
        return Ext(_TENSOR, encode(_tensor_parts(value)))
    raise TypeError(
        f"expected plain data such as numbers, text, lists and dicts, not a {name}: return its "
        "parts, as dataclasses.asdict does, or a pickle: allow_pickle=True of an executor or of "
        "Client.map; else atoll.set_result(x, pickled=True) and training.result(allow_pickle=True)"
    )


def _strided() -> Any:
    return importlib.import_module("torch").strided


def _tensor_parts(tensor: Any) -> list[Any]:
    """Its dtype, shape and bytes, on the CPU and without its gradient."""
    torch = importlib.import_module("torch")
    plain = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return [str(plain.dtype).removeprefix("torch."), list(plain.shape), content]


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

    if code == _INT:
        return int(bytes(data))
    inner = decode(data, ext_hook=_untagged)
    if code in (_ARRAY, _SCALAR):
        numpy = importlib.import_module("numpy")
        dtype, shape, content = inner
        if not _DTYPE.fullmatch(dtype):
            raise ValueError(f"an array of {dtype!r}")
        array = numpy.frombuffer(content, numpy.dtype(dtype)).reshape(shape).copy()
        return array if code == _ARRAY else array[()]
    if code == _TENSOR:
        return _tensor(*inner)
    if code == _COMPLEX:
        return complex(*inner)
    if code == _PAIRS:
        return dict(inner)
    return {_TUPLE: tuple, _SET: set, _FROZENSET: frozenset}[code](inner)
