"""Sets of positions as sorted, disjoint ranges that do not touch. Every operation is linear."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Range = tuple[int, int]  # first position, and the one after the last
Ranges = tuple[Range, ...]


def of(positions: Iterable[int]) -> Ranges:
    """The set of some positions, in any order."""
    return join((at, at + 1) for at in positions)


def join(parts: Iterable[Range]) -> Ranges:
    """The union of ranges in any order, which may overlap."""
    out: list[Range] = []
    for start, stop in sorted(parts):
        if start >= stop:
            continue
        if out and start <= out[-1][1]:
            if stop > out[-1][1]:
                out[-1] = out[-1][0], stop
        else:
            out.append((start, stop))
    return tuple(out)


def union(*sets: Ranges) -> Ranges:
    """All positions of the sets. Runs of sorted ranges are merged, which is what sorting does."""
    full = [each for each in sets if each]
    if len(full) < 2:
        return full[0] if full else ()
    return join(part for each in full for part in each)


def minus(complete: Ranges, part: Ranges) -> Ranges:
    """The positions of `complete` that are not in `part`."""
    if not part or not complete:
        return complete
    out: list[Range] = []
    at = 0
    for start, stop in complete:
        while at < len(part) and part[at][1] <= start:
            at += 1
        k = at
        while k < len(part) and part[k][0] < stop:
            if part[k][0] > start:
                out.append((start, part[k][0]))
            start = max(start, part[k][1])
            k += 1
        if start < stop:
            out.append((start, stop))
    return tuple(out)


def common(one: Ranges, other: Ranges) -> Ranges:
    """The positions in both."""
    out: list[Range] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < stop:
            out.append((start, stop))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


def is_inside(part: Ranges, complete: Ranges) -> bool:
    return not minus(part, complete)


def size(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def take(ranges: Ranges, count: int) -> tuple[Ranges, Ranges]:
    """The lowest `count` positions, and the rest."""
    for at, (start, stop) in enumerate(ranges):
        if count <= 0:
            return ranges[:at], ranges[at:]
        if stop - start > count:
            cut = start + count
            return (*ranges[:at], (start, cut)), ((cut, stop), *ranges[at + 1 :])
        count -= stop - start
    return ranges, ()


def below(ranges: Ranges, end: int) -> Ranges:
    """The positions before `end`."""
    return tuple((start, min(stop, end)) for start, stop in ranges if start < end)


def positions(ranges: Ranges) -> list[int]:
    return [at for start, stop in ranges for at in range(start, stop)]


def is_well_formed(ranges: Sequence[Sequence[int]]) -> bool:
    """Whether these could have been made here: sorted, disjoint, apart, none empty."""
    last = -1
    for start, stop in ranges:
        if not last < start < stop:
            return False
        last = stop
    return True
