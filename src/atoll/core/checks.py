"""Small checks on values, each refusal naming the field, the value and what would be right."""

from __future__ import annotations

import re
from typing import Any

from atoll.core.errors import ValidationError

# Set by atoll for every rank; a value of the user's own would be a lie to the script.
RESERVED_ENV = frozenset({"RANK", "REPLICA_RANK", "WORLD_SIZE", "NODE_NAME"})
RESERVED_ENV_PREFIXES = ("ATOLL_", "BASILICA_")
ARGS_VARIABLE = "ATOLL_ENTRYPOINT_ARGS"  # the launcher of replicas sets it, through the spec

NAME_PATTERN = "^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
TEXT = "expected text in UTF-8 without NUL bytes"
_NAME = re.compile(NAME_PATTERN)
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def check_name(field: str, value: object) -> None:
    """Names are DNS-1123 labels: they become host names, paths and URLs."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValidationError(
            field,
            value,
            "expected 1 to 63 lower-case letters, digits or '-', starting and ending with a "
            "letter or digit",
        )


def check_int(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValidationError(field, value, f"expected a whole number from {low} to {high}")


def check_number(field: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise ValidationError(field, value, f"expected a number from {low:g} to {high:g}")


def check_timeout(value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value >= 0:  # type: ignore[operator]
        raise ValidationError("timeout", value, "expected seconds, 0 or more")


def check_choice(field: str, value: object, choices: Any) -> None:
    if value not in choices.__args__:
        raise ValidationError(field, value, "expected " + " or ".join(map(repr, choices.__args__)))


def is_text(value: object) -> bool:
    """Whether a program can be given it: no NUL, and nothing that UTF-8 has no bytes for."""
    if not isinstance(value, str) or "\0" in value:
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_strings(field: str, values: object) -> None:
    if not isinstance(values, list | tuple):
        raise ValidationError(field, values, "expected a list of strings")
    for at, value in enumerate(values):
        if not is_text(value):
            raise ValidationError(f"{field}[{at}]", value, TEXT)


def check_env(field: str, env: object) -> None:
    if not isinstance(env, dict):
        raise ValidationError(field, env, "expected names and values")
    for name, value in env.items():
        if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
            raise ValidationError(field, name, "expected letters, digits and '_', no digit first")
        if not is_text(value):
            raise ValidationError(f"{field}.{name}", value, TEXT)
        is_ours = name.startswith(RESERVED_ENV_PREFIXES) and name != ARGS_VARIABLE
        if name in RESERVED_ENV or is_ours:
            raise ValidationError(f"{field}.{name}", value, "atoll sets this one for every rank")
