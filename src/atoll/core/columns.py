"""Tables with a row for each rank, in little space: equal rows become one, the rest columns.

A group is a set of ranks, as ranges, with the values that they share. A column has a value for each
rank: numbers as differences, names as a pattern and what fills it, other values as numbers of a
list. `5*3` is 5 three times, `-` is no value. Nothing is lost: `unfold_rows` gives back what
`fold_rows` was given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from os.path import commonprefix
from typing import Any

from atoll.core.model import Model
from atoll.core.spans import in_spans, spans

MOST_GROUPS = 256  # more of them, and the field that differs most becomes a column
NONE = "-"
_CLEAN = re.compile(r"[A-Za-z0-9._:/-]+")
_NO_WORD = re.compile(r"[^A-Za-z0-9]")

Group = tuple[str, dict[str, Any]]  # ranks, and the values that they share


class Column(Model, frozen=True):
    """One value for each rank of a table, in order."""

    pattern: str = ""  # of names: `{rank}` is the rank, `*` what `each` says
    values: list[Any] = []  # that `each` refers to by their place
    each: str = ""


Columns = dict[str, Column]


def fold_rows(
    ranks: Sequence[int],
    shared: Mapping[str, Sequence[Any]],
    own: Mapping[str, Sequence[Any]],
    times: frozenset[str] = frozenset(),
) -> tuple[list[Group], Columns]:
    """`shared` fields go into groups, `own` ones into columns. `None` is no value.

    Fields in `times` are seconds, and stored in milliseconds where that loses nothing.
    """
    shared, own = dict(shared), dict(own)
    while len(groups := _grouped(ranks, shared)) > MOST_GROUPS:
        widest = max(shared, key=lambda field: len(set(shared[field])))
        own[widest] = shared.pop(widest)
    columns = {
        field: _packed(ranks, values, is_time=field in times)
        for field, values in own.items()
        if any(value is not None for value in values)
    }
    return groups, columns


def unfold_rows(
    groups: Iterable[Group], columns: Columns, times: frozenset[str] = frozenset()
) -> dict[int, dict[str, Any]]:
    """The values of each rank, in order of ranks, without those that are None. Raises ValueError"""
    rows: dict[int, dict[str, Any]] = {}
    for text, values in groups:
        for rank in in_spans(text):
            if rank in rows:
                raise ValueError(f"rank {rank} is there twice")
            rows[rank] = dict(values)
    ranks = sorted(rows)
    for field, column in columns.items():
        each = _unpacked(ranks, column, is_time=field in times)
        for rank, value in zip(ranks, each, strict=True):
            if value is not None:
                rows[rank][field] = value
    return {rank: rows[rank] for rank in ranks}


def _grouped(ranks: Sequence[int], shared: Mapping[str, Sequence[Any]]) -> list[Group]:
    members: dict[tuple[Any, ...], list[int]] = {}
    rows = zip(*shared.values(), strict=True) if shared else ((),) * len(ranks)
    for rank, row in zip(ranks, rows, strict=True):
        members.setdefault(row, []).append(rank)
    return [
        (spans(own), {f: v for f, v in zip(shared, row, strict=True) if v is not None})
        for row, own in members.items()
    ]


def _packed(ranks: Sequence[int], values: Sequence[Any], *, is_time: bool) -> Column:
    kind = type(next(value for value in values if value is not None))
    if kind in (int, float):
        return Column(each=_shortened(_differences(values, is_time)))
    if kind is str and len(set(values)) > len(values) / 8:
        column = _as_pattern(ranks, values)
        if column is not None:
            return column
    places = {value: place for place, value in enumerate(dict.fromkeys(values))}
    if None in places:
        rest = [value for value in places if value is not None]
        places = {value: place for place, value in enumerate(rest)}
    numbers = [places.get(value) for value in values]
    return Column(values=list(places), each=_shortened(_differences(numbers, is_time=False)))


def _unpacked(ranks: Sequence[int], column: Column, *, is_time: bool) -> list[Any]:
    tokens = _written_out(column.each, len(ranks))
    if column.pattern:
        return [_filled(column.pattern, r, t) for r, t in zip(ranks, tokens, strict=True)]
    numbers = list(_sums(tokens, is_time and not column.values))
    if not column.values:
        return numbers
    if any(n is not None and not 0 <= n < len(column.values) for n in numbers):
        raise ValueError("a column refers to a value that it does not have")
    return [None if n is None else column.values[int(n)] for n in numbers]


def _differences(values: Sequence[Any], is_time: bool) -> Iterator[str]:
    """Each number as the difference from the one before; `=1.5` where that would lose digits."""
    last = 0
    for value in values:
        if value is None:
            yield NONE
            continue
        number = round(value * 1000) if is_time else value
        if is_time and number / 1000 != value:
            yield f"={value!r}"
            continue
        yield str(number - last)
        last = number


def _sums(tokens: Iterable[str], is_time: bool) -> Iterator[float | int | None]:
    last = 0
    for token in tokens:
        if token == NONE:
            yield None
        elif token.startswith("="):
            yield float(token[1:])
        else:
            last += int(token)
            yield last / 1000 if is_time else last


def _shortened(tokens: Iterable[str]) -> str:
    runs = ((token, sum(1 for _ in run)) for token, run in groupby(tokens))
    return " ".join(token if times == 1 else f"{token}*{times}" for token, times in runs)


def _written_out(text: str, count: int) -> list[str]:
    tokens: list[str] = []
    for part in text.split(" ") if text else (f"*{count}",):
        token, star, times = part.partition("*")
        number = int(times) if star else 1
        if not 0 < number <= count - len(tokens):
            raise ValueError(f"a column does not have {count} values")
        tokens += [token] * number
    if len(tokens) != count:
        raise ValueError(f"a column has {len(tokens)} values, not {count}")
    return tokens


def _as_pattern(ranks: Sequence[int], values: Sequence[str | None]) -> Column | None:
    """Names such as `a-17-x2c`: what they share, and the rest of each. None if that cannot be."""
    known = [(rank, value) for rank, value in zip(ranks, values, strict=True) if value is not None]
    if not all(_CLEAN.fullmatch(value) for _, value in known):
        return None
    head = _to_a_gap(commonprefix([value for _, value in known]))
    rests = [value[len(head) :] for _, value in known]
    if all(rest.startswith(str(rank)) for (rank, _), rest in zip(known, rests, strict=True)):
        rests = [rest[len(str(rank)) :] for (rank, _), rest in zip(known, rests, strict=True)]
        after = _to_a_gap(commonprefix(rests))
        rests = [rest[len(after) :] for rest in rests]
        head += "{rank}" + after
    tail = _to_a_gap(commonprefix([rest[::-1] for rest in rests]))[::-1]
    rests = [rest[: len(rest) - len(tail)] for rest in rests]
    if not any(rests) and len(known) == len(values):
        return Column(pattern=head + tail)
    if NONE in rests or not all(rests):
        return None
    fill = iter(rests)
    tokens = (NONE if value is None else next(fill) for value in values)
    return Column(pattern=f"{head}*{tail}", each=_shortened(tokens))


def _to_a_gap(text: str) -> str:
    """`text` up to its last character that is no letter or digit, which is where words part."""
    gaps = [match.end() for match in _NO_WORD.finditer(text)]
    return text[: gaps[-1]] if gaps else ""


def _filled(pattern: str, rank: int, token: str) -> str | None:
    if token == NONE:
        return None
    return pattern.replace("{rank}", str(rank), 1).replace("*", token, 1)
