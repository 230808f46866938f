"""The entrypoint of a replica, a script, module or function, and its arguments."""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from atoll.core.checks import is_text
from atoll.core.errors import ValidationError

MAX_ARGS_BYTES = 120_000  # Linux takes at most 131,072 in one argument or variable

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_MODULE = re.compile(_DOTTED)
_FUNCTION = re.compile(rf"{_DOTTED}:{_DOTTED}")


class Script(NamedTuple):
    """A script file of the caller."""

    path: Path
    argv: list[str]
    variable: str


class Module(NamedTuple):
    """A module, run as `python -m`."""

    name: str
    argv: list[str]
    variable: str


class FunctionCall(NamedTuple):
    """A function, with its arguments, pickled for `atoll.rank.replica_entry`."""

    payload: bytes


Entry = Script | Module | FunctionCall


def read_entry(
    entrypoint: str | os.PathLike[str] | Callable[..., Any], args: Mapping[str, Any]
) -> Entry:
    """The entry with every one of `args`. Raises ValidationError naming what cannot be passed."""
    _check_keys(args)
    if callable(entrypoint):
        return FunctionCall(_pickled_call(entrypoint, args))
    text = os.fspath(entrypoint) if isinstance(entrypoint, str | os.PathLike) else None
    if not text or not is_text(text):
        raise ValidationError("entrypoint", entrypoint, "expected a script, a module or a function")
    if _FUNCTION.fullmatch(text):
        return FunctionCall(_payload({"name": text}, args))
    path = Path(text)
    if path.is_file():
        return Script(path.resolve(), _argv(args), _variable(args))
    if text.endswith(".py") or "/" in text or not _MODULE.fullmatch(text):
        raise ValidationError(
            "entrypoint", text, "expected a script that is there, 'package.module' or 'module:name'"
        )
    return Module(text, _argv(args), _variable(args))


def _check_keys(args: Mapping[str, Any]) -> None:
    if not isinstance(args, Mapping):
        raise ValidationError("entrypoint_args", args, "expected names and values")
    for key in args:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValidationError("entrypoint_args", key, "expected a name of letters and digits")


def _argv(args: Mapping[str, Any]) -> list[str]:
    """`--key value` for each; text as it is, anything else as JSON."""
    return [part for key, value in args.items() for part in (f"--{key}", _text(key, value))]


def _text(key: str, value: Any) -> str:
    text = value if isinstance(value, str) else _json(key, value)
    if "\0" in text:
        raise ValidationError(f"entrypoint_args.{key}", value, "expected text without NUL bytes")
    return text


def _json(key: str, value: Any) -> str:
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValidationError(
            f"entrypoint_args.{key}",
            value,
            f"expected what JSON can hold, or a function as entrypoint ({error})",
        ) from error
    return text


def _variable(args: Mapping[str, Any]) -> str:
    sizes = {key: len(_json(key, value)) for key, value in args.items()}
    if sum(sizes.values()) > MAX_ARGS_BYTES:
        largest = max(sizes, key=lambda key: sizes[key])
        raise ValidationError(
            f"entrypoint_args.{largest}",
            args[largest],
            f"expected at most {MAX_ARGS_BYTES} bytes for all of them: a function takes more",
        )
    return json.dumps(dict(args))


def _pickled_call(function: Callable[..., Any], args: Mapping[str, Any]) -> bytes:
    if inspect.iscoroutinefunction(function):
        raise ValidationError("entrypoint", function, "expected a plain function, not an async one")
    _check_fit(function, args)
    return _payload({"function": _dumps("entrypoint", function, _module_of(function))}, args)


def _check_fit(function: Callable[..., Any], args: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(**args)
    except TypeError as error:
        expected = f"expected what {function!r} takes: {error}"
        raise ValidationError("entrypoint_args", sorted(args), expected) from error


def _payload(what: dict[str, Any], args: Mapping[str, Any]) -> bytes:
    import pickle

    pickled = {key: _dumps(f"entrypoint_args.{key}", value) for key, value in args.items()}
    path = [str(Path(entry).resolve()) for entry in sys.path]
    return pickle.dumps({**what, "args": pickled, "path": path})


def _dumps(field: str, value: Any, module: Any = None) -> bytes:
    """Pickles `module` by value, because a replica may not be able to import it."""
    import cloudpickle

    try:
        if module is not None:
            cloudpickle.register_pickle_by_value(module)
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # the object may hold anything, which fails in its own way
        expected = f"expected something that can be pickled ({type(error).__name__}: {error})"
        raise ValidationError(field, value, expected) from error
    finally:
        if module is not None:
            cloudpickle.unregister_pickle_by_value(module)


def _module_of(function: Callable[..., Any]) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(inspect.unwrap(function), "__module__", None) or ""
    top = name.partition(".")[0]
    is_shared = top in ("__main__", "atoll") or top in sys.stdlib_module_names
    return None if is_shared else sys.modules.get(name)
