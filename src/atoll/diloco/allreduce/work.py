"""What one call of an all-reduce brings to its rounds, and where their mean goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.diloco.allreduce.feedback import Feedback
from atoll.diloco.allreduce.layout import Layout, Vector
from atoll.diloco.allreduce.upload import Cargo

Bring = Callable[[Cargo], None]


@dataclass
class Work:
    """What one call of `allreduce` brings to its rounds."""

    layout: Layout
    cargo: Cargo
    bring: Bring | None  # puts the values into the cargo again
    weight: float
    feedback: Feedback
    out: Vector  # for the mean; it may be the row of the cargo
    is_held: bool  # the values are needed until the round is committed, so the mean stays encoded
    upload: str = ""
    uploads: list[str] = field(default_factory=list)  # of this round; all hold the same values
    seconds: dict[str, float] = field(default_factory=dict)

    def bring_back(self) -> None:
        """The cargo has its values, even if a part of a mean is in their place."""
        if self.out is self.cargo.row and not self.is_held:
            assert self.bring is not None
            self.bring(self.cargo)
            self.cargo.add(self.feedback.up)
