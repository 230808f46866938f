"""Starts a program in a rank: `[--from DIR] script|function PAYLOAD ARGS…`.

A script runs as under `python script.py ARGS…`; a function is called with ARGS, and a `ReplicaCall`
is one that brings its own. However a program is started, `start` runs it: a failure is printed to
stderr and written to the file that torch uses, so that the first one can be named. Rank, world and
store of a replica come from its environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from atoll.agent import process
from atoll.agent.result import set_return_value

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
_OWN = {__file__, str(Path(__file__).resolve())}


def start(program: Callable[[], object]) -> int:
    """Run the program and return the code to exit with; what it exits with itself passes through.

    An error file that torch has written is left as it is.
    """
    try:
        program()
    except SystemExit:
        raise
    except BaseException as error:
        text = "".join(traceback.format_exception(type(error), error, _theirs(error.__traceback__)))
        process.write_error_file(f"{type(error).__name__}: {error}", py_callstack=text)
        sys.stdout.flush()
        sys.stderr.write(text)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


class ReplicaCall:
    """A call of a function, by its name or by value, with everything that it needs."""

    def __init__(self, function: bytes | str, args: dict[str, bytes], path: list[str]) -> None:
        self.function = function  # pickled, or `module:name`
        self.args = args  # by name, each pickled
        self.path = path  # folders in which it looks for modules

    def __call__(self) -> Any:
        sys.path[:] = [*sys.path, *(folder for folder in self.path if folder not in sys.path)]
        own = self.function
        function = import_function(own) if isinstance(own, str) else pickle.loads(own)
        args = {key: pickle.loads(value) for key, value in self.args.items()}
        return call(function, args, os.environ)


class MissingCode(Exception):
    """There is no such module here, or no such function in it."""


def import_function(name: str) -> Callable[..., Any]:
    """The function of `module:function`. Raises MissingCode."""
    module, _, attribute = name.partition(":")
    check_module(module)
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part, None)
    if not callable(value):
        raise MissingCode(f"{name}: {module} has no function {attribute!r}")
    return value  # type: ignore[no-any-return]


def check_module(module: str) -> None:
    """Raises MissingCode if there is no such module; what it imports itself is another matter."""
    try:
        is_there = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise
        is_there = False
    if not is_there:
        raise MissingCode(f"{module!r}: no such module here")


def run(kind: str, payload: Path, arguments: list[str], directory: str | None) -> None:
    """Run the code; whatever it raises passes through."""
    # Python has put the directory of `-m` first; the code's own directory belongs there.
    sys.path[0] = directory if directory and os.path.isdir(directory) else os.getcwd()
    if kind == "script":
        run_script(payload, arguments)
    else:
        sys.argv = [str(payload), *arguments]
        set_return_value(pickle.loads(payload.read_bytes())(*arguments))


def run_script(payload: Path, arguments: list[str]) -> None:
    import types

    code = compile(payload.read_bytes(), str(payload), "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=str(payload), __builtins__=__builtins__)
    # Pickle and multiprocessing look up the script's own classes there.
    sys.modules["__main__"] = module
    sys.argv = [str(payload), *arguments]
    exec(code, module.__dict__)


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _OWN:
        trace = trace.tb_next
    return trace


def main(arguments: list[str]) -> int:
    directory = None
    if arguments[:1] == ["--from"]:
        directory, arguments = arguments[1], arguments[2:]
    if len(arguments) < 2 or arguments[0] not in ("script", "function"):
        sys.stderr.write("usage: atoll.agent.entrypoint [--from DIR] script|function PAYLOAD …\n")
        return 2
    return start(lambda: run(arguments[0], Path(arguments[1]), arguments[2:], directory))


def as_argv(args: Mapping[str, Any]) -> list[str]:
    """`--key value` for each; text and paths as they are, anything else as JSON."""
    argv: list[str] = []
    for key, value in args.items():
        is_text = isinstance(value, str | os.PathLike)
        argv += [f"--{key}", os.fspath(value) if is_text else json.dumps(value)]
    return argv


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


if __name__ == "__main__":
    # Under its own name, so that a script's `__main__` can take the place of this one.
    from atoll.agent import entrypoint

    sys.exit(entrypoint.main(sys.argv[1:]))
