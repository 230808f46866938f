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
from typing import Any, NamedTuple

from atoll.core.metrics import MAX_COUNT, MAX_TIME

FIELDS = ("at", "step", "min", "mean", "max", "count", "bad", "attempt")
AT, STEP, MIN, MEAN, MAX, COUNT, BAD, ATTEMPT = range(len(FIELDS))
MIN_BUCKETS = 16  # fewer draw no curve
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


# Merges the series of all ranks into one band: min, quantiles, mean and max in each bin, over time
# or over another position of the points. Pure.

MIN_BINS = 20  # of a band: fewer draw no curve
POINTS_A_BIN = 2  # of each rank: fewer, and the mean would jump with who reported
PAUSE = 8  # times the usual distance of two points is a gap


class Band(NamedTuple):
    """Columns of equal length. A row of NaN is a gap in the line."""

    at: list[float]
    low: list[float]
    p10: list[float]
    mean: list[float]
    p90: list[float]
    high: list[float]
    ranks: list[int]
    bad: int


def band_of(
    series: Sequence[Series],
    start: float,
    end: float,
    count: int,
    positions: Sequence[Sequence[float]] | None = None,
) -> Band:
    """Merges points into at most `count` bins from `start` to `end`; empty bins are left out.

    `positions` has those of the points of each series, NaN for points to leave out; without it,
    they are the times.

    With several series, bins are wide enough for most ranks to have points in each: otherwise the
    mean would jump with the ranks that happened to report. There is a gap where nobody reported for
    long, and in a single series where the next attempt begins.
    """
    is_time = positions is None
    if positions is None:
        positions = [one.columns[AT] for one in series]
    if len(series) > 1:
        count = min(count, max(MIN_BINS, int((end - start) / _usual_spacing(positions))))
    width = max(end - start, 1e-9) / count
    by_bin: dict[int, list[tuple[float, float, float]]] = {}  # least, mean, largest of each rank
    bad = 0
    for one, placed in zip(series, positions, strict=True):
        columns = one.columns
        numbers, wrong = columns[COUNT], columns[BAD]
        last = count - 1
        bins = [-1 if at != at else min(last, int((at - start) / width)) for at in placed]
        rows = zip(bins, columns[MIN], columns[MEAN], columns[MAX], strict=True)
        is_inside = len(placed) and all(start <= at <= end for at in placed)
        if is_inside and 0.0 not in numbers and len(set(bins)) == len(bins):
            bad += int(sum(wrong))
            for index, least, mean, largest in rows:
                by_bin.setdefault(index, []).append((least, mean, largest))
            continue
        own: dict[int, list[float]] = {}
        for at, number, off, (index, least, mean, largest) in zip(
            placed, numbers, wrong, rows, strict=True
        ):
            if not start <= at <= end:  # NaN too
                continue
            bad += int(off)
            if not number:
                continue
            merged = own.get(index)
            if merged is None:
                own[index] = [least, mean, largest, number]
            else:
                total = merged[3] + number
                # In two parts: a sum could overflow where the mean does not.
                merged[1] = merged[1] * (merged[3] / total) + mean * (number / total)
                merged[0], merged[2] = min(merged[0], least), max(merged[2], largest)
                merged[3] = total
        for index, (least, mean, largest, _) in own.items():
            by_bin.setdefault(index, []).append((least, mean, largest))
    band = Band([], [], [], [], [], [], [], bad)
    for index in sorted(by_bin):
        lows, unsorted_means, highs = zip(*by_bin[index], strict=True)
        means = sorted(unsorted_means)
        band.at.append(start + (index + 0.5) * width)
        band.low.append(min(lows))
        band.p10.append(_quantile(means, 0.1))
        band.mean.append(math.fsum(mean / len(means) for mean in means))
        band.p90.append(_quantile(means, 0.9))
        band.high.append(max(highs))
        band.ranks.append(len(means))
    starts = _attempt_starts(series[0]) if is_time and len(series) == 1 else []
    return _with_gaps(
        band, {min(count - 1, int((at - start) / width)) for at in starts}, start, width
    )


def _usual_spacing(positions: Sequence[Sequence[float]]) -> float:
    """The distance over which a rank usually reports `POINTS_A_BIN` points."""
    usable = ([at for at in placed if at == at] for placed in positions)
    spacings = sorted(
        (placed[-1] - placed[0]) / (len(placed) - 1) for placed in usable if len(placed) > 1
    )
    return POINTS_A_BIN * max(spacings[len(spacings) // 2], 1e-9) if spacings else 1e-9


def _attempt_starts(one: Series) -> list[float]:
    """The times of the first points of all attempts but the first."""
    attempts, times = one.columns[ATTEMPT], one.columns[AT]
    return [times[n] for n in range(1, len(one)) if attempts[n] != attempts[n - 1]]


def _with_gaps(band: Band, starts: set[int], start: float, width: float) -> Band:
    """The band with a row of NaN in each gap. `starts`: bins in which another attempt begins."""
    gaps = sorted(b - a for a, b in zip(band.at, band.at[1:], strict=False))
    usual = gaps[len(gaps) // 2] if len(gaps) > 2 else math.inf
    complete = Band([], [], [], [], [], [], [], band.bad)
    columns = list(zip(*band[:7], strict=True))
    for number, row in enumerate(columns):
        if number:
            before = columns[number - 1][0]
            is_next = any(before < start + (bin_ + 0.5) * width <= row[0] for bin_ in starts)
            if is_next or row[0] - before > PAUSE * usual:
                _append(complete, ((before + row[0]) / 2, *[math.nan] * 5, 0))
        _append(complete, row)
    return complete


def _append(band: Band, row: Sequence[float]) -> None:
    columns: Sequence[list[float]] = band[:7]  # type: ignore[assignment]
    for column, part in zip(columns, row, strict=True):
        column.append(part)


def _quantile(values: Sequence[float], share: float) -> float:
    """The quantile of sorted values, interpolated."""
    index = share * (len(values) - 1)
    low = int(index)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (index - low)
