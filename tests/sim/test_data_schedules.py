"""Random lives of runs that share data. `make soak` runs many more.

`ATOLL_DATA_SEED=n` replays one schedule, `ATOLL_SIM_COUNT=n` sets how many there are.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from atoll.diloco.data import ledger as ledgers
from atoll.diloco.data.ranges import positions
from tests.sim.data_world import DataWorld, Oracle, Paper, Violation

CHUNK = 250
COUNT = int(os.environ.get("ATOLL_SIM_COUNT", "1000"))


def run(seeds: range, patience: int = 60_000, **broken: bool) -> None:
    for seed in seeds:
        try:
            DataWorld(seed, **broken).run(patience=patience)
        except Violation as error:
            raise Violation(f"ATOLL_DATA_SEED={seed}: {error}") from error


@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_every_position_is_used_once_whatever_happens(first: int) -> None:
    replay = os.environ.get("ATOLL_DATA_SEED")
    if replay is not None:
        run(range(int(replay), int(replay) + (first == 0)))
        return
    run(range(first, min(first + CHUNK, COUNT)))


BROKEN_REPLICAS = ("counts_handed_out", "commits_by_roster", "passes_over", "keeps_late_work")


@pytest.mark.parametrize("rule", BROKEN_REPLICAS)
def test_a_replica_that_breaks_a_rule_is_noticed(rule: str) -> None:
    with pytest.raises(Violation):
        run(range(300), **{rule: True})


def _ranges_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(draft: ledgers._Draft, ranks: list[int]) -> None:
        for rank in list(ranks):
            draft.holds.pop(rank)

    monkeypatch.setattr(ledgers._Draft, "give_back", lose)


def _local_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process tops up its members in an order of its own."""
    rng, top_up = random.Random(0), ledgers._Draft.top_up

    def shuffled(draft: ledgers._Draft, wants: dict[int, int], members: set[int]) -> None:
        order = sorted(wants, key=lambda _: rng.random())
        top_up(draft, {rank: wants[rank] for rank in order}, members)

    monkeypatch.setattr(ledgers._Draft, "top_up", shuffled)


@pytest.mark.parametrize("breaking", [_ranges_lost, _local_order])
def test_a_ledger_that_breaks_a_rule_is_noticed(
    breaking: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch)
    with pytest.raises(Violation):
        run(range(300))


def test_a_claim_on_the_data_of_others_never_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody can be kept from lying about its own hold. That of others is safe from it."""
    monkeypatch.setattr(Oracle, "commit", _count_claims_only)
    run(range(100), patience=0, lies=True)
    with pytest.raises(Violation, match="false round|another ledger"):
        run(range(100), patience=0, lies=True, validates=False)


def _count_claims_only(oracle: Oracle, fragment: int, paper: Paper) -> None:
    ledger = oracle.world.truth
    if paper.base != ledger.digest:
        raise Violation("a round was committed on another ledger")
    try:
        oracle.world.truth = ledgers.commit(ledger, [m.claim for m in paper.members], paper.world)
    except ledgers.InvalidClaim as error:
        raise Violation(f"a false round was committed: {error}") from error
    oracle.used |= dict.fromkeys((p for m in paper.members for p in positions(m.claim.took)), 0)
