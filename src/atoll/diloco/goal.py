"""When a run is over: after so many rounds, steps, tokens or epochs of the run, not the process.

What is compared was agreed in rounds, so all replicas end after the same one; a replica that comes
when the run is over has nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from atoll.core.checks import check_int, check_number
from atoll.core.errors import ValidationError
from atoll.diloco.data.ledger import Terms
from atoll.diloco.round.effects import RunState

_MANY = 10**12


class RunGoal(NamedTuple):
    """The run is over as soon as one of them is reached; with none of them, by its data only."""

    rounds: int | None = None
    steps: int | None = None
    tokens: float | None = None
    epochs: int | None = None

    def check(self, terms: Terms | None) -> None:
        """Raises ValidationError unless it can be reached. `terms` are those of the run's data."""
        if all(each is None for each in self):
            expected = "expected rounds=, steps=, tokens= or epochs="
            if terms is not None and terms.length is not None:
                count = terms.epochs
                expected += f"; until(…, epochs={count}) uses all of diloco.data(epochs={count})"
            raise ValidationError("until", "no end", expected)
        for name in ("rounds", "steps", "epochs"):
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, 0, _MANY)
        if self.tokens is not None:
            check_number("tokens", self.tokens, 0, 1e30)
        if self.epochs is None:
            return
        if terms is None or terms.length is None:
            expected = "expected rounds=, steps= or tokens=: epochs need diloco.data(n)"
            raise ValidationError("epochs", self.epochs, expected)
        if self.epochs > terms.epochs:
            expected = f"the data has {terms.epochs}: diloco.data(epochs=…)"
            raise ValidationError("epochs", self.epochs, expected)

    def is_over(self, run: RunState, fragments: int) -> bool:
        """Whether all replicas end with this state: it is reached, or the data is used up."""
        is_used_up = run.ledger is not None and run.ledger.is_used_up
        return is_used_up or self.is_reached(run, fragments)

    def is_reached(self, run: RunState, fragments: int) -> bool:
        rounds = run.round // fragments
        if self.tokens is not None and rounds and not run.tokens:
            raise ValidationError(
                "tokens",
                self.tokens,
                "nothing was counted in the rounds so far: call diloco.count(n) with the tokens of "
                "each batch",
            )
        return (
            (self.rounds is not None and rounds >= self.rounds)
            or (self.steps is not None and run.steps >= self.steps)
            or (self.tokens is not None and run.tokens >= self.tokens)
            or (self.epochs is not None and run.epoch >= self.epochs)
        )


def go_on(
    is_over: Callable[[], bool],
    batches: Iterable[Any] | None,
    step: Callable[[], int],
    read: Callable[[Iterable[Any]], Iterator[Any]] = iter,
) -> Iterator[Any]:
    """The run's step, or the next batch, until the run is over.

    Batches that end begin again, as epochs do; an iterator that ends is the end. `read` iterates
    over them.
    """
    if batches is None:
        while not is_over():
            yield step()
        return
    while not is_over():
        count = 0
        for batch in read(batches):
            count += 1
            yield batch
            if is_over():
                return
        if not count or iter(batches) is batches:
            return
