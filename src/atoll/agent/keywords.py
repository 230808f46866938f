"""Where a replica finds its rank, its world and their store, and a function the rest it needs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

RANK_ENV = "ATOLL_RANK_ENV"  # the name of the variable that the launcher chose for the rank
# The first variable that is set counts.
RANK = ("REPLICA_RANK", "RANK", "ATOLL_RANK", "JOB_COMPLETION_INDEX")
WORLD = ("WORLD_SIZE", "ATOLL_WORLD_TARGET")
URI = ("RENDEZVOUS_URI", "ATOLL_RENDEZVOUS_URI")

# Entrypoints that name no code of the user's: what to call is among the arguments.
OWN_MODULES = (
    "atoll.replica_entrypoint",
    "composer_replication.diloco.serverless.replica_entrypoint",
)
TRAINER, FUNCTION, KWARGS, KWARGS_JSON = (
    *("trainer_module", "trainer_fn"),
    *("trainer_kwargs", "trainer_kwargs_json"),
)

# A function that needs one of these, and is not given it, has it from the environment.
FROM_ENVIRONMENT = ("rank", "world_size", "rendezvous_uri")


def missing_keywords(function: Callable[..., Any], args: Mapping[str, Any]) -> list[str]:
    """Those of FROM_ENVIRONMENT that the function requires and `args` lacks."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return []
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        name
        for name in FROM_ENVIRONMENT
        if name not in args
        and name in parameters
        and parameters[name].kind in by_name
        and parameters[name].default is inspect.Parameter.empty
    ]


def trainer_call(args: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What `module:function` and with which arguments one of OWN_MODULES is to call.

    Raises ValueError naming the argument that is missing or wrong.
    """
    module, function = args.get(TRAINER), args.get(FUNCTION, "train")
    for name, value in ((TRAINER, module), (FUNCTION, function)):
        if not isinstance(value, str) or not all(map(str.isidentifier, value.split("."))):
            raise ValueError(f"{name}: {value!r}: expected the name of what the replicas run")
    kwargs: Any = args.get(KWARGS) or {}
    if text := args.get(KWARGS_JSON):
        try:
            kwargs = json.loads(text)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{KWARGS_JSON}: {text!r}: expected JSON: {error}") from error
    if not isinstance(kwargs, dict):
        raise ValueError(f"{KWARGS}: {kwargs!r}: expected names and values")
    return f"{module}:{function}", kwargs


def call(function: Callable[..., Any], args: Mapping[str, Any], env: Mapping[str, str]) -> Any:
    """Calls the function. Raises ValueError naming a variable that it needs and that is not set."""
    more = {name: READERS[name](env) for name in missing_keywords(function, args)}
    return function(**args, **more)


def read_rank(env: Mapping[str, str]) -> int:
    chosen = env.get(RANK_ENV)
    return _number(env, (*((chosen,) if chosen else ()), *RANK))


def read_world(env: Mapping[str, str]) -> int:
    return _number(env, WORLD)


def read_uri(env: Mapping[str, str]) -> str:
    _, text = _first(env, URI)
    return text


READERS: dict[str, Callable[[Mapping[str, str]], int | str]] = {
    "rank": read_rank,
    "world_size": read_world,
    "rendezvous_uri": read_uri,
}


def _number(env: Mapping[str, str], names: tuple[str, ...]) -> int:
    name, text = _first(env, names)
    if not text.strip().isdecimal():
        raise ValueError(f"{name}: {text!r}: expected a whole number")
    return int(text)


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    for name in names:
        if env.get(name):
            return name, env[name]
    raise ValueError(f"{names[0]} is not set: expected it, or {' or '.join(names[1:])}")
