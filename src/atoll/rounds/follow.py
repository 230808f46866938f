"""Follows the rounds of all trainings: observes their stores, and stores what is new."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from atoll.controller.informer import Informer
from atoll.core.config import RoundStore
from atoll.core.errors import AtollError, NotFound
from atoll.core.ports import Executor
from atoll.core.rounds import OpenRound
from atoll.core.status import Training
from atoll.metrics.rounds import RoundTable, StoreObservation

if TYPE_CHECKING:
    from atoll.objectstore import ObjectStore
    from atoll.rounds.manifests import RunReader

TICK_S = 0.5  # between two checks of what is due
FILES_EVERY_S = 1.0  # stores on this machine: listing them costs nothing
OBJECTS_EVERY_S = 10.0  # a round lasts minutes, and stores charge for each LIST
IDLE_EVERY_S = 60.0  # of a training without a round yet, after some time
MISSED_EVERY_S = 1.0  # one ended training after the other, beside those that run
PATIENCE_S = 10.0  # with a store that does not answer
CONCURRENT = 4  # trainings that are observed at the same time
MAX_RUNS = 16  # in one store

log = logging.getLogger(__name__)


OWN_USER = ("local", "slurm")  # kinds whose ranks run as the user of the control plane


class StoreAccess(NamedTuple):
    """Of a training: the kind of its executor, and where its ranks meet if it names no URI.

    `is_alone`: no other training meets there.
    """

    kind: str
    default_uri: str
    is_exclusive: bool = True


def uri_of(training: Training, access: StoreAccess) -> str:
    """Where the ranks meet; empty if nowhere."""
    return training.spec.rendezvous.uri or access.default_uri


def refusal_reason(
    training: Training, access: StoreAccess, stores: Sequence[RoundStore], own_namespace: str
) -> str:
    """Why the store of a training is not read; empty if it is."""
    uri, is_default = uri_of(training, access), not training.spec.rendezvous.uri
    scheme = urlsplit(uri).scheme
    if not uri:
        return "the training has no store"
    if scheme == "file":
        if access.kind not in OWN_USER:
            return f"file:// of the executor kind {access.kind} is not on this machine"
        if is_default or training.namespace == own_namespace:
            return ""
        return "file:// is read for trainings of the control plane's own user only"
    if is_default or any(
        training.namespace in store.namespaces and covers(store.uri, uri) for store in stores
    ):
        return ""
    return (
        f"{uri} is under no [[rounds.stores]] of the control plane's atoll.toml for the "
        f"namespace {training.namespace}"
    )


def covers(base: str, uri: str) -> bool:
    """Whether `uri` is `base`, or lies under it. One that could lead out of it does not."""
    outer, inner = urlsplit(base), urlsplit(uri)
    if (outer.scheme, outer.netloc) != (inner.scheme, inner.netloc):
        return False
    if inner.query or inner.fragment or unquote(inner.path) != inner.path:
        return False
    parts, prefix = inner.path.strip("/").split("/"), outer.path.strip("/").split("/")
    if any(part in (".", "..") for part in parts) or "" in parts[1:]:
        return False
    return prefix == [""] or parts[: len(prefix)] == prefix


class FollowedTraining:
    """One training whose store is observed."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.due_at = 0.0  # of the monotonic clock
        self.pause_s = FILES_EVERY_S
        self.readers: dict[str, RunReader] = {}
        self.blobs: ObjectStore | None = None


