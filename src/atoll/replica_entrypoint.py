"""`python -m atoll.replica_entrypoint`: what an image of replicas runs by default.

`ENTRYPOINT` names what runs, `module:function`, `package.module` or a script of the image, and
ATOLL_ENTRYPOINT_ARGS its arguments as JSON. Rank, world and store come from the environment.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import MutableMapping
from typing import Any

from atoll.rank.entrypoint import write_error_file
from atoll.rank.keywords import RANK, READERS, URI, WORLD, call

ENTRYPOINT = "ENTRYPOINT"
ARGS = "ATOLL_ENTRYPOINT_ARGS"
USAGE = 2


def main(env: MutableMapping[str, str] | None = None) -> int:
    """Runs what ENTRYPOINT names. Bad settings are one line on stderr, and exit code 2."""
    env = os.environ if env is None else env
    try:
        entry, args = read_settings(env)
        fill_in(env)
    except ValueError as error:
        sys.stderr.write(f"atoll.replica_entrypoint: {error}\n")
        return USAGE
    try:
        run(entry, args, env)
    except Exception as error:
        write_error_file(error)
        raise
    return 0


def read_settings(env: MutableMapping[str, str]) -> tuple[str, dict[str, Any]]:
    entry = env.get(ENTRYPOINT, "").strip()
    expected = "expected module:function, package.module or a script of the image"
    if not entry:
        raise ValueError(f"{ENTRYPOINT} is not set: {expected}")
    if entry.endswith(".py") or "/" in entry:
        if not os.path.isfile(entry):
            raise ValueError(f"{ENTRYPOINT}: {entry!r}: no such file; {expected}")
    elif not all(part.isidentifier() for part in entry.replace(":", ".", 1).split(".")):
        raise ValueError(f"{ENTRYPOINT}: {entry!r}: {expected}")
    try:
        args = json.loads(env.get(ARGS) or "{}")
    except ValueError as error:
        raise ValueError(f"{ARGS}: expected JSON: {error}") from error
    if not isinstance(args, dict):
        raise ValueError(f"{ARGS}: {args!r}: expected an object with names and values")
    return entry, args


def fill_in(env: MutableMapping[str, str]) -> None:
    """What one variable says of rank, world and store, the others say too, where they are unset.

    Raises ValueError where the rank or the world is not known at all.
    """
    for names, reader in ((RANK[:3], "rank"), (WORLD, "world_size")):
        value = str(READERS[reader](env))
        for name in names:
            env.setdefault(name, value)
    if any(env.get(name) for name in URI):
        value = str(READERS["rendezvous_uri"](env))
        for name in URI:
            env[name] = env.get(name) or value


def run(entry: str, args: dict[str, Any], env: MutableMapping[str, str]) -> None:
    sys.path.insert(0, os.getcwd())
    module, _, function = entry.partition(":")
    if function:
        from atoll.rank.replica_entry import hand_in, named_function

        hand_in(call(named_function(entry), args, env))
        return
    words = [part for key, value in args.items() for part in (f"--{key}", _text(value))]
    sys.argv = [entry, *words]
    if entry.endswith(".py") or "/" in entry:
        sys.path[0] = os.path.dirname(os.path.abspath(entry))
        runpy.run_path(entry, run_name="__main__")
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


if __name__ == "__main__":
    sys.exit(main())
