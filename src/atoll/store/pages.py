"""A page of trainings: so many, and so many bytes of them."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.core.ports import TrainingPage
from atoll.core.status import Training


def cut_page(sized: Iterator[tuple[Training, int]], limit: int, max_bytes: int) -> TrainingPage:
    """The first of these trainings, given with their sizes, in order of name. Reads one more, to
    know whether there are more."""
    items: list[Training] = []
    left = max_bytes
    for training, size in sized:
        left -= size
        if len(items) == limit or (items and left < 0):
            return TrainingPage(items, items[-1].name)
        items.append(training)
    return TrainingPage(items)
