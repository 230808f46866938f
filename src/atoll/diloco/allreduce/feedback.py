"""Error feedback: what a lossy codec leaves out of one round is added to the next.

Every stream of tensors has its own. New residuals count only once their round is committed, so an
attempt that is given up changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from atoll.diloco.allreduce.layout import Vector


def left_out(values: Vector, sent: Vector) -> Vector:
    """What `sent` lacks of `values`; 0 instead of infinity and NaN, which would stay for ever."""
    with np.errstate(invalid="ignore", over="ignore"):
        residual = values - sent
    is_number = np.isfinite(residual)
    if not is_number.all():
        residual[~is_number] = 0
    return residual


@dataclass
class Feedback:
    """`up`: what this rank's uploads left out. `down[s]`: what its means of shard `s` left out."""

    up: Vector | None = None
    down: dict[int, Vector] = field(default_factory=dict)
    pending: dict[int, Vector] = field(default_factory=dict)

    def owed(self, shard: int, mean: Vector) -> Vector:
        """The mean together with what earlier means of the shard left out."""
        residual = self.down.get(shard)
        return mean if residual is None or residual.shape != mean.shape else mean + residual

    def keep_shard(self, shard: int, owed: Vector, published: Vector) -> None:
        self.pending[shard] = left_out(owed, published)

    def give_up(self) -> None:
        """Forget the residuals of an attempt that is void."""
        self.pending.clear()

    def settle(self, residual: Vector | None) -> None:
        """The round is committed; `residual` is what this rank brought and the mean lacks."""
        self.up = residual
        self.down.update(self.pending)
        self.pending.clear()

    def state(self) -> dict[str, np.ndarray | dict[int, np.ndarray] | None]:
        return {"up": self.up, "down": dict(self.down)}
