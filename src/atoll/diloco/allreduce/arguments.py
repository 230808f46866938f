"""The arguments of an all-reduce, checked, with what the environment says where one is missing."""

from __future__ import annotations

import math
import operator
import os
import re
from typing import Any

from atoll.core.checks import check_int, check_number
from atoll.core.errors import ValidationError
from atoll.diloco.allreduce.start import least_of, read_launch

MAX_REPLICAS = 99_999  # a rank has five digits in the names of objects
MAX_ROUNDS = 10**8
MAX_WEIGHT = 1e18
RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def read_complete(field: str, value: Any, low: int, high: int) -> int:
    """`value` as a plain int; integers of numpy and torch are accepted too.

    Raises ValidationError unless it is a whole number from `low` to `high`.
    """
    try:
        number = value if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = value
    check_int(field, number, low, high)
    return int(number)


def as_lists(tensors: Any, out: Any) -> tuple[Any, Any, bool]:
    """Both as lists, and whether `tensors` is one tensor.

    A tensor is a sequence too, of its rows: what has a shape is never taken for a list.
    """
    is_one = hasattr(tensors, "shape")
    if out is not None and hasattr(out, "shape") != is_one:
        expected = "expected one tensor, too" if is_one else "expected a list of tensors"
        raise ValidationError("out", type(out).__name__, expected)
    if not is_one:
        return tensors, out, False
    return [tensors], None if out is None else [out], True


def check_seconds(field: str, seconds: float) -> None:
    check_number(field, seconds, 1e-6, math.inf)


def read_min(min_replicas: int | None, world_size: int) -> int:
    if min_replicas is not None:
        return read_complete("min_replicas", min_replicas, 1, world_size)
    launch = read_launch(world_size)
    if launch is not None:
        return least_of(launch)
    variable = os.environ.get("ATOLL_WORLD_MIN", "")
    if variable.isdecimal() and 1 <= int(variable) <= world_size:
        return int(variable)
    return (world_size + 1) // 2


def read_run_id(run_id: str | None) -> str:
    name = run_id or os.environ.get("ATOLL_RUN_ID") or os.environ.get("ATOLL_UID") or "run"
    if not isinstance(name, str) or not RUN_ID.fullmatch(name):
        raise ValidationError("run_id", name, "expected letters, digits, '.', '_' and '-'")
    return name


def read_round(round_id: Any) -> int | None:
    return None if round_id is None else read_complete("round_id", round_id, 0, MAX_ROUNDS)


def read_weight(value: Any) -> float:
    try:
        weight = math.nan if isinstance(value, str) else float(value)  # also of a 0-d tensor
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
    if not 0 < weight <= MAX_WEIGHT:
        raise ValidationError(
            "weight", value, f"expected a number greater than 0, at most {MAX_WEIGHT:g}"
        )
    return weight
