"""How much memory a round takes beside the model: a copy that comes back makes these fail."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest
import torch
from tests.support.stores import run_threads

from atoll.diloco import DiLoCo

VALUES = 8 << 20  # 32 MiB: large beside the slices that are worked on at a time


def train(folder: Path, codec: str, values: int, overlap: int = 0) -> None:
    """Two replicas, two rounds, and a checkpoint after each."""

    def go(rank: int) -> None:
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(values))])
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + rank)
        with DiLoCo(
            model,
            inner,
            sync_every=1 + overlap,
            overlap_steps=overlap,
            codec=codec,
            uri=str(folder),
            rank=rank,
            world_size=2,
            min_replicas=2,
            grace_s=60,
            checkpoint_every=1,
        ) as diloco:
            while diloco.round < 2:
                inner.step()

    run_threads(*(lambda rank=rank: go(rank) for rank in range(2)))


# Values, momentum and one row; lossy codecs keep the mean encoded, and what the own means lack.
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(("codec", "most"), [("fp32", 3.1), ("int4", 3.8), ("bf16", 4.0)])
def test_a_round_that_saves_needs_a_few_rows(
    tmp_path: Path, codec: str, most: float, overlap: int
) -> None:
    train(tmp_path / "small", codec, 8)  # what is imported on the way is no part of a round
    tracemalloc.start()
    try:
        train(tmp_path / "large", codec, VALUES, overlap)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak / (2 * 4 * VALUES) < most


def test_a_replica_that_joins_needs_room_for_one_object_beside_its_values(tmp_path: Path) -> None:
    with one_of(tmp_path, 0, VALUES):
        pass
    tracemalloc.start()
    try:
        with one_of(tmp_path, 1, VALUES):
            peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak / (4 * VALUES) < 2.1


def one_of(folder: Path, rank: int, values: int) -> DiLoCo:
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.full((values,), float(rank)))])
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return DiLoCo(
        model, inner, sync_every=1, uri=str(folder), rank=rank, world_size=2, run_id="run"
    )
