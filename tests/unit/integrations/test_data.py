from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from atoll.diloco import DiLoCo
from atoll.integrations.data import OwnRepeats, TrainerBatches, empty, take_own_part


class Loop:
    """A model whose steps drive a DiLoCo of one replica."""

    def __init__(self, sync_every: int = 2) -> None:
        model = torch.nn.Linear(2, 1)
        self.inner = torch.optim.SGD(model.parameters(), lr=0.1)
        self.diloco = DiLoCo(model, self.inner, sync_every=sync_every)


def loader_of(count: int, batch: int, *, shuffle: bool = True, **options: Any) -> DataLoader[Any]:
    return DataLoader(range(count), batch_size=batch, shuffle=shuffle, **options)  # type: ignore[arg-type]


def test_a_loader_keeps_its_length_and_every_sample_comes_once_an_epoch() -> None:
    loop, loader = Loop(), loader_of(12, 3)
    shard = take_own_part(loader, loop.diloco, 0, None)
    assert shard is not None
    assert isinstance(loader.batch_sampler, TrainerBatches)
    assert len(loader) == 4
    for _ in range(2):
        read = []
        for batch in loader:
            read += batch.tolist()
            shard.hand_to_loop()
            loop.inner.step()
        assert sorted(read) == list(range(12))
        assert read != list(range(12))
    loop.diloco.close()


def test_what_was_fetched_and_not_trained_on_comes_again() -> None:
    loop, loader = Loop(), loader_of(12, 3, shuffle=False)
    shard = take_own_part(loader, loop.diloco, 0, None)
    assert shard is not None
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2]
    shard.hand_to_loop()
    loop.inner.step()
    assert next(batches).tolist() == [3, 4, 5]
    assert next(iter(loader)).tolist() == [3, 4, 5]
    loop.diloco.close()


def test_a_run_of_one_epoch_ends_with_it() -> None:
    loop, loader = Loop(), loader_of(10, 4)
    shard = take_own_part(loader, loop.diloco, 0, 1)
    assert shard is not None
    read = []
    for _ in range(3):
        for batch in loader:
            read += batch.tolist()
            shard.hand_to_loop()
            loop.inner.step()
    assert sorted(read) == list(range(10))
    loop.diloco.close()


class Repeats(SequentialSampler):
    """Groups, as TRL's `RepeatSampler`."""

    mini_repeat_count, batch_size, num_samples = 2, 2, 8

    def __iter__(self) -> Iterator[int]:
        for index in range(self.num_samples // 2 * 2):
            yield from (index, index)

    def __len__(self) -> int:
        return 16


def test_samples_that_are_repeated_in_groups_stay_in_groups() -> None:
    parts = [list(OwnRepeats(Repeats(range(8)), rank, 2)) for rank in (0, 1)]
    assert parts[0] == [0, 0, 2, 2, 4, 4, 6, 6] * 2
    assert parts[1] == [1, 1, 3, 3, 5, 5, 7, 7] * 2


def test_a_loader_that_is_emptied_has_no_batches() -> None:
    loader = loader_of(12, 3)
    empty(loader)
    assert list(loader) == []


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Odd:
    sampler = "abc"

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0]])


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(), batch_size=2),
        DataLoader(range(4), batch_sampler=Odd()),  # type: ignore[arg-type]
    ],
    ids=["a stream", "an unknown sampler"],
)
def test_what_cannot_be_divided_is_told(
    loader: DataLoader[Any], caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop()
    with caplog.at_level(logging.WARNING, "atoll.diloco"):
        assert take_own_part(loader, loop.diloco, 0, None) is None
    assert "own_data=False" in caplog.text
    loop.diloco.close()


def test_wrappers_of_a_batch_sampler_are_seen_through() -> None:
    class Wrapper(BatchSampler):
        def __init__(self, batch_sampler: BatchSampler) -> None:
            self.batch_sampler = batch_sampler

        def __iter__(self) -> Iterator[list[int]]:
            return iter(self.batch_sampler)

        def __len__(self) -> int:
            return len(self.batch_sampler)  # type: ignore[arg-type]

    plain = BatchSampler(SequentialSampler(range(8)), 2, drop_last=False)
    loader = DataLoader(range(8), batch_sampler=Wrapper(plain))  # type: ignore[arg-type]
    loop = Loop()
    assert take_own_part(loader, loop.diloco, 0, None) is not None
    assert next(iter(loader)).tolist() == [0, 1]
    loop.diloco.close()
