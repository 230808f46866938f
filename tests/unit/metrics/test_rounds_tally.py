"""Who took part in rounds is counted as they come in, once, and again after a rollback."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.core.rounds import ReportedRound, RoundCost, RoundFacts
from atoll.metrics.file import MetricFile
from atoll.metrics.store import MetricStore


def facts(number: int, *members: int, **rest: object) -> RoundFacts:
    return RoundFacts(run="r", round=number, members=list(members), at=float(number), **rest)  # type: ignore[arg-type]


def counts(metric_store: MetricStore) -> dict[int, int]:
    summary = metric_store.rounds.summary("u")
    assert summary is not None
    return {each.rank: each.rounds for each in summary.ranks}


def word(number: int, rank: int, *warnings: str) -> ReportedRound:
    cost = RoundCost(rank, 0, 0, 0, 0.0, 0.0)
    return ReportedRound("r", 0, number, cost, warnings=list(warnings))


def test_rounds_of_each_rank_are_counted_however_often_they_are_told(tmp_path: Path) -> None:
    metric_store = MetricStore(tmp_path / "series.db")
    rounds = [facts(0, 0, 1), facts(1, 0), facts(2, 0, 2)]
    for _ in range(2):
        metric_store.rounds.add_manifests("u", rounds, "r", 3)
    assert counts(metric_store) == {0: 3, 1: 1, 2: 1}
    metric_store.close()
    again = MetricStore(tmp_path / "series.db")
    assert counts(again) == {0: 3, 1: 1, 2: 1}
    again.close()


def fail_in(file: MetricFile, metric_store: MetricStore) -> None:
    told = replace(word(1, 1), facts=facts(1, 1))
    with file, file.transaction():
        metric_store.rounds.add_reports("u", [told])
        raise RuntimeError("no room")


def test_what_was_rolled_back_does_not_count(tmp_path: Path) -> None:
    metric_store = MetricStore(tmp_path / "series.db")
    file = metric_store.rounds._file
    metric_store.rounds.add_manifests("u", [facts(0, 0, 1)], "r", 1)
    with pytest.raises(RuntimeError, match="no room"):
        fail_in(file, metric_store)
    metric_store.rounds.add_manifests("u", [facts(0, 0, 1), facts(1, 1)], "r", 2)
    assert counts(metric_store) == {0: 1, 1: 2}
    metric_store.close()


def test_warnings_of_ranks_are_told_once_and_survive_a_restart(tmp_path: Path) -> None:
    metric_store = MetricStore(tmp_path / "series.db")
    news: list[str] = []
    metric_store.rounds.on_news = news.append
    file = metric_store.rounds._file
    for rank in (0, 1):
        with file, file.transaction():
            metric_store.rounds.add_reports("u", [word(0, rank, "the same batches")])
    observed = metric_store.rounds.observed("u")
    assert observed is not None
    assert observed.warnings == ["the same batches"]
    assert news == ["u"]
    metric_store.rounds.add_manifests("u", [facts(0, 0, 1, bad=[1])], "r", 1)
    assert news == ["u", "u"]
    metric_store.close()
    again = MetricStore(tmp_path / "series.db")
    again.rounds.add_manifests("u", [facts(1, 0, 1)], "r", 2)
    found = again.rounds.observed("u")
    assert found is not None
    assert (found.warnings, found.bad) == (["the same batches"], {1: 0})
    again.close()


def test_a_slow_rank_is_in_the_summary_also_after_a_restart(tmp_path: Path) -> None:
    metric_store = MetricStore(tmp_path / "series.db")
    file = metric_store.rounds._file
    for number in range(4):
        for rank in range(3):
            train_s = 6.0 if rank == 2 else 2.0
            cost = RoundCost(rank, 0, 0, 0, 0.0, 0.0, steps=10, train_s=train_s, data_s=1.5)
            with file, file.transaction():
                metric_store.rounds.add_reports(
                    "u", [ReportedRound("r", 0, number, cost, facts(number, 0, 1, 2))]
                )
    message = "rank 2 is slow: 3.0x the median step time (75% compute, 25% data, "
    summary = metric_store.rounds.summary("u")
    assert summary is not None
    assert [each.message for each in summary.slow] == [f"{message}0% waiting for rounds)"]
    metric_store.close()
    again = MetricStore(tmp_path / "series.db")
    summary_again = again.rounds.summary("u")
    assert summary_again is not None
    assert summary_again.slow == summary.slow
    again.close()
