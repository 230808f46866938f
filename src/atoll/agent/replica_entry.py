"""Runs a function as a replica, and returns its result or its error.

A script does not need this; it may call `set_result` to return a result.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback
from typing import Any

from atoll.agent.entrypoint import write_error_file
from atoll.agent.keywords import call
from atoll.agent.result import hand_in, set_result

__all__ = ["hand_in", "main", "named_function", "set_result"]


def main(payload: bytes) -> None:
    """Runs the function in the payload; the process ends as the function did."""
    try:
        run(payload)
    except Exception as error:
        traceback.print_exc()
        write_error_file(error)
        sys.exit(1)


def run(payload: bytes) -> None:
    parts = pickle.loads(payload)
    sys.path[:] = [*sys.path, *(p for p in parts["path"] if p not in sys.path)]
    if "function" in parts:
        function = pickle.loads(parts["function"])
    else:
        function = named_function(parts["name"])
    args = {key: pickle.loads(value) for key, value in parts["args"].items()}
    hand_in(call(function, args, os.environ))


def named_function(name: str) -> Any:
    module, _, attribute = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value
