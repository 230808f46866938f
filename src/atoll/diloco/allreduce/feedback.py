"""Error feedback: what a lossy codec leaves out of one round is added to the next.

Every stream of tensors has its own. New residuals count only once their round is committed, so an
attempt that is given up changes nothing. At any time, what a rank has brought is what was committed
of it and what it owes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from atoll.diloco.allreduce.layout import Vector
from atoll.diloco.allreduce.roster import Roster
from atoll.diloco.allreduce.share import Share


def left_out(values: Vector, sent: Vector) -> Vector:
    """What `sent` lacks of `values`; 0 instead of infinity and NaN, which would stay for ever."""
    with np.errstate(invalid="ignore", over="ignore"):
        return _finite(values - sent)


def _finite(residual: Vector) -> Vector:
    is_number = np.isfinite(residual)
    if not is_number.all():
        residual[~is_number] = 0
    return residual


@dataclass(frozen=True)
class Entry:
    """What this process will owe if the attempt of `roster` is committed with its `upload`."""

    roster: Roster
    upload: str
    rank: int
    share: Share
    left_out: Vector | None  # of the upload
    shards: dict[int, Vector] = field(default_factory=dict)  # of the means this rank made


@dataclass
class Feedback:
    """`up`: what this rank owes of its values. `down[s]`: what its means of shard `s` left out.

    A rank that stands in for the owner of a shard may not make its next mean. So what its mean
    left out becomes a part of its own values, which reach the shard whoever makes it.
    """

    up: Vector | None = None
    down: dict[int, Vector] = field(default_factory=dict)
    entry: Entry | None = None  # of the attempt under way, or of a call that failed in it

    def owed(self, shard: int, mean: Vector) -> Vector:
        """The mean together with what earlier means of the shard left out."""
        residual = self.down.get(shard)
        return mean if residual is None or residual.shape != mean.shape else mean + residual

    def give_up(self) -> None:
        """Forget the residuals of an attempt that is void."""
        self.entry = None

    def settle(self) -> None:
        """The attempt of the entry is committed."""
        entry, self.entry = self.entry, None
        if entry is None:
            return
        self.up = entry.left_out
        weights = entry.roster.weights
        share = weights[entry.rank] / max(weights.values())
        share /= sum(weight / max(weights.values()) for weight in weights.values())
        for shard, residual in entry.shards.items():
            if shard == entry.rank:
                self.down[shard] = residual
                continue
            self.down.pop(shard, None)
            if self.up is None:
                self.up = np.zeros(entry.share.size, np.float32)
            start, end = entry.share.bounds(shard)
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                self.up[start:end] += _finite(residual / np.float32(share))

    def carry(self, values: Vector) -> None:
        """The round did without this rank, which owes all of its values now."""
        self.up = values

    def state(self) -> dict[str, np.ndarray | dict[int, np.ndarray] | None]:
        return {"up": self.up, "down": dict(self.down)}
