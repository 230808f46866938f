"""Follows the rounds of all trainings: looks at their stores, and keeps what is new."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from atoll.controller.informer import Informer
from atoll.core.config import RoundStore
from atoll.core.errors import AtollError, NotFound
from atoll.core.ports import Executor
from atoll.core.rounds import OpenRound
from atoll.core.status import Training
from atoll.metrics.rounds import RoundKeeper, StoreLook
from atoll.rounds.permit import Whose, refusal, uri_of

if TYPE_CHECKING:
    from atoll.objectstore import ObjectStore
    from atoll.rounds.manifests import RunReader

TICK_S = 0.5
FILES_EVERY_S = 1.0
OBJECTS_EVERY_S = 10.0
IDLE_EVERY_S = 60.0  # of a training that has shown no round yet, in the end
MISSED_EVERY_S = 1.0
PATIENCE_S = 10.0  # with a store that does not answer
AT_ONCE = 4  # trainings that are looked at at the same time
MAX_RUNS = 16  # in one store

log = logging.getLogger(__name__)


class FollowedTraining:
    """One training whose store is looked at."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.due_at = 0.0  # of the monotonic clock
        self.pause_s = FILES_EVERY_S
        self.readers: dict[str, RunReader] = {}
        self.blobs: ObjectStore | None = None


