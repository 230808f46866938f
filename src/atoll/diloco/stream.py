"""A stream takes one fragment through the rounds: agree on a mean, step, catch up with the others.

Every fragment is a run of its own in the store, so its rounds follow one another whatever the
other fragments do. `Alone` is a world of one: it has no store and sends nothing.
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import Any, NamedTuple, Protocol

import numpy as np

from atoll.core.errors import BackendError, Gone, NotFound
from atoll.diloco.allreduce import ObjectStoreAllReduce, catchup, wire
from atoll.diloco.outer import Floats, Fragment, load_bytes, to_bytes

log = logging.getLogger("atoll.diloco")

_POLL_S = 0.1
_PATIENCE_S = 600.0
_FIRST_RANK_S = 10.0  # how long the others leave it to rank 0 to say where all start


class Commit(NamedTuple):
    """One committed round: the same on every replica, but for the byte counts."""

    round: int
    roster: tuple[int, ...]
    bytes_up: int = 0
    bytes_down: int = 0
    requests: int = 0


class Stream(Protocol):
    """Used by one thread at a time. Every method may block on the store and raise its errors."""

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

    def join(self, fragment: Fragment) -> None:
        """Load the newest checkpoint, or the start, and take the steps of the rounds after it."""
        deadline = time.monotonic() + _PATIENCE_S
        self._is_stale = True
        while True:
            try:
                state = self._allreduce.join()
                break
            except Gone as news:
                # A newer checkpoint is on its way as long as others train.
                if time.monotonic() > deadline:
                    raise
                log.info("waiting for a checkpoint: %s", news)
                time.sleep(_POLL_S)
        if state.checkpoint is None:
            self._start(fragment)
        else:
            load_bytes(fragment, state.checkpoint.state)  # type: ignore[arg-type]
        for mean in state.means:
            fragment.step(_row(mean.tensors))
        self._is_stale = False

    def advance(self, fragment: Fragment, gradient: Floats, weight: float) -> Commit:
        allreduce = self._allreduce
        means = allreduce.allreduce(fragment.rows(gradient), weight=weight)
        report = allreduce.last_round
        assert report is not None
        if report.skipped or self._is_stale:
            self.join(fragment)
        else:
            fragment.step(_row(means))
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
        try:
            self._allreduce.save_checkpoint(to_bytes(fragment), number)
        except BackendError as error:
            log.warning("round %d is not in a checkpoint, a later one will be: %s", number, error)

    def _is_behind(self, number: int) -> bool:
        return catchup.latest(self._allreduce.blobs, self._allreduce.keys, number) is not None

    def _start(self, fragment: Fragment) -> None:
        """Load the parameters with which the first replica of the run began."""
        blobs, key = self._allreduce.blobs, self._allreduce.keys.start()
        mine = to_bytes(fragment)
        digest = hashlib.sha256(mine).digest()
        deadline = time.monotonic() + (_FIRST_RANK_S if self._allreduce.rank else 0)
        sealed = wire.SEAL.size
        while True:
            try:
                # Mostly all replicas begin alike; the digest in front says so without a download.
                if bytes(blobs.get(key, sealed, sealed + len(digest))) == digest:
                    return
                body = wire.unseal(wire.CHECKPOINT, wire.fence(key), blobs.get(key))
                load_bytes(fragment, body[len(digest) :])
                return
            except NotFound:
                pass
            if time.monotonic() < deadline:
                time.sleep(_POLL_S)
            else:
                blobs.create(key, wire.seal(wire.CHECKPOINT, wire.fence(key), digest + mine))


def _row(tensors: list[Floats]) -> Floats:
    return np.concatenate([each.reshape(-1) for each in tensors])
