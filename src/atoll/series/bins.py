"""Many series as one picture: in each span of time the least, the mean and the largest over all
ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from atoll.series.fold import AT, BAD, COUNT, LARGEST, LEAST, MEAN, Series


class Band(NamedTuple):
    """Columns of equal length. NaN where a bin has no point."""

    at: list[float]
    low: list[float]
    p10: list[float]
    mean: list[float]
    p90: list[float]
    high: list[float]
    ranks: list[int]
    bad: int


def band_of(series: Sequence[Series], start: float, end: float, count: int) -> Band:
    """At most `count` bins from `start` to `end`; bins without points are left out."""
    width = max(end - start, 1e-9) / count
    held: dict[int, list[tuple[float, float, float]]] = {}  # least, mean, largest of each rank
    bad = 0
    for one in series:
        columns = one.columns
        times, numbers, wrong = columns[AT], columns[COUNT], columns[BAD]
        last = count - 1
        places = [min(last, int((at - start) / width)) for at in times]
        rows = zip(places, columns[LEAST], columns[MEAN], columns[LARGEST], strict=True)
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
                own[place] = [least, mean * number, largest, number]
            else:
                seen[0] = min(seen[0], least)
                seen[1] += mean * number
                seen[2] = max(seen[2], largest)
                seen[3] += number
        for place, (least, total, largest, number) in own.items():
            held.setdefault(place, []).append((least, total / number, largest))
    band = Band([], [], [], [], [], [], [], bad)
    for place in sorted(held):
        lows, unsorted_means, highs = zip(*held[place], strict=True)
        means = sorted(unsorted_means)
        band.at.append(start + (place + 0.5) * width)
        band.low.append(min(lows))
        band.p10.append(_share(means, 0.1))
        band.mean.append(math.fsum(means) / len(means))
        band.p90.append(_share(means, 0.9))
        band.high.append(max(highs))
        band.ranks.append(len(means))
    return band


def _share(values: Sequence[float], share: float) -> float:
    """The value below which that share of the sorted values lies."""
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)
