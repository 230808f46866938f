"""Functions that travel to ranks: pickled by value with the helpers of their module."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

from atoll.core.errors import ValidationError

# Calling one of these runs nothing: the rank would succeed at once.
LAZY = (
    (inspect.iscoroutinefunction, "an async one"),
    (inspect.isasyncgenfunction, "an async generator"),
    (inspect.isgeneratorfunction, "a generator"),
)


def pickle_function(field: str, function: Callable[..., Any]) -> bytes:
    """The function with its closure. Other modules are pickled by name.

    Raises ValidationError for what runs nothing when it is called, or cannot be pickled.
    """
    for is_kind, kind in LAZY:
        if is_kind(function):
            raise ValidationError(field, function, f"expected a plain function, not {kind}")
    return pickle_value(field, function, _module_of(function))


def pickle_value(field: str, value: Any, module: Any = None) -> bytes:
    """Pickles `module` by value, because a rank may not be able to import it."""
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
    """None if ranks have it anyway."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(inspect.unwrap(function), "__module__", None) or type(function).__module__
    top = name.partition(".")[0]
    is_shared = top in ("__main__", "atoll") or top in sys.stdlib_module_names
    return None if is_shared else sys.modules.get(name)
