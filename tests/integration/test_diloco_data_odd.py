"""Data that is used once, in odd cases: rounds long past, and movements that are no numbers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.integration.test_diloco import world
from tests.integration.test_diloco_data import outer, step, store

from atoll.diloco import setup
from atoll.diloco.data import ranges
from atoll.diloco.round.effects import RoundConfig


@pytest.mark.parametrize("fragments", [1, 2])
def test_the_report_tells_of_rounds_whose_rosters_were_folded(
    monkeypatch: pytest.MonkeyPatch, fragments: int
) -> None:
    monkeypatch.setattr(setup, "RoundConfig", partial(RoundConfig, history_block=4))
    blobs = store()
    model, inner, diloco = outer(
        blobs, 0, 1, sync_every=fragments, fragments=fragments, checkpoint_every=2
    )
    with diloco:
        for batch in diloco.data(80, batch=2):
            step(model, inner, batch, 0)
            inner.step()
            inner.zero_grad()
    assert len(blobs.list("run/history")) >= 2
    assert min(info.key for info in blobs.list("run/manifest")) > "run/manifest/00000004"

    model, inner, again = outer(
        blobs, 0, 1, sync_every=fragments, fragments=fragments, checkpoint_every=2
    )
    with again:
        assert list(again.data(80, batch=2)) == []
        report = again.data_report()
    assert report.used == report.by_rank[0] == 80
    positions = [at for use in report.rounds for at in ranges.positions(use.ranges)]
    assert sorted(positions) == list(range(80))
    assert [use.round for use in report.rounds if use.fragment == 0][:5] == [0, 1, 2, 3, 4]


def test_data_that_twice_trains_no_number_is_dropped_and_counted() -> None:
    blobs, bad = store(), (2, 3)  # the periods of rank 1 that end with a NaN

    def replica(rank: int) -> Any:
        model, inner, diloco = outer(blobs, rank, 2, min_replicas=2, grace_s=60)
        taken: list[list[int]] = []
        with diloco:
            for batch in diloco.data(96, batch=2):
                step(model, inner, batch, rank)
                taken.append(list(batch))
                if rank == 1 and (len(taken) + 3) // 4 in bad:
                    model[0].weight.grad.fill_(torch.nan)
                inner.step()
                inner.zero_grad()
            report = diloco.data_report()
            finite = all(bool(torch.isfinite(value).all()) for value in model.parameters())
        return report, taken, finite, diloco.warnings

    (one, _, *first), (two, taken, *second) = world(2, replica)
    for finite, warnings in (first, second):
        assert finite
        assert sum("leaves out rank 1" in messages for messages in warnings) == 2
    assert (one.dropped, two.dropped) == (0, 8)
    assert one.used == two.used == 96
    positions = [at for use in one.rounds for at in ranges.positions(use.ranges)]
    assert sorted(positions) == list(range(96))
    # What made the first movement of no numbers was tried once more; after that it is over.
    tried = [at for batch in taken for at in batch]
    assert {at for at in tried if tried.count(at) == 2} == {at for b in taken[4:8] for at in b}
    assert max(tried.count(at) for at in tried) == 2
