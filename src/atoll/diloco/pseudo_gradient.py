"""How far a replica has moved, on its way into a round: the memory it takes, and how it is kept.

With an exact codec it is one row, and the mean comes into that row. With any other it is added to
what the codec left out of earlier rounds, so that there is no row of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from atoll.diloco.allreduce.work import Take
from atoll.diloco.checks import Checks, left_out
from atoll.diloco.model import ReplicaModel
from atoll.diloco.outer import Floats, Fragment
from atoll.diloco.spill import SpillFile
from atoll.diloco.stream import Joined, PseudoGradient, Stream


class PseudoGradients:
    """Takes movements out of a model, one at a time: the next one uses the same memory."""

    def __init__(self, model: ReplicaModel, *, is_background: bool, is_many: bool) -> None:
        """`is_beside`: the model trains on while a round is on its way."""
        self._model = model
        self._is_background, self._is_many = is_background, is_many
        self._row: Floats | None = None

    def take(self, fragment: Fragment, stream: Stream, checks: Checks) -> PseudoGradient:
        """All processes of the replica call it. One that is not finite is left out."""
        parts = partial(self._model.pseudo_gradient_parts, fragment)
        # Parts come from all processes at once, which a round that fails in one cannot wait for.
        again = None if self._is_background or self._is_many else parts
        joint = stream.begin(fragment, again)
        if joint is None:
            return self._in_a_row(fragment, checks)

        def check(take: Take) -> None:
            def both(start: int, part: Floats) -> None:
                take(start, part)
                joint.add(start, part)

            parts(both)

        note = checks.examine_parts(fragment, check)
        is_bad = bool(left_out({0: note}))
        if is_bad:
            parts(joint.subtract)
            joint.has_values = False
        return PseudoGradient(note, is_bad, joint=joint)

    def _in_a_row(self, fragment: Fragment, checks: Checks) -> PseudoGradient:
        row = self._room(fragment)
        self._model.pseudo_gradient(fragment, row)
        note = checks.examine(fragment, row)
        is_bad = bool(left_out({0: note}))
        again: Callable[[], None] | None = None
        if is_bad:
            again = partial(row.fill, 0)
        elif not self._is_background:
            again = partial(self._model.pseudo_gradient, fragment, row)
        return PseudoGradient(note, is_bad, row, again)

    def keep(self, fragment: Fragment, stream: Stream, join: Callable[[Floats], Joined]) -> Joined:
        """`join` has changed the global values. The model stays as far from them as it was."""
        with SpillFile(fragment.share.size) as spill:
            self._model.pseudo_gradient_parts(fragment, spill.put)
            row = (
                np.empty(fragment.share.size, np.float32)
                if stream.has_residual
                else self._room(fragment)
            )
            joined = join(row)
            spill.get(0, row)
            np.subtract(fragment.values, row, out=row)
            self._model.apply(fragment, 0.0, row)
        return joined

    def _room(self, fragment: Fragment) -> Floats:
        size = fragment.share.size
        if self._row is None or self._row.size < size:
            self._row = np.empty(size, np.float32)
        return self._row[:size]
