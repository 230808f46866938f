"""The one follower of a store in a process: it lists once, watches, and lists again after a gap.

Other parts read its index, or follow its updates. Each follower has its own queue, with one entry
for each training at most: a slow one delays nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from atoll.core.errors import Gone, NotFound
from atoll.core.ports import Change, Key, SettledTraining, Snapshot, Store, Update
from atoll.core.status import Training

log = logging.getLogger(__name__)

INFORMER = "informer"  # the name of its task


class Informer:
    """The `TrainingIndex` of `core/ports.py`. `run()` until cancelled, again if it raises."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.active: dict[str, Training] = {}  # by uid: which are not settled
        self.settled: dict[str, SettledTraining] = {}  # by uid
        self.version = 0  # that the index has reached
        self._is_listed = asyncio.Event()
        self._followers: set[_Follower] = set()

    async def run(self) -> None:
        """Returns if the store is closed."""
        try:
            while True:
                await self._list()
                try:
                    async for change in self.store.watch(self.version):
                        self._note(change)
                    return
                except Gone:
                    log.warning("fell behind the store's change log; reading everything again")
        finally:
            self._is_listed.clear()  # a new follower waits for the next list

    async def uids(self) -> set[str]:
        await self._is_listed.wait()
        return {*self.active, *self.settled}

    async def updates(self) -> AsyncIterator[Update]:
        await self._is_listed.wait()
        follower = _Follower([_listed(each) for each in self.active.values()])
        self._followers.add(follower)
        try:
            while True:
                for update in await follower.next():
                    yield update
        finally:
            self._followers.discard(follower)

    def keys(self) -> list[tuple[str, Key]]:
        """All trainings: uid and key."""
        active = [(uid, training.key) for uid, training in self.active.items()]
        return active + [(uid, training.key) for uid, training in self.settled.items()]

    def is_over(self, training: Training) -> bool:
        """Whether a training that was read from the store has ended since, or was removed."""
        if self.version < training.resource_version:  # it is not here yet
            return training.status.phase.is_terminal
        known = self.active.get(training.uid)
        return known is None or known.status.phase.is_terminal

    async def _list(self) -> None:
        snapshot = await self.store.snapshot()
        ends = list[Training]()  # that were missed
        for each in snapshot.settled:
            if each.uid in self.active:
                with contextlib.suppress(NotFound):  # the watch shows that it was removed
                    ends.append(await self.store.get(each.key))
        self._take(snapshot)
        for training in ends:
            self._notify(_listed(training))
        self._is_listed.set()

    def _take(self, snapshot: Snapshot) -> None:
        """Replaces the index by the snapshot."""
        before = self.active, self.settled
        self.active = {each.uid: each for each in snapshot.active}
        self.settled = {each.uid: each for each in snapshot.settled}
        self.version = snapshot.version
        for uid in (before[0].keys() | before[1].keys()) - snapshot.uids:
            last = before[0].get(uid)
            key = before[1][uid].key if last is None else last.key
            self._notify(Update(self.version, uid, key, last, is_removed=True))
        for training in snapshot.active:
            self._notify(_listed(training))

    def _note(self, change: Change) -> None:
        training, uid = change.training, change.training.uid
        was_settled = self.settled.pop(uid, None) is not None
        if change.is_removed or training.is_settled:
            self.active.pop(uid, None)
        else:
            self.active[uid] = training
        if training.is_settled and not change.is_removed:
            self.settled[uid] = SettledTraining(uid, training.key, training.status.phase)
        self.version = max(self.version, change.version)
        self._notify(
            Update(change.version, uid, training.key, training, change.is_removed, was_settled)
        )

    def _notify(self, update: Update) -> None:
        for follower in self._followers:
            follower.put(update)


class _Follower:
    """What one follower has not taken yet: the last update of each training, in order."""

    def __init__(self, present: list[Update]) -> None:
        self._waiting = {update.uid: update for update in present}
        self._is_waiting = asyncio.Event()
        if present:
            self._is_waiting.set()

    def put(self, update: Update) -> None:
        before = self._waiting.pop(update.uid, None)
        if before is not None:
            update = update._replace(is_listed=update.is_listed or before.is_listed)
        self._waiting[update.uid] = update
        self._is_waiting.set()

    async def next(self) -> list[Update]:
        await self._is_waiting.wait()
        self._is_waiting.clear()
        taken, self._waiting = self._waiting, {}
        return list(taken.values())


def _listed(training: Training) -> Update:
    version, uid = training.resource_version, training.uid
    return Update(version, uid, training.key, training, is_listed=True)
