"""What the outer loop needs of an all-reduce: agree on a mean, and find out what was agreed before.

`Alone` is a world of one: no store, nothing is sent. `worker/store_rounds.py` is the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Agreed(NamedTuple):
    """One committed round: the same on every replica, but for the byte counts."""

    round: int
    means: list[Floats]
    roster: tuple[int, ...]
    bytes_up: int = 0
    bytes_down: int = 0


class Rounds(Protocol):
    """Used by one thread at a time. Every method may block on the store and raise its errors."""

    @property
    def rank(self) -> int: ...

    def start(self, state: Callable[[], bytes]) -> tuple[int, bytes | None]:
        """The next round after the newest checkpoint, and that checkpoint.

        Where there is none, `state()` becomes the first, and None says that it did.
        """

    def reduce(self, round: int, arrays: Sequence[Floats], weight: float) -> Agreed:
        """Take part in `round`, or learn what it agreed on if it went ahead without this rank."""

    def later(self, round: int) -> Iterator[Agreed]:
        """The rounds from `round` on that are already committed, in order; maybe none."""

    def save(self, round: int, state: Callable[[], bytes]) -> None:
        """Keep `state()`, which holds all rounds before `round`, for those who join later."""


class Alone:
    """A world of one replica: its own gradient is the mean."""

    rank = 0

    def start(self, state: Callable[[], bytes]) -> tuple[int, bytes | None]:
        return 0, None

    def reduce(self, round: int, arrays: Sequence[Floats], weight: float) -> Agreed:
        return Agreed(round, list(arrays), (0,))

    def later(self, round: int) -> Iterator[Agreed]:
        return iter(())

    def save(self, round: int, state: Callable[[], bytes]) -> None:
        pass
