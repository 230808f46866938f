"""The data of a trainer's DataLoader, so that every replica reads its own.

Trainers shuffle by the seed alone: replicas with equal seeds would all read the same samples.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.diloco import DiLoCo
    from atoll.diloco.data.sampler import DataSampler

log = logging.getLogger("atoll.diloco")

_ENDLESS = 10**6  # epochs, where the trainer's steps are the end


class TrainerBatches:
    """A batch sampler over what the replica holds of the run's data.

    An epoch of the trainer stays as long as it was; the run's epochs go on behind it.
    """

    def __init__(self, data: DataSampler, batch: int, length: int) -> None:
        self._data, self._length = data, length
        self.batch_size, self.drop_last = batch, False

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        count = 0
        while self._data.has_more(steps_tail=False):
            for batch in self._data.sampler:
                yield batch
                count += 1
                if count == self._length:
                    return
            # What a loader has fetched ahead is trained on before there can be more.
            if self._data.is_ahead:
                return


class OwnRepeats:
    """The own part of a sampler that repeats samples in groups, as TRL's trainers for RL do."""

    def __init__(self, sampler: Any, rank: int, world: int) -> None:
        self._sampler, self._rank, self._world = sampler, rank, world
        self._length = len(sampler)
        sampler.num_samples = (sampler.num_samples - rank + world - 1) // world

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        count = 0
        while count < self._length:
            for index in self._sampler:
                count += 1
                yield self._rank + index * self._world


def take_own_part(loader: Any, diloco: DiLoCo, seed: int, epochs: int | None) -> DataSampler | None:
    """`loader` draws from the replica's own part from here on.

    Gives the lease of it, of which the trainer has to say what it trained on. None if there is
    none: prompts that are repeated in groups are divided for good, and anything else is left as it
    is, which is told.
    """
    from torch.utils.data import RandomSampler, SequentialSampler

    batches = _batches(loader)
    sampler: Any = getattr(batches, "sampler", None)
    rank, world = diloco.config.rank, diloco.config.world_size
    if hasattr(sampler, "mini_repeat_count") and len(loader.dataset) >= world * sampler.batch_size:
        batches.sampler = OwnRepeats(sampler, rank, world)
        return None
    if not isinstance(sampler, SequentialSampler | RandomSampler):
        log.warning(
            "replicas with equal seeds read the same data: %s cannot be divided, so give each of "
            "them its own part, by its rank, and pass own_data=False",
            type(sampler or loader.dataset).__name__,
        )
        return None
    data = diloco.data(
        loader.dataset,
        seed=seed,
        shuffle=isinstance(sampler, RandomSampler),
        epochs=epochs or _ENDLESS,
        batch=batches.batch_size,
    )
    workers = loader.num_workers * (loader.prefetch_factor or 0)
    data.fetch_ahead(workers + 1)  # Accelerate looks one batch ahead
    _replace(loader, TrainerBatches(data, batches.batch_size, len(loader.batch_sampler)))
    return data


def empty(loader: Any) -> None:
    """`loader` has no more batches."""
    if getattr(loader, "batch_sampler", None) is not None:
        _replace(loader, ())


def _replace(loader: Any, batches: Any) -> None:
    # A DataLoader refuses it by itself, but where it is not iterated yet nothing is in the way.
    inside = getattr(loader, "base_dataloader", loader)
    object.__setattr__(inside, "batch_sampler", batches)


def _batches(loader: Any) -> Any:
    """The batch sampler under those that a trainer has put around it; None if there is none."""
    batches: Any = getattr(loader, "batch_sampler", None)
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return batches
