"""A stream takes one fragment through the rounds: agree on a mean, step, catch up with the others.

Every fragment is a run of its own in the store, so its rounds follow one another whatever the
other fragments do. `Alone` is a world of one: it has no store and sends nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from atoll.core.errors import BackendError, Gone, NotFound, ValidationError
from atoll.diloco import saved
from atoll.diloco.allreduce import ObjectStoreAllReduce, catchup
from atoll.diloco.allreduce.keys import parse_round
from atoll.diloco.allreduce.layout import Layout, TensorSpec, cells_of
from atoll.diloco.allreduce.share import Share
from atoll.diloco.allreduce.team import Solo, Team, lead, together
from atoll.diloco.outer import Floats, Fragment, Slot

log = logging.getLogger("atoll.diloco")

_POLL_S = 0.1
_PATIENCE_S = 600.0
_FIRST_RANK_S = 10.0  # how long the others leave it to rank 0 to say where all start
_DIGEST_BYTES = 32  # before a start that is in one object


class Commit(NamedTuple):
    """One committed round: the same on every replica, but for the byte counts."""

    round: int
    roster: tuple[int, ...]
    bytes_up: int = 0
    bytes_down: int = 0
    requests: int = 0


class Stream(Protocol):
    """Used by one thread at a time. Every method may block on the store and raise its errors.

    All processes of a replica call the same methods in the same order.
    """

    def share(self, slots: Sequence[Slot]) -> Share:
        """What this process carries of a fragment with these parameters."""

    def join(self, fragment: Fragment) -> None:
        """`fragment` holds what all replicas agree on, as of the newest round."""

    def advance(self, fragment: Fragment, gradient: Floats, weight: float) -> Commit:
        """`fragment` has taken the outer step of a round in which this replica took part.

        If rounds went on without this replica, `fragment` has taken the steps of all of them.
        """

    def feedback(self) -> dict[str, Any]:
        """What lossy codecs left out of this replica's values, to be sent later."""

    def load_feedback(self, state: dict[str, Any]) -> None: ...

    def leave(self, error: BaseException) -> None:
        """Tell the others that this replica has failed."""

    def close(self) -> None: ...


