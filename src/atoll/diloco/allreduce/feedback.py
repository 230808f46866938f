"""Error feedback: what a lossy codec leaves out of one round is added to the next.

Every stream of tensors has its own. New residuals count only once their round is committed, so an
attempt that is given up changes nothing. At any time, what a rank has brought is what was committed
of it and what it owes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atoll.diloco.allreduce.manifest import Manifest
from atoll.diloco.allreduce.share import Share
from atoll.diloco.packing import Vector


def set_left_out(out: Vector, values: Vector, sent: Vector) -> None:
    """`out`, which may be `values`, holds what `sent` lacks of them.

    It is 0 instead of infinity and NaN, which would stay for ever.
    """
    for start in range(0, values.size, _SLICE):
        at = slice(start, start + _SLICE)
        with np.errstate(invalid="ignore", over="ignore"):
            np.subtract(values[at], sent[at], out=out[at])
        _drop_infinite(out[at])


_MIN_SHARE = 1e-6
_SLICE = 1 << 16  # values of a pass that stay in the cache
_LARGEST = np.finfo(np.float32).max


def add_residual(row: Vector, residual: Vector) -> None:
    """Add the residual in place. A sum of finite values beyond the largest float is that float."""
    for start in range(0, row.size, _SLICE):
        part = row[start : start + _SLICE]
        with np.errstate(over="ignore", invalid="ignore"):
            total = part + residual[start : start + _SLICE]
        is_over = np.isinf(total)
        if is_over.any():
            is_over &= np.isfinite(part)
            total[is_over] = np.copysign(_LARGEST, total[is_over])
        part[:] = total


def _drop_infinite(residual: Vector) -> None:
    is_number = np.isfinite(residual)
    if not is_number.all():
        residual[~is_number] = 0


@dataclass
class Entry:
    """What this process will owe if the attempt of `manifest` is committed with its `upload`.

    `find_left_out` computes what the upload lacks, into a row if it gets one, as long as the values
    are there; `left_out` is that of a call that has failed.
    """

    manifest: Manifest
    upload: str
    rank: int
    share: Share
    find_left_out: Callable[[Vector | None], Vector] | None  # None: the codec is exact
    left_out: Vector | None = None
    shards: dict[int, Vector] = field(default_factory=dict)  # of the means this rank made


@dataclass
class Feedback:
    """`up`: what this rank owes of its values. `down[s]`: what its means of shard `s` left out.

    What a mean leaves out becomes a part of its maker's values, which reach the shard whoever
    makes its next mean. A rank that weighs next to nothing keeps it for its own next mean.
    """

    up: Vector | None = None
    down: dict[int, Vector] = field(default_factory=dict)
    entry: Entry | None = None  # of the attempt under way, or of a call that failed in it
    decay: float = 1.0  # what stays, from one round to the next, of what an upload left out

    @classmethod
    def of(cls, state: dict[str, Any]) -> Feedback:
        """As `state()` gave it; copies."""
        up = None if state["up"] is None else np.array(state["up"], np.float32)
        return cls(up, {shard: np.array(row, np.float32) for shard, row in state["down"].items()})

    def lacking(self, shard: int, size: int) -> Vector | None:
        """What earlier means of the shard, which has so many values, left out."""
        residual = self.down.get(shard)
        return None if residual is None or residual.size != size else residual

    def keep(self) -> None:
        """The call has failed: what its attempt leaves out is computed while the values are there.

        Whether it counts is asked when the next call begins.
        """
        entry = self.entry
        if entry is not None and entry.find_left_out is not None:
            entry.left_out, entry.find_left_out = entry.find_left_out(None), None

    def give_up(self) -> None:
        """Forget the residuals of an attempt that is void."""
        self.entry = None

    def settle(self) -> None:
        """The attempt of the entry is committed."""
        entry, self.entry = self.entry, None
        if entry is None:
            return
        if entry.find_left_out is not None:
            self.up = entry.find_left_out(self.up)
        else:
            self.up = entry.left_out
        if self.up is not None and self.decay != 1:
            self.up *= np.float32(self.decay)
        weights = entry.manifest.weights
        share = weights[entry.rank] / max(weights.values())
        share /= sum(weight / max(weights.values()) for weight in weights.values())
        for shard, residual in entry.shards.items():
            self.down.pop(shard, None)
            # A light rank would bring it back beyond measure when it weighs again.
            if share < _MIN_SHARE:
                if shard == entry.rank:
                    self.down[shard] = residual
                continue
            if self.up is None:
                self.up = np.zeros(entry.share.size, np.float32)
            own = self.up[slice(*entry.share.bounds(shard))]
            for start in range(0, residual.size, _SLICE):
                part = residual[start : start + _SLICE]
                with np.errstate(over="ignore", invalid="ignore"):
                    np.divide(part, np.float32(share), out=part)
                _drop_infinite(part)
                add_residual(own[start : start + _SLICE], part)

    def carry(self, values: Vector) -> None:
        """The round did without this rank, which owes all of its values now."""
        if self.up is not None and self.up.size == values.size:
            self.up[:] = values
        else:
            self.up = values.copy()

    def state(self) -> dict[str, np.ndarray | dict[int, np.ndarray] | None]:
        """Copies: the rows are used again."""
        up = None if self.up is None else self.up.copy()
        return {"up": up, "down": {shard: row.copy() for shard, row in self.down.items()}}
