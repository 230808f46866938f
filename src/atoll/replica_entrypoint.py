"""`python -m atoll.replica_entrypoint`: what an image of replicas runs by default.

`ENTRYPOINT` names what runs, `module:function`, `package.module` or a script of the image, and
ATOLL_ENTRYPOINT_ARGS its arguments as JSON. Rank, world and store come from the environment.
Where ENTRYPOINT is this module, or composer's of that name, `trainer_module` and `trainer_fn` among
the arguments are what runs; flags of composer's, such as --trainer-module, say the same.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

from atoll.agent import process
from atoll.agent.entrypoint import (
    OWN_MODULES,
    RANK,
    READERS,
    URI,
    WORLD,
    MissingCode,
    as_argv,
    call,
    check_module,
    import_function,
    run_script,
    start,
    trainer_call,
)
from atoll.agent.result import set_return_value

ENTRYPOINT = "ENTRYPOINT"
ARGS = "ATOLL_ENTRYPOINT_ARGS"
USAGE = 2  # as shells have it
EXPECTED = "expected module:function, package.module or a script of the image"


def main(argv: Sequence[str] = (), env: MutableMapping[str, str] | None = None) -> int:
    """Runs what ENTRYPOINT names. Bad settings are one line on stderr, and exit code 2."""
    env = os.environ if env is None else env
    try:
        take_flags(argv, env)
        entry, args = read_settings(env)
        fill_in(env)
    except ValueError as error:
        return refuse(error)
    return start(lambda: run(entry, args, env))


def take_flags(argv: Sequence[str], env: MutableMapping[str, str]) -> None:
    """Sets the variables that composer's flags stand for."""
    if not argv:
        return
    parser = argparse.ArgumentParser(prog="atoll.replica_entrypoint", allow_abbrev=False)
    for flag in ("--rendezvous", "--world-size"):
        parser.add_argument(flag)
    parser.add_argument("--trainer-module", required=True)
    parser.add_argument("--trainer-fn", default="train")
    parser.add_argument("--trainer-kwargs-json", default="{}")
    flags = vars(parser.parse_args(argv))
    for name, variable in (("rendezvous", URI[0]), ("world_size", WORLD[0])):
        if (value := flags.pop(name)) is not None:
            env[variable] = value
    env[ENTRYPOINT], env[ARGS] = OWN_MODULES[0], json.dumps(flags)


def refuse(error: ValueError | str) -> int:
    sys.stderr.write(f"atoll.replica_entrypoint: {error}\n")
    process.write_error_file(str(error))
    return USAGE


def read_settings(env: MutableMapping[str, str]) -> tuple[str, dict[str, Any]]:
    entry = env.get(ENTRYPOINT, "").strip()
    if not entry:
        raise ValueError(f"{ENTRYPOINT} is not set: {EXPECTED}")
    if entry.endswith(".py") or "/" in entry:
        if not os.path.isfile(entry):
            raise ValueError(f"{ENTRYPOINT}: {entry!r}: no such file; {EXPECTED}")
    elif not all(part.isidentifier() for part in entry.replace(":", ".", 1).split(".")):
        raise ValueError(f"{ENTRYPOINT}: {entry!r}: {EXPECTED}")
    try:
        args = json.loads(env.get(ARGS) or "{}")
    except ValueError as error:
        raise ValueError(f"{ARGS}: expected JSON: {error}") from error
    if not isinstance(args, dict):
        raise ValueError(f"{ARGS}: {args!r}: expected an object with names and values")
    if entry in OWN_MODULES:
        try:
            return trainer_call(args)
        except ValueError as error:
            raise ValueError(f"{ENTRYPOINT} is {entry}, and {error}") from error
    return entry, args


def fill_in(env: MutableMapping[str, str]) -> None:
    """What one variable says of rank, world and store, the others say too, where they are unset.

    Raises ValueError where the rank or the world is not known at all, or they do not agree.
    """
    for names, reader in ((RANK[:3], "rank"), (WORLD, "world_size")):
        value = str(READERS[reader](env))
        for name in names:
            env.setdefault(name, value)
    rank, world = int(READERS["rank"](env)), int(READERS["world_size"](env))
    if rank >= world:
        raise ValueError(f"{RANK[0]}: {rank}: expected below WORLD_SIZE, which is {world}")
    if any(env.get(name) for name in URI):
        value = str(READERS["rendezvous_uri"](env))
        for name in URI:
            env[name] = env.get(name) or value


def run(entry: str, args: dict[str, Any], env: MutableMapping[str, str]) -> None:
    sys.path.insert(0, os.getcwd())
    is_script = entry.endswith(".py") or "/" in entry
    try:
        if ":" in entry:
            set_return_value(call(import_function(entry), args, env))
            return
        if not is_script:
            check_module(entry)
    except MissingCode as error:
        raise SystemExit(refuse(f"{ENTRYPOINT}: {error}; {EXPECTED}")) from error
    flags = as_argv(args)
    sys.argv = [entry, *flags]
    if is_script:
        sys.path[0] = os.path.dirname(os.path.abspath(entry))
        run_script(Path(entry), flags)
    else:
        runpy.run_module(entry, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
