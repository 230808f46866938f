"""Rounds are kept once each, bounded, and go with their training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.agent.metrics import MetricWriter, batch_of
from atoll.core.errors import ValidationError
from atoll.core.rounds import RoundFacts
from atoll.metrics import rounds as kept_rounds
from atoll.metrics.rounds import StoreObservation
from atoll.metrics.store import MetricStore


def word(number: int, rank: int = 0, run: str = "r", **more: Any) -> dict[str, Any]:
    facts = {"run": run, "round": number, "members": [0, 1], "weights": [1, 2], "tokens": 5.0}
    cost = [rank, 10, 20, 3, 0.0, 0.5]
    return {"run": run, "fragment": 0, "round": number, "cost": cost, "facts": facts} | more


def batch(n: int, *words: dict[str, Any], rank: int = 0) -> bytes:
    return batch_of(MetricWriter(rank, 1, 0, f"life-{rank}"), n, {}, 0, words)


def seen(number: int) -> RoundFacts:
    return RoundFacts(run="r", round=number, members=[0], weights=[1.0], tokens=7.0, at=1.0)


def test_words_of_replicas_become_rounds_and_survive_a_kill(tmp_path: Path) -> None:
    metric_store = MetricStore(tmp_path / "db")
    metric_store.take("u", [batch(1, word(0), word(1)), batch(1, word(1, rank=1), rank=1)])
    again = MetricStore(tmp_path / "db")  # no close: the process is gone
    assert again.rounds.run_of("u") == "r"
    kept = again.rounds.rounds("u", "r")
    assert [len(each.costs) for each in kept] == [1, 2]
    assert (again.rounds.reached("u"), again.rounds.reached("other")) == (2, None)
    summary = again.rounds.summary("u")
    assert summary is not None
    assert (summary.round, summary.tokens, summary.source) == (1, 10.0, "reports")
    again.take("u", [batch(1, word(0), word(1))])
    assert again.rounds.rounds("u", "r") == kept


def test_a_rank_tells_of_itself_alone(tmp_path: Path) -> None:
    metric_store = MetricStore(tmp_path / "db")
    for bad in (
        word(0, rank=3),
        word(-1),
        word(0, run="../other"),
        word(0) | {"fragment": 10**6},
        word(0) | {"round": 1},
    ):
        with pytest.raises(ValidationError, match="not a report"):
            metric_store.take("u", [batch(1, bad)])
    assert metric_store.rounds.runs("u") == []


def test_a_reader_without_rounds_reads_such_a_batch() -> None:
    assert "rounds" not in json.loads(batch_of(MetricWriter(0, 1, 0, "a"), 1, {}, 0))


def test_the_oldest_rounds_are_dropped_and_counted_when_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_rounds, "MAX_BYTES", 10_000)
    metric_store = MetricStore(tmp_path / "db").rounds
    metric_store.add_manifests("u", [seen(number) for number in range(1024)], "r", 1024)
    left = metric_store.rounds("u", "r")
    count, tokens = metric_store.dropped("u", "r")
    assert len(left) + count == 1024
    assert 0 < len(left) < 300
    assert left[-1].facts == seen(1023)
    assert tokens == 7.0 * count
    summary = metric_store.summary("u")
    assert summary is not None
    assert summary.tokens == 7.0 * 1024


def test_what_was_read_is_remembered_and_all_goes_with_the_training(tmp_path: Path) -> None:
    metric_store = MetricStore(tmp_path / "db")
    metric_store.rounds.add_manifests("u", [seen(0)], "r", 1)
    metric_store.rounds.set_observation("u", StoreObservation(3.0, "r"))
    metric_store.rounds.finish("u")
    assert MetricStore(tmp_path / "db").rounds.following("u", "r") == 1
    assert metric_store.rounds.is_finished("u")
    assert metric_store.uids() == {"u"}
    metric_store.remove("u")
    assert metric_store.uids() == set()
    assert metric_store.rounds.following("u", "r") == 0
    assert not metric_store.rounds.is_finished("u")
    assert metric_store.rounds.observation("u") is None
