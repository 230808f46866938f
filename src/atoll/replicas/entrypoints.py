"""What a replica runs: a script, a module or a function, with the arguments that reach it. Pure.

Arguments travel the same way on every backend: scalars as upper-cased variables, everything as JSON
in one variable. `rank_env` names one more variable that carries the rank; it is no argument.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from atoll.agent.entrypoint import (
    OWN_MODULES,
    ReplicaCall,
    as_argv,
    missing_keywords,
    trainer_call,
)
from atoll.backends.launch import RANK_VARIABLES
from atoll.code.functions import pickle_function, pickle_value
from atoll.core.checks import (
    ARGS_VARIABLE,
    ENTRYPOINT_VARIABLE,
    RANK_ENV_VARIABLE,
    RESERVED_ENV,
    RESERVED_ENV_PREFIXES,
    is_env_name,
    is_text,
)
from atoll.core.errors import ValidationError
from atoll.core.spec import Source

log = logging.getLogger(__name__)

_DOTTED = r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*"
_MODULE = re.compile(_DOTTED)
_FUNCTION = re.compile(rf"{_DOTTED}:{_DOTTED}")


class Entry(NamedTuple):
    """What a replica runs, as fields of its spec. `name` is for ENTRYPOINT; empty if there is none.

    `folder`: of a script, whose modules are there.
    """

    fields: dict[str, Any]
    name: str
    folder: str | None = None

    @property
    def is_function(self) -> bool:
        source = self.fields.get("source")
        return source is not None and source.kind == "function"


def read_entry(
    entrypoint: str | os.PathLike[str] | Callable[..., Any],
    args: Mapping[str, Any],
    *,
    python: str,
    is_in_place: bool,
) -> Entry:
    """The entry with every one of `args`. Raises ValidationError naming what cannot be passed.

    `is_in_place`: replicas see the script where it is.
    """
    name = entrypoint_name(entrypoint)
    if callable(entrypoint):
        return Entry({"source": _function(_pickled_call(entrypoint, args))}, name)
    text = os.fspath(entrypoint) if isinstance(entrypoint, str | os.PathLike) else None
    if not text or not is_text(text):
        raise ValidationError("entrypoint", entrypoint, "expected a script, a module or a function")
    if text in OWN_MODULES:
        try:
            text, args = trainer_call(args)
        except ValueError as error:
            raise ValidationError("entrypoint_args", sorted(args), str(error)) from error
    if _FUNCTION.fullmatch(text):
        return Entry({"source": _function(_payload(text, args))}, name)
    path = Path(text).resolve()
    if not path.is_file():
        if text.endswith(".py") or not _MODULE.fullmatch(text):
            expected = "expected an existing script, 'package.module' or 'module:name'"
            raise ValidationError("entrypoint", text, expected)
        return Entry({"command": [python, "-m", text, *as_argv(args)]}, name)
    if is_in_place:
        runs: dict[str, Any] = {"command": [python, str(path)]}
    else:
        runs = {"source": Source(kind="script", content=path.read_bytes(), filename=path.name)}
    return Entry(runs | {"args": as_argv(args)}, name, str(path.parent))


def _function(payload: bytes) -> Source:
    return Source(kind="function", content=payload, filename="function.pkl")


def is_function(entrypoint: object) -> bool:
    """Whether it is called, and not run as a program."""
    is_named = isinstance(entrypoint, str) and _FUNCTION.fullmatch(entrypoint) is not None
    return callable(entrypoint) or is_named


def entrypoint_name(entrypoint: object) -> str:
    """The entrypoint as `ENTRYPOINT` names it; empty for a function without a name of its own."""
    if isinstance(entrypoint, str | os.PathLike):
        return str(os.fspath(entrypoint))
    module = getattr(entrypoint, "__module__", None) or ""
    name = f"{module}:{getattr(entrypoint, '__qualname__', '')}"
    return name if _FUNCTION.fullmatch(name) else ""


def read_in_image(entrypoint: object, command: list[str]) -> Entry:
    """For a command of the image. Raises ValidationError for what is no entrypoint.

    A function is named if the image can import it; a command runs as it is in any case.
    """
    name = entrypoint_name(entrypoint)
    if callable(entrypoint):
        name = "" if name.startswith("__main__:") else name
        what = getattr(entrypoint, "__qualname__", repr(entrypoint))
        log.warning("replicas run command=; the function %s is not sent to them", what)
    elif not name or not is_text(name):
        expected = "expected a name for ENTRYPOINT, which the command reads, such as 'module:name'"
        raise ValidationError("entrypoint", entrypoint, expected)
    return Entry({"command": command}, name)


def _pickled_call(function: Callable[..., Any], args: Mapping[str, Any]) -> bytes:
    pickled = pickle_function("entrypoint", function)
    _check_fit(function, args)
    return _payload(pickled, args)


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


def _payload(function: bytes | str, args: Mapping[str, Any]) -> bytes:
    import pickle

    pickled = {key: pickle_value(f"entrypoint_args.{key}", value) for key, value in args.items()}
    path = [str(Path(entry).resolve()) for entry in sys.path]
    return pickle.dumps(ReplicaCall(function, pickled, path))


MAX_ARGS_BYTES = 120_000  # Linux takes at most 131,072 in one argument or variable
RANK_ENV = "rank_env"
URI = "rendezvous_uri"
WORLD = "world_size"
JOB_RANK = "JOB_COMPLETION_INDEX"  # the rank, as an Indexed Job of Kubernetes sets it

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
# Beside those that are reserved everywhere: what atoll and torch set for ranks, and what would
# change how the replica's programs start.
_SET_FOR_RANKS = re.compile(
    rf"MASTER_(ADDR|PORT)|LOCAL_RANK|LOCAL_WORLD_SIZE|{JOB_RANK}|{ENTRYPOINT_VARIABLE}|(PET|TORCHELASTIC)_\w+"
)
_OF_PROGRAMS = re.compile(r"PATH|HOME|PWD|BASH_ENV|LD_\w+|PYTHON[A-Z]\w*")


class Arguments(NamedTuple):
    """`values` are for the entrypoint; `env` is for every replica."""

    values: dict[str, Any]
    env: dict[str, str]


def read_arguments(args: object, *, n_replicas: int, is_function: bool) -> Arguments:
    """Raises ValidationError naming the argument that cannot reach a replica.

    `world_size` may be among them, if it is the number of replicas.

    A function takes whatever can be pickled, of any size: its variables have what they can hold.
    """
    if not isinstance(args, Mapping):
        raise ValidationError("entrypoint_args", args, "expected names and values")
    for key in args:
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValidationError("entrypoint_args", key, "expected a name of letters and digits")
    values = {key: value for key, value in args.items() if key != RANK_ENV}
    if (world := values.get(WORLD, n_replicas)) != n_replicas or isinstance(world, bool):
        expected = f"expected {n_replicas}: so many replicas are launched"
        raise ValidationError(f"entrypoint_args.{WORLD}", world, expected)
    # Its variable is set for every replica.
    others = {key: value for key, value in values.items() if key != WORLD}
    env = _scalars(others, is_function=is_function) | _as_json(values, is_function=is_function)
    if (rank_env := args.get(RANK_ENV)) is not None:
        _check_rank_env(rank_env, env)
        env[RANK_ENV_VARIABLE] = rank_env
    return Arguments(values, env)


def _scalars(values: Mapping[str, Any], *, is_function: bool) -> dict[str, str]:
    env: dict[str, str] = {}
    keys: dict[str, str] = {}
    for key, value in values.items():
        if not isinstance(value, str | int | float | os.PathLike):
            continue
        name = re.sub(r"[.-]", "_", key.upper())
        field = f"entrypoint_args.{key}"
        if why := _describe_reserved(name):
            raise ValidationError(field, value, f"expected another name: {name} {why}")
        if (first := keys.setdefault(name, key)) != key:
            other = f"expected another name: {name} is the variable of {first!r}"
            raise ValidationError(field, value, other)
        try:
            env[name] = _text(key, value)
        except ValidationError:
            if not is_function:
                raise
    return env


def _as_json(values: Mapping[str, Any], *, is_function: bool) -> dict[str, str]:
    try:
        sizes = {key: len(_json(key, value)) for key, value in values.items()}
        if sum(sizes.values()) > MAX_ARGS_BYTES:
            largest = max(sizes, key=lambda key: sizes[key])
            raise _too_large(largest, values[largest])
    except ValidationError:
        if not is_function:
            raise
        return {}
    return {ARGS_VARIABLE: json.dumps({key: _plain(value) for key, value in values.items()})}


def _too_large(key: str, value: Any) -> ValidationError:
    expected = f"expected at most {MAX_ARGS_BYTES} bytes for all of them: a function takes more"
    return ValidationError(f"entrypoint_args.{key}", value, expected)


def _check_rank_env(name: Any, env: Mapping[str, str]) -> None:
    field = f"entrypoint_args.{RANK_ENV}"
    if not is_env_name(name):
        raise ValidationError(field, name, "expected the name of a variable, such as MY_RANK")
    if name in env:
        raise ValidationError(field, name, "expected another name: an argument has this variable")
    if name not in (*RANK_VARIABLES, JOB_RANK) and (why := _describe_reserved(name)):
        raise ValidationError(field, name, f"expected another name: {name} {why}")


def _describe_reserved(name: str) -> str:
    is_reserved = name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES)
    if is_reserved or _SET_FOR_RANKS.fullmatch(name):
        return "is reserved: atoll sets it for every replica"
    return "would change how programs start" if _OF_PROGRAMS.fullmatch(name) else ""


def _plain(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _text(key: str, value: Any) -> str:
    plain = _plain(value)
    text = plain if isinstance(plain, str) else _json(key, plain)
    if not is_text(text):
        expected = "expected text in UTF-8 without NUL bytes"
        raise ValidationError(f"entrypoint_args.{key}", value, expected)
    if len(text.encode()) > MAX_ARGS_BYTES:
        raise _too_large(key, value)
    return text


def _json(key: str, value: Any) -> str:
    try:
        return json.dumps(_plain(value))
    except (TypeError, ValueError, RecursionError) as error:
        expected = f"expected what JSON can hold, or a function as entrypoint ({error})"
        raise ValidationError(f"entrypoint_args.{key}", value, expected) from error
