"""Names whose packages may be missing: they always import, and say what to install when used."""

from __future__ import annotations

from typing import Any


def to_install(extra: str) -> str:
    """What to type for the packages of an extra."""
    return f"pip install 'atoll[{extra}]', or pip install '.[{extra}]' in a clone"


def missing_package(name: str, error: ModuleNotFoundError, extra: str) -> RuntimeError:
    """What is raised where `name` is used without its packages."""
    message = f"{name} needs {error.name}: {to_install(extra)}"
    raised = RuntimeError(message)
    raised.__cause__ = error
    return raised


def class_without_package(name: str, error: ModuleNotFoundError, extra: str) -> type:
    """Stands in for the class `name`, whose module cannot be imported.

    Raises the error itself if it is a module of atoll that is missing.
    """
    if (error.name or "").partition(".")[0] == "atoll":
        raise error

    def refuse(*_: Any, **__: Any) -> None:
        raise missing_package(name, error, extra)

    return type(name, (), {"__init__": refuse, "__doc__": f"Needs atoll[{extra}]."})
