"""Sets of ranks as ranges: `0-192, 195`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MAX_SPANS = 50  # ranges in a sentence


def spans(ranks: Iterable[int]) -> str:
    """`0-3, 7` for 0, 1, 2, 3, 7."""
    return ", ".join(_text(span) for span in _runs(ranks))


def limited_spans(ranks: Iterable[int], most: int = MAX_SPANS) -> str:
    """The same for a sentence, which names the first ranges and counts the ranks after them."""
    runs = list(_runs(ranks))
    text = ", ".join(_text(span) for span in runs[:most])
    remaining = sum(last - first + 1 for first, last in runs[most:])
    return f"{text} and {remaining} more" if remaining else text


def _runs(ranks: Iterable[int]) -> Iterator[tuple[int, int]]:
    first = last = -1
    for rank in sorted(ranks):
        if first >= 0 and rank <= last + 1:
            last = rank
            continue
        if first >= 0:
            yield first, last
        first = last = rank
    if first >= 0:
        yield first, last


def _text(span: tuple[int, int]) -> str:
    first, last = span
    return str(first) if first == last else f"{first}-{last}"
