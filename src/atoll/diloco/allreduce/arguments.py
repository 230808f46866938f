"""The arguments of an all-reduce, each refused by name before anything is written."""

from __future__ import annotations

import math
import operator
import os
import re
from typing import Any

from atoll.core.checks import check_int, check_number
from atoll.core.errors import ValidationError

MOST_REPLICAS = 99_999  # a rank has five digits in the names of objects
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def read_whole(field: str, given: Any, low: int, high: int) -> int:
    """A plain int, also out of numpy's and torch's."""
    try:
        number = given if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = given
    check_int(field, number, low, high)
    return int(number)


def check_seconds(field: str, given: float) -> None:
    check_number(field, given, 1e-6, math.inf)


def read_min(given: int | None, world_size: int) -> int:
    if given is not None:
        return read_whole("min_replicas", given, 1, world_size)
    told = os.environ.get("ATOLL_WORLD_MIN", "")
    if told.isdecimal() and 1 <= int(told) <= world_size:
        return int(told)
    return (world_size + 1) // 2


def read_run_id(given: str | None) -> str:
    name = given or os.environ.get("ATOLL_RUN_ID") or os.environ.get("ATOLL_UID") or "run"
    if not isinstance(name, str) or not RUN_ID.fullmatch(name):
        raise ValidationError("run_id", name, "expected letters, digits, '.', '_' and '-'")
    return name


def read_weight(given: Any) -> float:
    try:
        weight = math.nan if isinstance(given, str) else float(given)  # a 0-d tensor is one too
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise ValidationError("weight", given, "expected a number greater than 0")
    return weight
