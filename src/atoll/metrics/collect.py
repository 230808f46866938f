"""Reads what ranks report, from the folders and the object stores that they write to."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from atoll.agent.metric_sinks import STORES
from atoll.agent.metrics import MetricWriter, batch_of
from atoll.core.errors import AtollError, BackendError, ValidationError
from atoll.core.metrics import MACHINE, RankUsage
from atoll.core.ports import TrainingIndex
from atoll.core.status import Training
from atoll.metrics.store import MetricStore
from atoll.objectstore.bucket import Bucket

EVERY_S = 1.0  # folders on this machine: a chart that moves every second
OBJECTS_EVERY_S = 15.0  # object stores charge for each LIST
USE_EVERY_S = 5.0  # of CPU and memory: /proc of every process of every rank is read
MAX_AT_ONCE = 8 * 2**20  # bytes read of one folder in one round

log = logging.getLogger(__name__)


class MetricReader(Protocol):
    """Where one training's ranks report to."""

    uid: str
    every_s: float
    is_cheap: bool  # to read at any time
    is_last: bool  # its ranks have ended
    turn: threading.Lock

    def read(self, metric_store: MetricStore) -> bool:
        """Stores new reports; True if there may be more at once. Raises OSError."""

    def remove(self) -> None: ...


class FolderReader:
    """The folder of one training."""

    every_s, is_cheap = EVERY_S, True

    def __init__(self, uid: str, folder: Path) -> None:
        self.turn = threading.Lock()
        self.uid = uid
        self._folder = folder
        self._offsets: dict[str, int] = {}  # by file: what is stored already
        self.is_last = False  # its ranks have ended

    def read(self, metric_store: MetricStore) -> bool:
        """Stores new reports; True if there may be more at once."""
        with contextlib.suppress(FileNotFoundError):
            entries = sorted((e.name, e.stat().st_size) for e in os.scandir(self._folder))
            return self._read(entries, metric_store)
        return False

    def _read(self, entries: list[tuple[str, int]], metric_store: MetricStore) -> bool:
        lines: list[bytes] = []
        offsets: dict[str, int] = {}
        total = 0
        for name, size in entries:
            start = self._offsets.get(name, 0)
            if size <= start:
                continue
            if total >= MAX_AT_ONCE:
                break
            with open(self._folder / name, "rb") as file:
                file.seek(start)
                data = file.read(MAX_AT_ONCE)
            end = data.rfind(b"\n") + 1  # the rest is not whole yet
            if not end and len(data) == MAX_AT_ONCE:
                end = len(data)  # of a line that is too long to be a report: it is refused
            lines += data[:end].splitlines()
            offsets[name] = start + end
            total += end
        if lines:
            store_lines(self.uid, lines, metric_store)
            self._offsets |= offsets
        self._clear([name for name, _ in entries])
        return total >= MAX_AT_ONCE

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def _clear(self, names: Iterable[str]) -> None:
        """Removes files that were read whole and have a successor of the same process."""
        last = {name.rpartition(".")[0]: name for name in sorted(names)}
        for name in list(self._offsets):
            if last.get(name.rpartition(".")[0], name) == name:
                continue
            path = self._folder / name
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size > self._offsets[name]:
                    continue
                path.unlink()
            del self._offsets[name]


class ObjectReader:
    """The objects of one training in a store: each is read once, and deleted."""

    every_s, is_cheap = OBJECTS_EVERY_S, False

    def __init__(self, uid: str, uri: str) -> None:
        self.turn = threading.Lock()
        self.uid = uid
        self._uri = uri
        self._store: Bucket | None = None
        self.is_last = False

    def read(self, metric_store: MetricStore) -> bool:
        try:
            return self._read(metric_store)
        except BackendError as error:
            raise OSError(str(error)) from error

    def _read(self, metric_store: MetricStore) -> bool:
        if self._store is None:
            self._store = Bucket.open(self._uri)
        total, done = 0, list[str]()
        names = sorted(self._store.entries())
        for name in names:
            done.append(name)
            try:
                data = self._store.get(name, MAX_AT_ONCE) or b""
            except ValidationError as error:
                log_refused(self.uid, error)
                continue
            total += len(data)
            store_lines(self.uid, data.splitlines(), metric_store)
            if total >= MAX_AT_ONCE:
                break
        self._store.delete(done)  # a batch that is read again counts once
        return len(done) < len(names)

    def remove(self) -> None:
        pass


def store_lines(uid: str, lines: Sequence[bytes], metric_store: MetricStore) -> None:
    """A file that is no report hides no other. It is logged once."""
    try:
        metric_store.take(uid, lines)
    except ValidationError:
        for line in lines:
            try:
                metric_store.take(uid, [line])
            except ValidationError as error:
                log_refused(uid, error)


def log_refused(uid: str, error: ValidationError) -> None:
    if uid not in _REFUSED:
        _REFUSED.add(uid)
        log.warning("training %s: %s; further ones of this kind are not logged", uid, error)


def open_reader(uid: str, where: str) -> MetricReader | None:
    """None if nothing is to be read there: ranks report by HTTP, or not at all."""
    url = urlsplit(where)
    if url.scheme == "file":
        return FolderReader(uid, Path(unquote(url.path)))
    return ObjectReader(uid, where) if url.scheme in STORES else None


_REFUSED: set[str] = set()


