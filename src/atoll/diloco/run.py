"""What a script sees of the run that its replica is a part of: clock, end, data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from atoll.diloco.data.report import DataReport
from atoll.diloco.data.shard import OpenAt, Shard
from atoll.diloco.goal import RunGoal, go_on
from atoll.diloco.shared import SharedData
from atoll.diloco.stream import Stream


class RunFace:
    """The part of `DiLoCo` that is about the whole run."""

    steps: int  # of this process
    _clock: tuple[int, int, float]  # rounds, steps and tokens of the run
    _reported_at: tuple[
        float, int
    ]  # what this process counted, and its steps, as far as the clock goes
    _goal: RunGoal | None
    _data: SharedData
    _streams: Sequence[Stream]

    def _receive(self) -> None:
        raise NotImplementedError

    @property
    def round(self) -> int:
        """How many outer steps every fragment has taken, also before this replica joined."""
        return self._clock[0]

    @property
    def step(self) -> int:
        """The step of the run: what its rounds agreed on, and the steps of this process since.

        It is the same in all replicas at the same place of the same round, also after a restart.
        """
        return self.agreed_steps + self.steps - self._reported_at[1]

    @property
    def agreed_steps(self) -> int:
        """The steps of the run up to its last round."""
        return self._clock[1]

    @property
    def tokens(self) -> float:
        """What all replicas counted in the committed rounds of the run."""
        return self._clock[2]

    @property
    def epoch(self) -> int | None:
        """The epoch of the run's data; None without `shard()`."""
        return None if self._data.shard is None else self._data.shard.epoch

    def until(
        self,
        batches: Iterable[Any] | None = None,
        *,
        rounds: int | None = None,
        steps: int | None = None,
        tokens: float | None = None,
        epochs: int | None = None,
    ) -> Iterator[Any]:
        """Steps of the run, or `batches`, until it has done so much; the first that is reached.

            for batch in diloco.until(loader, steps=10_000): ...

        All replicas end after the same round, whichever of them were killed and came again. The
        last period ends with the last step, so nothing is left that was not synchronised.
        """
        goal = RunGoal(rounds, steps, tokens, epochs)
        goal.check()
        if epochs is not None:
            self._data.check_epochs(epochs)
        self._goal = goal
        return go_on(self, goal, batches)

    def shard(
        self,
        dataset: Any = None,
        *,
        stream: OpenAt | None = None,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int = 1,
        batch: int = 32,
        fingerprint: str = "",
        part: tuple[int, int] | None = None,
    ) -> Shard:
        """Data of which every part is trained on once, by one replica, whoever comes and goes.

        `dataset`: one with a length, or its length. `stream`: `stream(position)` iterates over the
        data from there on. `batch` is how much a process trains on at a time. All replicas give
        the same arguments, but for `batch`; `fingerprint` is any word for what the data is.

        In a replica of several processes each has batches of its own, unless `part`, as (0, 1) for
        the first and only one, says which part of them it trains on: those of a tensor parallel
        group train on the same.
        """
        return self._data.open(dataset, stream, seed, shuffle, epochs, batch, fingerprint, part)

    def data_report(self) -> DataReport:
        """What of the data was used, in which round and by whom, as the store has it."""
        self._receive()
        return self._data.report(self._streams)
