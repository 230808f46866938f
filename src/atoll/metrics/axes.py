"""The horizontal position of each point of a series: over time, steps, tokens or rounds. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import Literal, NamedTuple

from atoll.metrics.series import AT, ATTEMPT, COUNT, MEAN, STEP, Series

Axis = Literal["time", "step", "tokens", "round"]


class AxisSource(NamedTuple):
    """What positions are computed from, beside the series itself."""

    axis: Axis
    steps: Series | None = None  # of the same rank, for series that have no steps of their own
    tokens: Series | None = None  # what the same rank reported as `tokens`
    first_round: int = 0
    commits: Sequence[float] = ()  # when it and each later round was committed


def positions(series: Series, source: AxisSource) -> Sequence[float]:
    """One position for each point. NaN leaves a point out: it has no position on this axis, or a
    later attempt repeated its step."""
    times = series.columns[AT]
    if source.axis == "time":
        return times
    if source.axis == "round":
        start = times[0] if len(times) else 0.0
        return [source.first_round + _rounds_at(at, source.commits, start) for at in times]
    values: Sequence[float] = series.columns[STEP]
    if source.axis == "tokens":
        values = _tokens_at(times, source.tokens)
    elif source.steps is not None and not has_steps(series):
        values = _values_at(times, source.steps, source.steps.columns[STEP])
    return _without_repeats(values, series.columns[ATTEMPT])


def has_steps(series: Series) -> bool:
    return any(step == step for step in series.columns[STEP])


def _without_repeats(values: Sequence[float], attempts: Sequence[float]) -> list[float]:
    """NaN for points of an attempt at or after the first position of a later attempt."""
    out = list(values)
    lowest = math.inf  # position of all later attempts
    attempt, first = math.nan, math.inf
    for index in range(len(out) - 1, -1, -1):
        if attempts[index] != attempt:
            lowest, attempt, first = min(lowest, first), attempts[index], math.inf
        if math.isnan(out[index]):
            continue
        first = min(first, out[index])
        if out[index] >= lowest:
            out[index] = math.nan
    return out


def _tokens_at(times: Sequence[float], tokens: Series | None) -> list[float]:
    """How many tokens had been reported at each time. Values that only grow are totals already;
    others are the tokens of one report, and are added up."""
    if tokens is None or not len(tokens):
        return [math.nan] * len(times)
    means = [value if math.isfinite(value) else 0.0 for value in tokens.columns[MEAN]]
    is_total = len(means) > 1 and all(a < b for a, b in zip(means, means[1:], strict=False))
    totals, total = [], 0.0
    for mean, count in zip(means, tokens.columns[COUNT], strict=True):
        total = mean if is_total else total + mean * count
        totals.append(total)
    return _values_at(times, tokens, totals)


def _values_at(times: Sequence[float], series: Series, values: Sequence[float]) -> list[float]:
    """At each time the value that belongs to the last point of the series before it."""
    reported = series.columns[AT]
    indices = (bisect_right(reported, at + 1e-6) - 1 for at in times)
    return [math.nan if index < 0 else values[index] for index in indices]


def _rounds_at(at: float, commits: Sequence[float], start: float) -> float:
    """Rounds committed by then, with the part of the round under way. After the last commit the
    next round is taken to last as long as the last one did, and never ends."""
    if not commits:
        return math.nan
    done = bisect_right(commits, at)
    begin = commits[done - 1] if done else min(start, commits[0])
    if done < len(commits):
        span = commits[done] - begin
    else:
        span = begin - (commits[-2] if len(commits) > 1 else min(start, begin))
    return done + (min(0.999, max(0.0, at - begin) / span) if span > 0 else 0.0)