class RoundFollower:
    """Looks at the stores of trainings that run, and once more when they have ended."""

    def __init__(
        self,
        keeper: RoundKeeper,
        whose: Callable[[Training], Whose],
        stores: Sequence[RoundStore] = (),
        own_namespace: str = "default",
    ) -> None:
        self._keeper = keeper
        self._whose = whose
        self._stores = stores
        self._own_namespace = own_namespace
        self._followed: dict[str, FollowedTraining] = {}

    async def run(self, informer: Informer) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(informer))
            tasks.create_task(self._look_on())
            tasks.create_task(self._note_missed(informer))

    async def _follow(self, informer: Informer) -> None:
        async for update in informer.updates():
            if update.is_removed:
                self._followed.pop(update.uid, None)
            elif update.training is not None:
                self.note(update.training)

    async def _note_missed(self, informer: Informer) -> None:
        """Settled trainings whose end an earlier control plane has not looked at: one by one."""
        await informer.uids()
        missed = [s for s in informer.settled.values() if not self._keeper.is_finished(s.uid)]
        for settled in missed:
            with contextlib.suppress(NotFound):
                self.note(await informer.store.get(settled.key))
            await asyncio.sleep(MISSED_EVERY_S)

    def note(self, training: Training) -> None:
        followed = self._followed.get(training.uid)
        if followed is not None:
            is_end = training.status.phase.is_terminal > followed.training.status.phase.is_terminal
            followed.training = training
            if is_end:
                followed.due_at = 0.0
        elif not (training.status.phase.is_terminal and self._keeper.is_finished(training.uid)):
            self._followed[training.uid] = FollowedTraining(training)

    async def _look_on(self) -> None:
        while True:
            now = time.monotonic()
            due = [each for each in list(self._followed.values()) if each.due_at <= now]
            for start in range(0, len(due), AT_ONCE):
                some = due[start : start + AT_ONCE]
                await asyncio.gather(*(asyncio.to_thread(self.look, each) for each in some))
            await asyncio.sleep(TICK_S)

    def look(self, followed: FollowedTraining) -> None:
        """Keeps what is new, and says when to look again. Never raises."""
        try:
            self._look(followed)
        except Exception as error:  # whatever one training has there, the others are looked at
            log.warning("rounds of training %s", followed.training.name, exc_info=error)
            followed.pause_s = min(IDLE_EVERY_S, 2 * max(followed.pause_s, FILES_EVERY_S))
            followed.due_at = time.monotonic() + followed.pause_s

    def _look(self, followed: FollowedTraining) -> None:
        training = followed.training
        is_over = training.status.phase.is_terminal
        try:
            why = refusal(
                training, self._whose(training), self._stores, self._own_namespace
            ) or self._read(followed)
        except (AtollError, OSError) as error:
            why, is_over = f"the store cannot be read: {error}", False
            followed.pause_s = min(IDLE_EVERY_S, 2 * followed.pause_s)
            log.warning("rounds of training %s: %s", training.name, error)
        except ImportError as error:
            why = f"the store cannot be read without the extra atoll[store]: {error}"
            followed.pause_s = IDLE_EVERY_S
        if why:
            self._keeper.note_look(training.uid, StoreLook(time.time(), why=why))
        followed.due_at = time.monotonic() + followed.pause_s
        if is_over and followed.pause_s:
            self._keeper.finish(training.uid)
            self._followed.pop(training.uid, None)

    def _read(self, followed: FollowedTraining) -> str:
        training, whose = followed.training, self._whose(followed.training)
        uri = uri_of(training, whose)
        is_file = urlsplit(uri).scheme == "file"
        every_s = FILES_EVERY_S if is_file else OBJECTS_EVERY_S
        if is_file and not Path(unquote(urlsplit(uri).path)).is_dir():
            followed.pause_s = every_s
            return ""
        if followed.blobs is None:
            from atoll.objectstore import ObjectStore

            followed.blobs = ObjectStore.open(uri, patience_s=PATIENCE_S)
        if is_file or not followed.readers:
            self._discover(followed, followed.blobs, is_alone=whose.is_alone)
        if not followed.readers:  # it may be no DiLoCo training at all
            followed.pause_s = min(IDLE_EVERY_S, max(every_s, 2 * followed.pause_s))
            if is_file:
                followed.pause_s = every_s
            return ""
        waiting: dict[str, list[OpenRound]] = {}
        left: dict[int, str] = {}
        is_all = True
        for reader in followed.readers.values():
            look = reader.look()
            self._keeper.add_seen(training.uid, look.rounds, reader.name, reader.following)
            if look.waiting is not None:
                waiting.setdefault(reader.run, []).append(look.waiting)
            left |= look.left
            is_all = is_all and look.is_all
        newest = self._keeper.run_of(training.uid)
        run = newest or next(iter(waiting), next(iter(followed.readers.values())).run)
        self._keeper.note_look(
            training.uid, StoreLook(time.time(), run, tuple(waiting.get(run, ())), left)
        )
        followed.pause_s = every_s if is_all else 0.0
        return ""

    def _discover(self, followed: FollowedTraining, blobs: ObjectStore, *, is_alone: bool) -> None:
        """Finds the runs of the training in its store: in one of its own, all that there are."""
        from atoll.diloco.facts import fragment_of
        from atoll.rounds.manifests import RunReader

        training = followed.training
        spec = training.spec
        wanted = {spec.run_id or spec.env.get("ATOLL_RUN_ID") or training.uid}
        if training.namespace == self._own_namespace:  # others could name a run that is not theirs
            wanted |= set(self._keeper.runs(training.uid))
        for folder in blobs.list_folders():
            run, _, fragments = fragment_of(folder)
            if run not in wanted and not is_alone:
                continue
            names = [folder]
            if fragments > 1:
                names = [f"{run}.{at}-of-{fragments}" for at in range(fragments)]
            for name in names:
                if name not in followed.readers and len(followed.readers) < MAX_RUNS * fragments:
                    first = self._keeper.following(training.uid, name)
                    followed.readers[name] = RunReader(blobs, name, first)


def whose_of(executors: Mapping[str, Executor], kinds: Mapping[str, str]) -> Callable[..., Whose]:
    """Looks a training's executor up in those of a control plane."""

    def whose(training: Training) -> Whose:
        executor = executors.get(training.executor)
        kind = kinds.get(training.executor, "")
        if training.spec.rendezvous.uri or executor is None:
            return Whose(kind, "", is_alone=False)
        uri = executor.store_uri(training)
        return Whose(kind, uri, is_alone=bool(uri) and training.spec.run_id is None)

    return whose


def metrics_readers(executors: Mapping[str, Executor]) -> Callable[[Training], str]:
    """Where ranks of a training report to; empty if nowhere."""

    def where(training: Training) -> str:
        executor = executors.get(training.executor)
        if executor is None:
            return ""
        try:
            return executor.metrics_uri(training)
        except AtollError:  # options that do not fit it any more
            return ""

    return where
