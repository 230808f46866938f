"""The queue of this machine: trainings that want more ranks than they have, the oldest first.

What the first in it wants is kept for it, until it has it all: so no gang waits for ever while
smaller ones pass. Others may start beside that, in their order, with what is left. Pure.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from atoll.backends.local.devices import DeviceShare
from atoll.core.ports import Key


class Waiting(NamedTuple):
    """A place in the queue. They compare by age."""

    created_at: float
    uid: str
    key: Key
    wanted: int  # ranks beyond those that it has
    needed: int  # of them, without which it does not go on
    share: DeviceShare | None = None

    @property
    def position(self) -> tuple[float, str]:
        return self.created_at, self.uid


class Turn(NamedTuple):
    """How many more ranks a training may have now."""

    waiting: Waiting
    ranks: int


class Capacity(NamedTuple):
    """What nobody has. `devices` are those of a share; `slots` None: as many as are wanted."""

    slots: int | None
    devices: Callable[[DeviceShare], list[str]]


class StartQueue:
    def __init__(self) -> None:
        self._in_order: list[tuple[float, str]] = []
        self._waiting: dict[str, Waiting] = {}

    def __contains__(self, uid: str) -> bool:
        return uid in self._waiting

    def is_first(self, uid: str) -> bool:
        return bool(self._in_order) and self._in_order[0][1] == uid

    def put(self, waiting: Waiting) -> bool:
        """It keeps its place by age. Returns whether it wants less than before."""
        before = self._waiting.get(waiting.uid)
        if before is None:
            bisect.insort(self._in_order, waiting.position)
        self._waiting[waiting.uid] = waiting
        return before is not None and waiting.wanted < before.wanted

    def remove(self, uid: str) -> bool:
        """Returns whether it was there."""
        waiting = self._waiting.pop(uid, None)
        if waiting is None:
            return False
        del self._in_order[bisect.bisect_left(self._in_order, waiting.position)]
        return True

    def turns(self, free: Capacity) -> Iterator[Turn]:
        """Everybody who may have something, in order.

        It ends where nothing is left, however many wait behind.
        """
        slots, retained = free.slots, Counter[str]()
        for number, (_, uid) in enumerate(self._in_order):
            waiting = self._waiting[uid]
            share, ranks = waiting.share, waiting.wanted
            usable: list[str] = []
            if slots is not None:
                ranks = min(ranks, slots)
            if share is not None:
                usable = _without(free.devices(share), retained)
                ranks = min(ranks, len(usable) // share.each)
            if ranks:
                yield Turn(waiting, ranks)
            if number == 0:
                ranks = waiting.wanted
            elif ranks < waiting.needed:
                continue
            if share is not None:
                retained.update(usable[: ranks * share.each])
            if slots is not None:
                slots -= ranks
                if slots <= 0:
                    return

    def ranks_for(self, uid: str, free: Capacity) -> int:
        """How many more ranks that training may have now."""
        return next((turn.ranks for turn in self.turns(free) if turn.waiting.uid == uid), 0)


def _without(devices: list[str], retained: Counter[str]) -> list[str]:
    """A device that is listed twice may be kept once."""
    left, retained = [], retained.copy()
    for device in devices:
        if retained[device]:
            retained[device] -= 1
        else:
            left.append(device)
    return left
