"""The arguments of an entrypoint, and the variables in which replicas find them. Pure.

Scalars are upper-cased variables, everything is JSON in one variable, on every backend. `rank_env`
names one more variable that carries the rank; it is not an argument.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from atoll.backends.launch import RANK_VARIABLES
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
    env = _scalars(others, is_function=is_function)
    env |= _whole(values, is_function=is_function)
    rank_env = args.get(RANK_ENV)
    if rank_env is not None:
        _check_rank_env(rank_env, env)
        env[RANK_ENV_VARIABLE] = rank_env
    return Arguments(values, env)


def as_argv(values: Mapping[str, Any]) -> list[str]:
    """`--key value` for each; text as it is, anything else as JSON."""
    return [part for key, value in values.items() for part in (f"--{key}", _text(key, value))]


def _scalars(values: Mapping[str, Any], *, is_function: bool) -> dict[str, str]:
    env: dict[str, str] = {}
    keys: dict[str, str] = {}
    for key, value in values.items():
        if not isinstance(value, str | int | float | os.PathLike):
            continue
        name = re.sub(r"[.-]", "_", key.upper())
        field = f"entrypoint_args.{key}"
        if why := _why_reserved(name):
            raise ValidationError(field, value, f"expected another name: {name} {why}")
        if name in keys:
            other = f"expected another name: {name} is the variable of {keys[name]!r}"
            raise ValidationError(field, value, other)
        keys[name] = key
        try:
            env[name] = _text(key, value)
        except ValidationError:
            if not is_function:
                raise
    return env


def _whole(values: Mapping[str, Any], *, is_function: bool) -> dict[str, str]:
    sizes: dict[str, int] = {}
    for key, value in values.items():
        try:
            sizes[key] = len(_json(key, value))
        except ValidationError:
            if not is_function:
                raise
            return {}
    if sum(sizes.values()) > MAX_ARGS_BYTES:
        if is_function:
            return {}
        largest = max(sizes, key=lambda key: sizes[key])
        raise _too_large(largest, values[largest])
    return {ARGS_VARIABLE: json.dumps({key: _plain(value) for key, value in values.items()})}


def _too_large(key: str, value: Any) -> ValidationError:
    return ValidationError(
        f"entrypoint_args.{key}",
        value,
        f"expected at most {MAX_ARGS_BYTES} bytes for all of them: a function takes more",
    )


def _check_rank_env(name: Any, env: Mapping[str, str]) -> None:
    field = f"entrypoint_args.{RANK_ENV}"
    if not is_env_name(name):
        raise ValidationError(field, name, "expected the name of a variable, such as MY_RANK")
    if name in env:
        raise ValidationError(field, name, "expected another name: an argument has this variable")
    if name not in (*RANK_VARIABLES, JOB_RANK) and (why := _why_reserved(name)):
        raise ValidationError(field, name, f"expected another name: {name} {why}")


def _why_reserved(name: str) -> str:
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
        raise ValidationError(
            f"entrypoint_args.{key}", value, "expected text in UTF-8 without NUL bytes"
        )
    if len(text.encode()) > MAX_ARGS_BYTES:
        raise _too_large(key, value)
    return text


def _json(key: str, value: Any) -> str:
    try:
        text = json.dumps(_plain(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValidationError(
            f"entrypoint_args.{key}",
            value,
            f"expected what JSON can hold, or a function as entrypoint ({error})",
        ) from error
    return text