class RoundFollower:
    """Observes the stores of trainings that run, and once more when they have ended."""

    def __init__(
        self,
        table: RoundTable,
        access: Callable[[Training], StoreAccess],
        stores: Sequence[RoundStore] = (),
        own_namespace: str = "default",
    ) -> None:
        self._table = table
        self._access = access
        self._stores = stores
        self._own_namespace = own_namespace
        self._followed: dict[str, FollowedTraining] = {}

    async def run(self, informer: Informer) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(informer))
            tasks.create_task(self._observe_due())
            tasks.create_task(self._note_missed(informer))

    async def _follow(self, informer: Informer) -> None:
        async for update in informer.updates():
            if update.is_removed:
                self._followed.pop(update.uid, None)
            elif update.training is not None:
                self.note(update.training)

    async def _note_missed(self, informer: Informer) -> None:
        """Observes settled trainings whose end an earlier control plane missed: one by one."""
        await informer.uids()
        missed = [s for s in informer.settled.values() if not self._table.is_finished(s.uid)]
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
        elif not (training.status.phase.is_terminal and self._table.is_finished(training.uid)):
            self._followed[training.uid] = FollowedTraining(training)

    async def _observe_due(self) -> None:
        while True:
            now = time.monotonic()
            due = [each for each in list(self._followed.values()) if each.due_at <= now]
            for start in range(0, len(due), CONCURRENT):
                some = due[start : start + CONCURRENT]
                await asyncio.gather(*(asyncio.to_thread(self.observe, each) for each in some))
            await asyncio.sleep(TICK_S)

    def observe(self, followed: FollowedTraining) -> None:
        """Stores what is new, and returns when to observe again. Never raises."""
        try:
            self._observe(followed)
        except Exception as error:  # whatever one store holds, the others are observed
            log.warning("rounds of training %s", followed.training.name, exc_info=error)
            followed.pause_s = min(IDLE_EVERY_S, 2 * max(followed.pause_s, FILES_EVERY_S))
            followed.due_at = time.monotonic() + followed.pause_s

    def _observe(self, followed: FollowedTraining) -> None:
        training = followed.training
        is_over = training.status.phase.is_terminal
        try:
            problem = refusal_reason(
                training, self._access(training), self._stores, self._own_namespace
            ) or self._read(followed)
        except (AtollError, OSError) as error:
            problem, is_over = f"the store cannot be read: {error}", False
            followed.pause_s = min(IDLE_EVERY_S, 2 * followed.pause_s)
            log.warning("rounds of training %s: %s", training.name, error)
        except ImportError as error:
            problem = f"the store cannot be read without the extra store: {error}"
            followed.pause_s = IDLE_EVERY_S
        if problem:
            self._table.set_observation(
                training.uid, StoreObservation(time.time(), problem=problem)
            )
        followed.due_at = time.monotonic() + followed.pause_s
        if is_over and followed.pause_s:
            self._table.finish(training.uid)
            self._followed.pop(training.uid, None)

    def _read(self, followed: FollowedTraining) -> str:
        training, access = followed.training, self._access(followed.training)
        uri = uri_of(training, access)
        is_file = urlsplit(uri).scheme == "file"
        every_s = FILES_EVERY_S if is_file else OBJECTS_EVERY_S
        if is_file and not Path(unquote(urlsplit(uri).path)).is_dir():
            followed.pause_s = every_s
            return ""
        if followed.blobs is None:
            from atoll.objectstore import ObjectStore

            followed.blobs = ObjectStore.open(uri, patience_s=PATIENCE_S)
        if is_file or not followed.readers:
            self._discover(followed, followed.blobs, is_exclusive=access.is_exclusive)
        if not followed.readers:  # it may be no DiLoCo training at all
            followed.pause_s = min(IDLE_EVERY_S, max(every_s, 2 * followed.pause_s))
            if is_file:
                followed.pause_s = every_s
            return ""
        waiting: dict[str, list[OpenRound]] = {}
        departures: dict[int, str] = {}
        is_all = True
        for reader in followed.readers.values():
            observe = reader.observe()
            self._table.add_manifests(training.uid, observe.rounds, reader.run, reader.following)
            if observe.waiting is not None:
                waiting.setdefault(reader.run, []).append(observe.waiting)
            departures |= observe.departures
            is_all = is_all and observe.is_all
        newest = self._table.run_of(training.uid)
        run = newest or next(iter(waiting), next(iter(followed.readers.values())).run)
        self._table.set_observation(
            training.uid,
            StoreObservation(time.time(), run, tuple(waiting.get(run, ())), departures),
        )
        followed.pause_s = every_s if is_all else 0.0
        return ""

    def _discover(
        self, followed: FollowedTraining, blobs: ObjectStore, *, is_exclusive: bool
    ) -> None:
        """Finds the runs of the training in its store: in one of its own, all that there are."""
        from atoll.rounds.manifests import RunReader

        training = followed.training
        spec = training.spec
        run_ids = {spec.run_id or spec.env.get("ATOLL_RUN_ID") or training.uid}
        if training.namespace == self._own_namespace:  # others could name a run that is not theirs
            run_ids |= set(self._table.runs(training.uid))
        for folder in blobs.list_folders():
            if folder not in run_ids and not is_exclusive:
                continue
            if folder not in followed.readers and len(followed.readers) < MAX_RUNS:
                first = self._table.following(training.uid, folder)
                followed.readers[folder] = RunReader(blobs, folder, first)


def store_access_of(
    executors: Mapping[str, Executor], kinds: Mapping[str, str]
) -> Callable[..., StoreAccess]:
    """Looks a training's executor up in those of a control plane."""

    def access(training: Training) -> StoreAccess:
        executor = executors.get(training.executor)
        kind = kinds.get(training.executor, "")
        if training.spec.rendezvous.uri or executor is None:
            return StoreAccess(kind, "", is_exclusive=False)
        uri = executor.store_uri(training)
        return StoreAccess(kind, uri, is_exclusive=bool(uri) and training.spec.run_id is None)

    return access


def metrics_uri_of(executors: Mapping[str, Executor]) -> Callable[[Training], str]:
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
