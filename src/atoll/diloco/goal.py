"""When a run is over: after so many rounds, steps, tokens or epochs of the run, not the process.

What is compared was agreed in rounds, so all replicas end after the same one; a replica that comes
when the run is over has nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from atoll.core.checks import check_int, check_number
from atoll.core.errors import ValidationError
from atoll.diloco.data.ledger import Terms

_MANY = 10**12


class RunClock(Protocol):
    """The run as all replicas agree on it."""

    @property
    def round(self) -> int: ...

    @property
    def step(self) -> int: ...

    @property
    def agreed_steps(self) -> int: ...

    @property
    def tokens(self) -> float: ...

    @property
    def epoch(self) -> int | None: ...


class RunGoal(NamedTuple):
    """The run is over as soon as one of them is reached."""

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
        if self.epochs is not None:
            check_epochs(self.epochs, terms)

    def is_reached(self, clock: RunClock) -> bool:
        if self.tokens is not None and clock.round and not clock.tokens:
            raise ValidationError(
                "tokens",
                self.tokens,
                "nothing was counted in the rounds so far: call diloco.count(n) with the tokens of "
                "each batch",
            )
        return (
            (self.rounds is not None and clock.round >= self.rounds)
            or (self.steps is not None and clock.agreed_steps >= self.steps)
            or (self.tokens is not None and clock.tokens >= self.tokens)
            or (self.epochs is not None and (clock.epoch or 0) >= self.epochs)
        )


def go_on(clock: RunClock, goal: RunGoal, batches: Iterable[Any] | None) -> Iterator[Any]:
    """The run's step, or the next batch, until the goal is reached.

    Batches that end begin again, as epochs do; an iterator that ends is the end.
    """
    if batches is None:
        while not goal.is_reached(clock):
            yield clock.step
        return
    while not goal.is_reached(clock):
        count = 0
        for batch in batches:
            count += 1
            yield batch
            if goal.is_reached(clock):
                return
        if not count or iter(batches) is batches:
            return


def check_epochs(epochs: int, terms: Terms | None) -> None:
    """Raises ValidationError unless the data of the run, if it shares any, has so many."""
    if terms is None or terms.length is None:
        expected = "expected rounds=, steps= or tokens=: epochs need diloco.data(n)"
        raise ValidationError("epochs", epochs, expected)
    if epochs > terms.epochs:
        expected = f"the data has {terms.epochs}: diloco.data(epochs=…)"
        raise ValidationError("epochs", epochs, expected)