class Alone:
    """A world of one replica: its own gradient is the mean."""

    def __init__(self, team: Team | None = None) -> None:
        self._team: Team = Solo() if team is None else team

    def share(self, slots: Sequence[Slot]) -> Share:
        specs = tuple(TensorSpec("float32", slot.shape) for slot in slots)
        cells = cells_of(slots[-1].stop, ("fp32",))
        layout = Layout(specs, 1, "fp32", "fp32", "", cells)
        return Share(layout, self._team.process, self._team.processes)

    def join(self, fragment: Fragment) -> None:
        pass

    def advance(self, fragment: Fragment, gradient: Floats, weight: float) -> Commit:
        fragment.step(gradient)
        return Commit(fragment.rounds - 1, (0,))

    def feedback(self) -> dict[str, Any]:
        return {}

    def load_feedback(self, state: dict[str, Any]) -> None:
        pass

    def leave(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


class StoreStream:
    """A stream through an all-reduce that nothing else uses."""

    def __init__(self, allreduce: ObjectStoreAllReduce, checkpoint_every: int) -> None:
        self._allreduce = allreduce
        self._checkpoint_every = checkpoint_every
        self._is_stale = False  # a join failed: the next round must not be added to what is here

    def share(self, slots: Sequence[Slot]) -> Share:
        allreduce = self._allreduce
        like = [np.broadcast_to(np.float32(0), slot.shape) for slot in slots]
        return allreduce.share_of(allreduce.describe(like))

    def join(self, fragment: Fragment) -> None:
        """Load the newest checkpoint, or the start, and take the steps of the rounds after it."""
        deadline = time.monotonic() + _PATIENCE_S
        self._is_stale = True
        while True:
            try:
                following = self._load(fragment)
                for mean, layout in self._allreduce.read_since(following):
                    fragment.step(self._own(fragment, mean, layout))
                break
            except catchup.Outdated:
                continue
            except Gone as news:
                # A newer checkpoint is on its way as long as others train.
                if lead(self._allreduce.team, lambda: time.monotonic() > deadline):
                    raise
                log.info("waiting for a checkpoint: %s", news)
                time.sleep(_POLL_S)
        self._is_stale = False

    def advance(self, fragment: Fragment, gradient: Floats, weight: float) -> Commit:
        allreduce = self._allreduce
        layout = fragment.share.layout
        mean = allreduce.allreduce_share(layout, gradient, weight=weight)
        report = allreduce.last_round
        assert report is not None
        if report.skipped or self._is_stale:
            self.join(fragment)
        else:
            fragment.step(mean)
            if not report.is_member and self._is_behind(report.round):
                self.join(fragment)
        roster = tuple(report.roster)
        is_due = fragment.rounds == 1 or fragment.rounds % self._checkpoint_every == 0
        if is_due and roster[0] == allreduce.rank and not report.skipped:
            self._save(fragment, report.round)
        return Commit(report.round, roster, report.bytes_up, report.bytes_down, report.requests)

    def feedback(self) -> dict[str, Any]:
        return self._allreduce.state_dict()

    def load_feedback(self, state: dict[str, Any]) -> None:
        self._allreduce.load_state_dict(state)

    def leave(self, error: BaseException) -> None:
        self._allreduce.leave(error)

    def close(self) -> None:
        self._allreduce.close()

    def _save(self, fragment: Fragment, number: int) -> None:
        key = self._allreduce.keys.checkpoint(number + 1)
        try:
            saved.save(self._allreduce, fragment, key, number + 1)
        except BackendError as error:
            log.warning("round %d is not in a checkpoint, a later one will be: %s", number, error)

    def _is_behind(self, number: int) -> bool:
        allreduce = self._allreduce
        return lead(
            allreduce.team,
            lambda: catchup.latest(allreduce.blobs, allreduce.keys, number) is not None,
        )

    def _own(self, fragment: Fragment, mean: Floats, layout: Layout) -> Floats:
        """What this process carries of a mean, which may be of a round that was cut otherwise."""
        if mean.size == fragment.share.size and layout.cells == fragment.share.layout.cells:
            return mean
        return saved.cut(fragment.share, mean)

    def _load(self, fragment: Fragment) -> int:
        """Load the newest checkpoint that is whole, or the start; returns the round after it."""
        allreduce = self._allreduce
        keys = lead(
            allreduce.team,
            lambda: [blob.key for blob in allreduce.blobs.find(allreduce.keys.checkpoints())],
        )
        for key in reversed(keys):
            number = parse_round(key)
            if number is not None and self._take(fragment, key):
                return number
        self._start(fragment)
        return 0

    def _take(self, fragment: Fragment, key: str) -> bool:
        """Whether all processes could load the checkpoint."""

        def load() -> bool:
            try:
                state = saved.read_index(self._allreduce, key)
                if isinstance(state, bytes):
                    whole = msgspec.msgpack.decode(state, type=bytes)
                    saved.load_whole(fragment, whole, self._allreduce.keys.run)
                else:
                    saved.load(self._allreduce, fragment, state)
            except ValidationError:
                raise
            except (NotFound, ValueError, msgspec.MsgspecError) as error:
                log.warning("checkpoint %s cannot be used: %s", key, error)
                return False
            return True

        return all(together(self._allreduce.team, load))

    def _start(self, fragment: Fragment) -> None:
        """Load the parameters with which the first replica of the run began."""
        allreduce = self._allreduce
        key = allreduce.keys.start()
        deadline = time.monotonic() + (_FIRST_RANK_S if allreduce.rank else 0)

        def exists() -> bool:
            while True:
                try:
                    allreduce.blobs.get(key, 0, 1)
                    return True
                except NotFound:
                    if time.monotonic() >= deadline:
                        return False
                time.sleep(_POLL_S)

        if not lead(allreduce.team, exists):
            saved.save(allreduce, fragment, key, 0)

        def load() -> None:
            state = saved.read_index(allreduce, key)
            if isinstance(state, bytes):
                saved.load_whole(fragment, state[_DIGEST_BYTES:], allreduce.keys.run)
            else:
                saved.load(allreduce, fragment, state)

        together(allreduce.team, load)
