"""One series: points over time in a bounded number of buckets. Pure.

A bucket has the min, mean and max of the points merged into it, so a single outlier is never lost.
When there are too many buckets, neighbours are merged, and from then on a bucket takes twice as
many points.
"""

from __future__ import annotations

import math
import sys
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

from atoll.core.metrics import MAX_COUNT, MAX_TIME

FIELDS = ("at", "step", "min", "mean", "max", "count", "bad", "attempt")
AT, STEP, MIN, MEAN, MAX, COUNT, BAD, ATTEMPT = range(len(FIELDS))
MIN_BUCKETS = 16
_HEADER = 8  # bytes: the width


class Series:
    """Buckets in order of arrival, as columns. `step` is NaN where none was reported."""

    __slots__ = ("columns", "width")

    def __init__(self) -> None:
        self.columns = tuple(array("d") for _ in FIELDS)
        self.width = 1  # how many points a bucket takes

    def __len__(self) -> int:
        return len(self.columns[AT])

    def add(self, point: Sequence[float], attempt: int, most: int) -> None:
        """Adds a point (time, step, min, mean, max, count, count of non-finite values) and keeps at
        most `most` buckets."""
        columns = self.columns
        if self.width > 1 and len(self) and self._has_room(point, attempt):
            self._merge_into(len(self) - 1, point)
            return
        for column, part in zip(columns, (*point, float(attempt)), strict=True):
            column.append(part)
        while len(self) > most:
            self.halve()

    def _has_room(self, point: Sequence[float], attempt: int) -> bool:
        """Whether the last bucket has room for the point."""
        columns = self.columns
        bucket_count = columns[COUNT][-1] + columns[BAD][-1]
        return (
            columns[ATTEMPT][-1] == attempt
            and bucket_count + point[COUNT] + point[BAD] <= self.width
        )

    def _merge_into(self, at: int, point: Sequence[float]) -> None:
        columns = self.columns
        columns[AT][at], columns[STEP][at] = point[AT], point[STEP]
        columns[BAD][at] += point[BAD]
        count = point[COUNT]
        if not count:
            return
        bucket_count = columns[COUNT][at]
        if not bucket_count:
            for field in (MIN, MEAN, MAX, COUNT):
                columns[field][at] = point[field]
            return
        total = bucket_count + count
        columns[COUNT][at] = total
        columns[MIN][at] = min(columns[MIN][at], point[MIN])
        columns[MAX][at] = max(columns[MAX][at], point[MAX])
        # In two parts: a sum could overflow where the mean does not.
        columns[MEAN][at] = columns[MEAN][at] * (bucket_count / total) + point[MEAN] * (
            count / total
        )

    def halve(self) -> None:
        """Merges pairs of neighbours; across attempts only if each bucket is another attempt."""
        self.width *= 2
        before = self._rows()
        merged = Series()
        for row in before:
            if len(merged) and merged.columns[ATTEMPT][-1] == row[ATTEMPT]:
                bucket_count = merged.columns[COUNT][-1] + merged.columns[BAD][-1]
                if bucket_count + row[COUNT] + row[BAD] <= self.width:
                    merged._merge_into(len(merged) - 1, row)
                    continue
            for column, part in zip(merged.columns, row, strict=True):
                column.append(part)
        if len(merged) == len(before):  # every bucket is another attempt
            merged = _merge_pairs(before)
        self.columns = merged.columns

    def _rows(self) -> list[tuple[float, ...]]:
        return list(zip(*self.columns, strict=True))

    def pack(self) -> bytes:
        header = self.width.to_bytes(_HEADER, "little")
        parts = [array("d", column) for column in self.columns]
        if sys.byteorder == "big":
            for part in parts:
                part.byteswap()
        return header + zlib.compress(b"".join(part.tobytes() for part in parts), 1)

    @classmethod
    def unpack(cls, data: bytes) -> Series:
        series = cls()
        series.width = int.from_bytes(data[:_HEADER], "little")
        values = array("d", zlib.decompress(data[_HEADER:]))
        if sys.byteorder == "big":
            values.byteswap()
        length = len(values) // len(FIELDS)
        series.columns = tuple(values[at * length : (at + 1) * length] for at in range(len(FIELDS)))
        return series

    def copy(self) -> Series:
        other = Series()
        other.width = self.width
        other.columns = tuple(column[:] for column in self.columns)
        return other


def _merge_pairs(rows: Sequence[tuple[float, ...]]) -> Series:
    paired = Series()
    for at, row in enumerate(rows):
        if at % 2:
            paired._merge_into(len(paired) - 1, row)
            paired.columns[ATTEMPT][-1] = row[ATTEMPT]
            continue
        for column, part in zip(paired.columns, row, strict=True):
            column.append(part)
    return paired


def point_of(parts: Sequence[Any]) -> tuple[float, ...]:
    """Converts a point from the wire to the form that `Series.add` takes.

    The short form is [time, step, value]; NaN and infinities are text. Raises ValueError or
    TypeError for anything else, and for numbers out of bounds.
    """
    if len(parts) == 3:
        at, step, value = parts
        value = float(value)
        is_finite = math.isfinite(value)
        numbers: tuple[float, ...] = (value, value, value, float(is_finite), float(not is_finite))
    elif len(parts) == 7:
        at, step, *fields = parts
        numbers = tuple(float(part) for part in fields)
        if not all(0 <= count <= MAX_COUNT for count in numbers[3:]):
            raise ValueError(f"counts of a point must be 0 to {MAX_COUNT}, got {fields[3:]}")
        if numbers[3] and not all(map(math.isfinite, numbers[:3])):
            raise ValueError(f"expected finite numbers, got {fields[:3]}")
    else:
        raise ValueError(f"a point has 3 or 7 parts, got {len(parts)}")
    at = float(at)
    if not 0 <= at <= MAX_TIME:
        raise ValueError(f"expected a time in seconds since 1970, got {at}")
    if step is not None and not abs(float(step)) <= MAX_COUNT:
        raise ValueError(f"expected a step of at most {MAX_COUNT}, got {step}")
    return (at, math.nan if step is None else float(step), *numbers)
