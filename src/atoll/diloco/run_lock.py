"""Whose run this is: a training marks the run it is at, so that no other one is at it as well.

live/LAUNCH/RANK   of a rank that is at the run; written anew every few seconds, deleted at its end

Only a run that was named is marked, and only by ranks that know their training (ATOLL_UID): other
runs are their training's own. A mark that stays as it is belongs to a rank that was killed.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import datetime
from math import inf

from atoll.core.errors import BackendError, ValidationError
from atoll.diloco.group import Processes, from_leader
from atoll.objectstore import ObjectInfo, ObjectStore

log = logging.getLogger("atoll.diloco")

BEAT_S = 5.0
# A mark that was not written for so long is of a rank that is gone.
SILENCE_S = 3 * BEAT_S
# So long a training that ends may take: ranks that were told to stop have a grace.
ENDING_S = 60.0
_POLL_S = 1.0
_PATIENCE_S = 10.0


class RunLock:
    """The mark of this rank. Used by process 0 of a replica."""

    def __init__(
        self, store: ObjectStore, run: str, launch: str, rank: int, name: str = ""
    ) -> None:
        """`name` is what people call the training."""
        self._store, self._run, self._launch = store, run, launch
        self._key = f"{run}/live/{launch}/{rank:05d}"
        self._name = name or launch
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def take(
        self,
        *,
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
        ending_s: float = ENDING_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """The run is this training's, from here to `close`.

        Raises ValidationError if another one is at it and does not end.
        """
        self.beat()
        try:
            self._watch(beat_s, silence_s, ending_s, clock)
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._go_on, args=(beat_s,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody takes this rank for one that is at the run."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)  # it must not write the mark once more
        try:
            self._store.delete([self._key])
        except BackendError as error:
            log.warning("the mark %s stays: %s", self._key, error)

    def _watch(
        self, beat_s: float, silence_s: float, ending_s: float, clock: Callable[[], float]
    ) -> None:
        began, spoke = clock(), -inf
        changed: dict[str, tuple[datetime, float]] = {}  # what was last seen of each, and when
        while True:
            now, marks = clock(), self._others(silence_s)
            for mark in marks:
                if mark.key not in changed or changed[mark.key][0] != mark.modified:
                    changed[mark.key] = (mark.modified, now)
            alive = [mark for mark in marks if now - changed[mark.key][1] < silence_s]
            if not alive:
                if marks:
                    self._store.delete(mark.key for mark in marks)
                return
            if now - began > ending_s:
                raise ValidationError(
                    "run_id",
                    self._run,
                    f"another training is at this run: {self._label(alive)}. Wait for its end, "
                    "cancel it, or choose another run_id",
                )
            if now - spoke >= silence_s:
                spoke = now
                messages = "waiting for the training %s, which is at run %r or was killed just now"
                log.warning(messages, self._label(alive), self._run)
            self._is_over.wait(min(_POLL_S, beat_s))
            self.beat()

    def _others(self, silence_s: float) -> list[ObjectInfo]:
        """Marks of other trainings, but for those that were silent when this one came."""
        marked = self._store.list(f"{self._run}/live")
        own = next((info.modified for info in marked if info.key == self._key), None)
        marks = []
        for info in marked:
            launch = info.key.split("/")[-2]
            # By the clock of the store: this machine's may be another.
            is_silent = own is not None and (own - info.modified).total_seconds() > silence_s
            if launch != self._launch and not is_silent:
                marks.append(info)
        return marks

    def _label(self, marks: list[ObjectInfo]) -> str:
        """The first of the trainings, and its ranks."""
        folder = marks[0].key.rpartition("/")[0]
        try:
            name = bytes(self._store.get(marks[0].key)).decode(errors="replace")
        except Exception:  # it is gone: its id is label enough
            name = folder.rpartition("/")[2]
        ranks = [
            int(rank) for at, _, rank in (m.key.rpartition("/") for m in marks) if at == folder
        ]
        return f"{name!r} (ranks {', '.join(map(str, ranks))})"

    def beat(self) -> None:
        """The mark is of now."""
        self._store.put(self._key, self._name.encode())

    def _go_on(self, beat_s: float) -> None:
        while not self._is_over.wait(beat_s):
            try:
                self.beat()
            except BackendError as error:
                log.warning("the mark of this rank was not written: %s", error)


def lock_run(store: ObjectStore | None, run: str, rank: int, group: Processes) -> RunLock | None:
    """Lock the run for the training of this rank, in process 0 of its replica.

    None if nobody else can be at the run, or nothing is known of the training. Raises
    ValidationError if another training is at it.
    """
    launch = os.environ.get("ATOLL_UID", "")
    if store is None or not launch or launch == run or "/" in launch:
        return None
    lock = RunLock(store, run, launch, rank, os.environ.get("ATOLL_NAME", ""))
    from_leader(group, lock.take)
    return None if group.process else lock
