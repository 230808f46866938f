"""OuterRows: the global values of one fragment and the state of its outer rule, as rows by name.

Values are fp32 and computed in numpy: every operation rounds as IEEE 754 says and none is left to
a compiler, so the bits do not depend on the processor, the threads or the build of torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from atoll.diloco.packing import Vector
from atoll.diloco.terms import OuterTerms, value_at

SLICE = 1 << 16  # values of a pass: three rows of so many stay in the cache


class OuterRows:
    """What one process carries of a fragment, and its outer step: see `reduce.OuterStep`.

    A mean is that of pseudo-gradients: where a replica was minus where it is, so a rate of 1
    without momentum lands on the mean of the replicas.
    """

    is_wanted = True

    def __init__(self, size: int, terms: OuterTerms, fragments: int = 1) -> None:
        """`fragments` of the run: they take turns, and schedules count the turns."""
        self.values: Vector = np.zeros(size, np.float32)
        self.momentum: Vector = np.zeros(size, np.float32)
        self._terms, self._fragments = terms, fragments

    @property
    def rows(self) -> Mapping[str, Vector]:
        return {"values": self.values, "momentum": self.momentum}

    def step(self, round: int, start: int, mean: Vector) -> None:
        terms, turn = self._terms, round // self._fragments
        lr, beta = value_at(terms.lr, turn), value_at(terms.beta, turn)
        for first in range(0, mean.size, SLICE):
            gradient = mean[first : first + SLICE]
            at = slice(start + first, start + first + gradient.size)
            terms.rule.step(self.values[at], self.momentum[at], gradient, lr, beta)
