"""The result of a rank: how a value travels, and where the rank leaves it.

ATOLL_RESULT names the file: a header line with encoding and size, then the payload. A value is JSON
where it can be, else msgpack with tags for tuples, sets, arrays and tensors; a pickle only where it
was asked for. `code/results.py` reads it. Kubernetes has neither folder nor bucket: there
ATOLL_RESULT is `log`, and the result goes into marked lines of the log, which
`backends/kubernetes/results.py` reads.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import os
import re
import sys
from typing import Any, NamedTuple

from atoll.agent.process import write_file

MARK = "\x1eatoll-result "  # begins a line of the log that is a part of a result
MAX_BYTES = 16 * 2**20  # a control plane holds it in memory; more belongs into a store
RESULT_VARIABLE = "ATOLL_RESULT"  # the file for the result, or `log`
IN_LOG = "log"
UID_VARIABLE = "ATOLL_UID"
RESULTS_VARIABLE = "ATOLL_RESULTS"  # "pickle": whoever launched this takes pickles
JSON, MSGPACK, PICKLE, NONE = "json", "msgpack", "pickle", "none"
# Base64 of this and the mark stay below 4096 bytes: one atomic write to a pipe.
CHUNK_BYTES = 3000
# Tags of what msgpack has no type for.
TUPLE, SET, FROZENSET, PAIRS, COMPLEX, INT, ARRAY, SCALAR, TENSOR = range(1, 10)
DTYPE = re.compile(r"[<>|][biufcSU][0-9]{1,6}")


class Result(NamedTuple):
    """A value as it travels. With the encoding `none`, the payload says why there is no value."""

    encoding: str
    payload: bytes


def set_result(value: Any, *, pickled: bool | None = None) -> None:
    """Set the result of this rank: `training.result()` and `collect` return it.

    The last call of an attempt counts. `value` may be plain data, bytes, tuples, sets, numpy arrays
    and torch tensors; with `pickled=True` anything that can be pickled, for a reader who allows
    pickles. Raises TypeError or ValueError for anything else, and OSError if it cannot be written.
    Does nothing in a process that atoll did not start.
    """
    if pickled is None:
        pickled = os.environ.get(RESULTS_VARIABLE) == PICKLE
    result = encode_value(value, pickled=pickled)
    if len(result.payload) > MAX_BYTES:
        raise ValueError(
            f"the result has {len(result.payload) / 2**20:.0f} MiB, expected at most "
            f"{MAX_BYTES // 2**20}: write it to a store and return its address"
        )
    leave(result)


def set_return_value(value: Any) -> None:
    """Set the result of a function that has ended well; if that fails, leave the reason instead."""
    try:
        set_result(value)
    except Exception as error:  # a class of the user may fail in any way while it is pickled
        message = f"the result cannot be returned: {error}"
        sys.stderr.write(f"atoll: {message}\n")
        with contextlib.suppress(OSError):  # a full disk, which the message above names
            leave(Result(NONE, message.encode(errors="replace")[:CHUNK_BYTES]))


def nonce_of(uid: str) -> str:
    """The nonce of the launch or training with this uid."""
    import hashlib

    return hashlib.sha256(f"atoll-result {uid}".encode()).hexdigest()[:32]


def result_lines(result: Result, nonce: str, call: str) -> list[bytes]:
    """The lines that a rank prints. Each states its number and how many there are."""
    payload = result.payload
    chunks = [payload[at : at + CHUNK_BYTES] for at in range(0, len(payload), CHUNK_BYTES)] or [b""]
    head = f"{MARK}{nonce} {call} {result.encoding}"
    return [
        f"{head} {at} {len(chunks)} ".encode() + base64.b64encode(chunk) + b"\n"
        for at, chunk in enumerate(chunks)
    ]


def leave(result: Result) -> None:
    """Put the result where ATOLL_RESULT says; do nothing where atoll did not start the process."""
    target = os.environ.get(RESULT_VARIABLE)
    if target == IN_LOG:
        uid = os.environ.get(UID_VARIABLE, "")
        sys.stdout.flush()
        for line in result_lines(result, nonce_of(uid), os.urandom(4).hex()):
            while line:
                line = line[os.write(1, line) :]
    elif target:
        write_result(target, result)


def write_result(path: str, result: Result) -> None:
    """Replace the result in that file: whoever reads it finds a whole one, this or the last."""
    header = {"encoding": result.encoding, "bytes": len(result.payload)}
    write_file(path, json.dumps(header).encode() + b"\n" + result.payload)


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
        return value if is_short else Ext(INT, str(value).encode())
    if kind is list:
        return [_tagged(item) for item in value]
    if kind is dict and all(type(key) is str for key in value):
        return {key: _tagged(item) for key, item in value.items()}
    if kind is dict:
        return Ext(PAIRS, encode([[_tagged(key), _tagged(item)] for key, item in value.items()]))
    for code, sequence in ((TUPLE, tuple), (SET, set), (FROZENSET, frozenset)):
        if kind is sequence:
            return Ext(code, encode([_tagged(item) for item in value]))
    if kind is complex:
        return Ext(COMPLEX, encode([value.real, value.imag]))
    if kind.__module__ == "numpy" and DTYPE.fullmatch(getattr(value.dtype, "str", "")):
        code = ARRAY if kind.__name__ == "ndarray" else SCALAR
        return Ext(code, encode([value.dtype.str, list(value.shape), value.tobytes()]))
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in ("torch.Tensor", "torch.nn.parameter.Parameter") and value.layout is _strided():
        return Ext(TENSOR, encode(_tensor_parts(value)))
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
