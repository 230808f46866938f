"""Merges the series of all ranks into one band over time: min, quantiles, mean and max in each bin.
Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from atoll.metrics.series import AT, ATTEMPT, BAD, COUNT, MAX, MEAN, MIN, Series

MIN_BINS = 20
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


def band_of(series: Sequence[Series], start: float, end: float, count: int) -> Band:
    """Merges points into at most `count` bins from `start` to `end`; empty bins are left out.

    With several series, bins are wide enough for most ranks to have points in each: otherwise the
    mean would jump with the ranks that happened to report. There is a gap where nobody reported for
    long, and in a single series where the next attempt begins.
    """
    if len(series) > 1:
        count = min(count, max(MIN_BINS, int((end - start) / _usual_spacing(series))))
    width = max(end - start, 1e-9) / count
    by_bin: dict[int, list[tuple[float, float, float]]] = {}  # least, mean, largest of each rank
    bad = 0
    for one in series:
        columns = one.columns
        times, numbers, wrong = columns[AT], columns[COUNT], columns[BAD]
        last = count - 1
        bins = [min(last, int((at - start) / width)) for at in times]
        rows = zip(bins, columns[MIN], columns[MEAN], columns[MAX], strict=True)
        is_inside = len(times) and start <= min(times) and max(times) <= end
        if is_inside and 0.0 not in numbers and len(set(bins)) == len(bins):
            bad += int(sum(wrong))
            for index, least, mean, largest in rows:
                by_bin.setdefault(index, []).append((least, mean, largest))
            continue
        own: dict[int, list[float]] = {}
        for at, number, off, (index, least, mean, largest) in zip(
            times, numbers, wrong, rows, strict=True
        ):
            if not start <= at <= end:
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
    starts = _attempt_starts(series[0]) if len(series) == 1 else []
    return _with_gaps(
        band, {min(count - 1, int((at - start) / width)) for at in starts}, start, width
    )


def _usual_spacing(series: Sequence[Series]) -> float:
    """Seconds in which a rank usually reports `POINTS_A_BIN` points."""
    spacings = sorted(
        (one.columns[AT][-1] - one.columns[AT][0]) / (len(one) - 1)
        for one in series
        if len(one) > 1
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