class Collector:
    """Reads what ranks of trainings that run report, and forgets removed trainings."""

    def __init__(
        self,
        metric_store: MetricStore,
        where: Callable[[Training], str],
        measure: Callable[[], Awaitable[Mapping[str, Sequence[RankUsage]]]] | None = None,
        may_return: Callable[[str], bool] = lambda uid: False,
    ) -> None:
        self._metric_store = metric_store
        self._where = where  # ranks of a training report to
        self._may_return = may_return  # a training that is not stored
        self._measure = measure  # what ranks use of the machine, by training
        self._source = f"machine-{time.time_ns():x}"
        self._numbers: Counter[tuple[str, int]] = Counter()  # of lines, by training and rank
        self._readers: dict[str, MetricReader] = {}
        self._due: dict[str, float] = {}
        self._removed: set[str] = set()  # deleted trainings that may have reports left
        metric_store.catch_up = self.catch_up

    async def catch_up(self, training: Training) -> None:
        """Stores what ranks have written by now, if that is cheap to find, or they have ended."""
        self._note(training)
        reader = self._readers.get(training.uid)
        if reader is not None and (reader.is_cheap or reader.is_last):
            await asyncio.to_thread(self._read_all, [reader])

    async def run(self, trainings: TrainingIndex) -> None:
        """Until it is cancelled. What a settled training has left is read when somebody asks."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(trainings))
            tasks.create_task(self._read())
            tasks.create_task(self._measure_usage())

    async def _follow(self, trainings: TrainingIndex) -> None:
        stored = await asyncio.to_thread(self._metric_store.uids)
        listed = await trainings.uids()
        self._removed |= {uid for uid in stored - listed if not self._may_return(uid)}
        async for update in trainings.updates():
            if update.is_removed:
                self._drop(update.uid)
            elif update.training is not None:
                self._note(update.training)

    def _drop(self, uid: str) -> None:
        self._readers.pop(uid, None)
        self._due.pop(uid, None)
        for key in list(self._numbers):  # a copy: the thread that measures adds to it
            if key[0] == uid:
                self._numbers.pop(key, None)
        self._removed.add(uid)

    def _note(self, training: Training) -> None:
        uid, is_over = training.uid, training.status.phase.is_terminal
        reader = self._readers.get(uid)
        if reader is None:
            if is_over and self._metric_store.is_finished(uid):  # it was read to its end
                return
            reader = open_reader(uid, self._where(training))
            if reader is None:
                return
            self._readers[uid] = reader
        if is_over and not reader.is_last:
            self._due[uid] = 0.0
        reader.is_last = is_over

    async def _read(self) -> None:
        while True:
            now = time.monotonic()
            readers = [r for r in tuple(self._readers.values()) if self._due.get(r.uid, 0) <= now]
            await asyncio.to_thread(self._read_all, readers)
            await asyncio.to_thread(self._delete_removed)
            await asyncio.sleep(EVERY_S)

    async def _measure_usage(self) -> None:
        while True:
            try:
                use = {} if self._measure is None else await self._measure()
                await asyncio.to_thread(self._store_usage, use, time.time())
            except Exception:  # ranks come and go meanwhile; reports are read all the same
                log.exception("the use of the machine could not be measured")
            try:
                await asyncio.to_thread(self._metric_store.check)
            except (AtollError, OSError) as error:
                log.warning("%s", error)
            await asyncio.sleep(USE_EVERY_S)

    def _store_usage(self, use: Mapping[str, Sequence[RankUsage]], now: float) -> None:
        for uid, ranks in use.items():
            lines = [self._line(uid, rank, now) for rank in ranks]
            try:
                self._metric_store.take(uid, lines)
            except AtollError as error:
                log.warning("machine use of training %s: %s", uid, error)

    def _line(self, uid: str, use: RankUsage, now: float) -> bytes:
        self._numbers[uid, use.rank] += 1
        sender = MetricWriter(use.rank, use.attempt, 0, f"{self._source}-{use.rank}")
        points = {MACHINE + name: [[now, None, value]] for name, value in use.values.items()}
        return batch_of(sender, self._numbers[uid, use.rank], points, 0)

    def _read_all(self, readers: Iterable[MetricReader]) -> None:
        for reader in readers:
            with reader.turn:
                self._read_one(reader)

    def _read_one(self, reader: MetricReader) -> None:
        is_last = reader.is_last
        self._due[reader.uid] = time.monotonic() + reader.every_s
        try:
            while reader.read(self._metric_store):
                pass
            if is_last:
                self._metric_store.finish(reader.uid)
                reader.remove()
                self._readers.pop(reader.uid, None)
                self._due.pop(reader.uid, None)
        except (OSError, AtollError) as error:  # nothing is lost
            log.warning("reports of training %s: %s", reader.uid, error)
            self._due[reader.uid] = time.monotonic() + 4 * reader.every_s
        except Exception:  # whatever one training has there, the others are read
            log.exception("reports of training %s", reader.uid)
            self._due[reader.uid] = time.monotonic() + 4 * reader.every_s

    def _delete_removed(self) -> None:
        """Removes reports of deleted trainings; what cannot be removed now, the next time."""
        for uid in list(self._removed):
            try:
                self._metric_store.remove(uid)
            except AtollError as error:
                log.warning("the series of a training that is removed: %s", error)
                return
            self._removed.discard(uid)
