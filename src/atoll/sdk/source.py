"""Code shipped with a training: a script as it is, a function by value."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atoll.core.errors import ValidationError
from atoll.core.spec import Source

# Leaves room for the rest of the body, which is JSON with this in base64.
MAX_BYTES = 44 * 2**20
# A call of one of these runs nothing: the rank would end at once, and well.
LAZY = (
    (inspect.iscoroutinefunction, "an async one"),
    (inspect.isasyncgenfunction, "an async generator"),
    (inspect.isgeneratorfunction, "a generator"),
)


def script_source(path: Path) -> Source:
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = f"cannot read this script: {error.strerror}"
        raise ValidationError("source", str(path), reason) from error
    _check_size(path, content)
    return Source(
        kind="script",
        content=content,
        filename=path.name,
        directory=str(path.resolve().parent),
    )


def function_source(function: Callable[..., Any]) -> Source:
    """Pickled by value, with the helpers of its module and what it closes over.

    Other modules travel by name: they are imported on the rank, from `sys.path` as it is here.
    """
    import cloudpickle

    for is_kind, kind in LAZY:
        if is_kind(function):
            raise ValidationError("source", function, f"expected a plain function, not {kind}")
    module = sys.modules.get(_home(function))
    is_by_name = module is not None and module.__name__ not in ("__main__", "builtins")
    try:
        if is_by_name:
            cloudpickle.register_pickle_by_value(module)
        content = cloudpickle.dumps(function)
    except Exception as error:  # anything may be closed over, and fail in its own way
        reason = f"cannot be shipped: {type(error).__name__}: {error}"
        raise ValidationError("source", function, reason) from error
    finally:
        if is_by_name and module is not None:
            cloudpickle.unregister_pickle_by_value(module)
    _check_size(function, content)
    return Source(kind="function", content=content, filename="function.pkl", directory=_start())


def _home(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(inspect.unwrap(function), "__module__", None) or type(function).__module__


def _start() -> str | None:
    """Where this program imports its own modules from."""
    first = sys.path[0] if sys.path else ""
    return str(Path(first).resolve()) if Path(first).is_dir() else None


def _check_size(what: object, content: bytes) -> None:
    if len(content) > MAX_BYTES:
        raise ValidationError(
            "source",
            what,
            f"expected at most {MAX_BYTES // 2**20} MiB, got {len(content) / 2**20:.0f}: "
            "read large data from a file or an object store",
        )
