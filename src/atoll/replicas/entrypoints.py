"""The entrypoint of a replica: a script, a module or a function, with its arguments."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from atoll.agent.keywords import OWN_MODULES, missing_keywords, trainer_call
from atoll.core.checks import is_text
from atoll.core.errors import ValidationError
from atoll.replicas.arguments import as_argv

log = logging.getLogger(__name__)

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_MODULE = re.compile(_DOTTED)
_FUNCTION = re.compile(rf"{_DOTTED}:{_DOTTED}")


class Script(NamedTuple):
    """A script file of the caller."""

    path: Path
    argv: list[str]


class Module(NamedTuple):
    """A module, run as `python -m`."""

    name: str
    argv: list[str]


class FunctionCall(NamedTuple):
    """A function, with its arguments, pickled for `atoll.agent.replica_entry`."""

    payload: bytes


class InImage(NamedTuple):
    """What a command of the image runs: it is only told its name; empty if it has none."""

    name: str


Entry = Script | Module | FunctionCall | InImage


def read_entry(
    entrypoint: str | os.PathLike[str] | Callable[..., Any], args: Mapping[str, Any]
) -> Entry:
    """The entry with every one of `args`. Raises ValidationError naming what cannot be passed."""
    if callable(entrypoint):
        return FunctionCall(_pickled_call(entrypoint, args))
    text = os.fspath(entrypoint) if isinstance(entrypoint, str | os.PathLike) else None
    if not text or not is_text(text):
        raise ValidationError("entrypoint", entrypoint, "expected a script, a module or a function")
    if text in OWN_MODULES:
        try:
            text, args = trainer_call(args)
        except ValueError as error:
            raise ValidationError("entrypoint_args", sorted(args), str(error)) from error
    if _FUNCTION.fullmatch(text):
        return FunctionCall(_payload({"name": text}, args))
    path = Path(text)
    if path.is_file():
        return Script(path.resolve(), as_argv(args))
    if text.endswith(".py") or "/" in text or not _MODULE.fullmatch(text):
        raise ValidationError(
            "entrypoint", text, "expected a script that is there, 'package.module' or 'module:name'"
        )
    return Module(text, as_argv(args))


def is_function(entrypoint: object) -> bool:
    """Whether it is called, and not run as a program."""
    is_named = isinstance(entrypoint, str) and _FUNCTION.fullmatch(entrypoint) is not None
    return callable(entrypoint) or is_named


def name_of(entrypoint: object) -> str:
    """The entrypoint as `ENTRYPOINT` names it; empty for a function without a name of its own."""
    if isinstance(entrypoint, str | os.PathLike):
        return str(os.fspath(entrypoint))
    module = getattr(entrypoint, "__module__", None) or ""
    name = f"{module}:{getattr(entrypoint, '__qualname__', '')}"
    return name if _FUNCTION.fullmatch(name) else ""


def read_in_image(entrypoint: object) -> InImage:
    """For a command of the image. Raises ValidationError for what is no entrypoint.

    A function is named if the image can import it; a command runs as it is in any case.
    """
    name = name_of(entrypoint)
    if callable(entrypoint):
        name = "" if name.startswith("__main__:") else name
        what = getattr(entrypoint, "__qualname__", repr(entrypoint))
        log.warning("replicas run command=; the function %s is not sent to them", what)
        return InImage(name)
    if not name or not is_text(name):
        expected = "expected a name that is told to command in ENTRYPOINT, such as 'module:name'"
        raise ValidationError("entrypoint", entrypoint, expected)
    return InImage(name)


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
        signature.bind(**args, **dict.fromkeys(missing_keywords(function, args)))
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
