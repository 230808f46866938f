"""Many series as one picture: in each span of time the least, the mean and the largest over all
ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from atoll.metrics.series import AT, ATTEMPT, BAD, COUNT, MAX, MEAN, MIN, Series

MIN_BINS = 20
POINTS_A_BIN = 2  # of a rank, where there are several
PAUSE = 8  # times as long as usual without a point is a gap


class Band(NamedTuple):
    """Columns of equal length. NaN in all of them but the times where a line is to break."""

    at: list[float]
    low: list[float]
    p10: list[float]
    mean: list[float]
    p90: list[float]
    high: list[float]
    ranks: list[int]
    bad: int


def band_of(series: Sequence[Series], start: float, end: float, count: int) -> Band:
    """At most `count` bins from `start` to `end`; bins without points are left out.

    Of several series bins are so wide that each has points in most of them: else the mean would
    jump with whoever has told something in a bin. There is a break where nobody has told anything
    for long, and in a lone series where the next attempt begins.
    """
    if len(series) > 1:
        count = min(count, max(MIN_BINS, int((end - start) / _usual_spacing(series))))
    width = max(end - start, 1e-9) / count
    held: dict[int, list[tuple[float, float, float]]] = {}  # least, mean, largest of each rank
    bad = 0
    for one in series:
        columns = one.columns
        times, numbers, wrong = columns[AT], columns[COUNT], columns[BAD]
        last = count - 1
        places = [min(last, int((at - start) / width)) for at in times]
        rows = zip(places, columns[MIN], columns[MEAN], columns[MAX], strict=True)
        is_whole = len(times) and start <= min(times) and max(times) <= end
        if is_whole and 0.0 not in numbers and len(set(places)) == len(places):
            bad += int(sum(wrong))
            for place, least, mean, largest in rows:
                held.setdefault(place, []).append((least, mean, largest))
            continue
        own: dict[int, list[float]] = {}
        for at, number, off, (place, least, mean, largest) in zip(
            times, numbers, wrong, rows, strict=True
        ):
            if not start <= at <= end:
                continue
            bad += int(off)
            if not number:
                continue
            seen = own.get(place)
            if seen is None:
                own[place] = [least, mean, largest, number]
            else:
                total = seen[3] + number
                # In two parts: a sum could overflow where the mean does not.
                seen[1] = seen[1] * (seen[3] / total) + mean * (number / total)
                seen[0], seen[2] = min(seen[0], least), max(seen[2], largest)
                seen[3] = total
        for place, (least, mean, largest, _) in own.items():
            held.setdefault(place, []).append((least, mean, largest))
    band = Band([], [], [], [], [], [], [], bad)
    for place in sorted(held):
        lows, unsorted_means, highs = zip(*held[place], strict=True)
        means = sorted(unsorted_means)
        band.at.append(start + (place + 0.5) * width)
        band.low.append(min(lows))
        band.p10.append(_share(means, 0.1))
        band.mean.append(math.fsum(mean / len(means) for mean in means))
        band.p90.append(_share(means, 0.9))
        band.high.append(max(highs))
        band.ranks.append(len(means))
    begun = _attempts(series[0]) if len(series) == 1 else []
    return _broken(band, {min(count - 1, int((at - start) / width)) for at in begun}, start, width)


def _usual_spacing(series: Sequence[Series]) -> float:
    """Seconds in which a rank usually tells so many points."""
    spacings = sorted(
        (one.columns[AT][-1] - one.columns[AT][0]) / (len(one) - 1)
        for one in series
        if len(one) > 1
    )
    return POINTS_A_BIN * max(spacings[len(spacings) // 2], 1e-9) if spacings else 1e-9


def _attempts(one: Series) -> list[float]:
    """When attempts after the first one told something for the first time."""
    attempts, times = one.columns[ATTEMPT], one.columns[AT]
    return [times[n] for n in range(1, len(one)) if attempts[n] != attempts[n - 1]]


def _broken(band: Band, begun: set[int], start: float, width: float) -> Band:
    """The band with a row of NaN in each gap. `begun`: bins in which another attempt begins."""
    own_keys_only = sorted(b - a for a, b in zip(band.at, band.at[1:], strict=False))
    usual = own_keys_only[len(own_keys_only) // 2] if len(own_keys_only) > 2 else math.inf
    whole = Band([], [], [], [], [], [], [], band.bad)
    columns = list(zip(*band[:7], strict=True))
    for number, row in enumerate(columns):
        if number:
            before = columns[number - 1][0]
            is_next = any(before < start + (bin_ + 0.5) * width <= row[0] for bin_ in begun)
            if is_next or row[0] - before > PAUSE * usual:
                _append(whole, ((before + row[0]) / 2, *[math.nan] * 5, 0))
        _append(whole, row)
    return whole


def _append(band: Band, row: Sequence[float]) -> None:
    columns: Sequence[list[float]] = band[:7]  # type: ignore[assignment]
    for column, part in zip(columns, row, strict=True):
        column.append(part)


def _share(values: Sequence[float], share: float) -> float:
    """The value below which that share of the sorted values lies."""
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)
