"""Series survive a kill, count each batch once, stay bounded, and go with their training."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.agent.metrics import MetricWriter, batch_of
from atoll.core.errors import ValidationError
from atoll.metrics import store
from atoll.metrics.series import COUNT, MEAN
from atoll.metrics.store import MetricStore


def batch(
    n: int, *, rank: int = 0, name: str = "loss", points: int = 1, source: str = "a"
) -> bytes:
    told = [[float(n * points + at), n * points + at, 0.5] for at in range(points)]
    return batch_of(MetricWriter(rank, 1, 0, source), n, {name: told}, 0)


def counted(metric_store: MetricStore, uid: str = "u") -> int:
    return int(sum(sum(one.series.columns[COUNT]) for one in metric_store.series(uid)))


def test_what_was_taken_is_there_after_a_kill(tmp_path: Path) -> None:
    first = MetricStore(tmp_path / "series.db")
    first.take("u", [batch(1), batch(2)])  # no close: the process is gone here
    second = MetricStore(tmp_path / "series.db")
    assert counted(second) == 2
    assert second.uids() == {"u"}


def test_a_batch_that_comes_twice_counts_once_also_after_a_restart(tmp_path: Path) -> None:
    metric_store = MetricStore(tmp_path / "series.db")
    assert metric_store.take("u", [batch(1), batch(1)]) == 1
    assert counted(metric_store) == 1
    assert metric_store.take("u", [batch(1)]) == 0
    again = MetricStore(tmp_path / "series.db")
    assert again.take("u", [batch(1)]) == 0
    assert counted(again) == 1


def test_the_log_is_folded_and_the_series_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LOG_BYTES", 2_000)
    monkeypatch.setattr(store, "MAX_BUCKETS", 50)
    metric_store = MetricStore(tmp_path / "series.db")
    for n in range(1, 200):
        metric_store.take("u", [batch(n, points=3)])
    logged = metric_store._db.execute(
        "select count(*), total(length(body)) from batches"
    ).fetchone()
    assert logged[1] < 50_000, "the log is emptied"
    assert counted(metric_store) == 597
    again = MetricStore(tmp_path / "series.db")
    assert counted(again) == 597
    assert again.take("u", [batch(150)]) == 0, "what was folded counts once"
    assert len(again.series("u")[0].series) <= 50


def test_many_trainings_are_read_back_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_CACHED", 3)
    metric_store = MetricStore(tmp_path / "series.db")
    for number in range(10):
        metric_store.take(f"u{number}", [batch(1, points=number + 1)])
    assert [counted(metric_store, f"u{number}") for number in range(10)] == list(range(1, 11))


def test_series_of_a_large_training_share_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_OF_TRAINING", 400)
    metric_store = MetricStore(tmp_path / "series.db")
    for n in range(1, 6):
        metric_store.take(
            "u", [batch(n, rank=rank, points=20, source=str(rank)) for rank in range(20)]
        )
    lengths = [len(one.series) for one in metric_store.series("u")]
    assert len(lengths) == 20
    assert max(lengths) <= 20
    assert counted(metric_store) == 20 * 100


def test_a_removed_training_leaves_nothing(tmp_path: Path) -> None:
    metric_store = MetricStore(tmp_path / "series.db")
    metric_store.take("u", [batch(1)])
    metric_store.remove("u")
    assert metric_store.series("u") == []
    assert MetricStore(tmp_path / "series.db").uids() == set()


def test_too_many_names_are_counted_as_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_SERIES", 2)
    metric_store = MetricStore(tmp_path / "series.db")
    metric_store.take("u", [batch(n, name=f"n{n}") for n in range(1, 6)])
    assert [one.name for one in metric_store.series("u")] == ["n1", "n2"]
    assert metric_store.skipped("u") == 3


@pytest.mark.parametrize("line", [b"", b"{}", b"\xff\xfe", b'{"rank":0}', b"[" * 1000])
def test_what_is_no_report_is_refused_and_nothing_of_it_is_kept(
    tmp_path: Path, line: bytes
) -> None:
    metric_store = MetricStore(tmp_path / "series.db")
    with pytest.raises(ValidationError, match="report"):
        metric_store.take("u", [batch(1), line])
    assert metric_store.series("u") == []


def test_a_report_of_ten_megabytes_is_refused_with_its_size(tmp_path: Path) -> None:
    metric_store = MetricStore(tmp_path / "series.db")
    with pytest.raises(ValidationError, match="10000000 bytes"):
        metric_store.take("u", [b" " * 10_000_000])


def test_names_from_ranks_have_no_control_characters(tmp_path: Path) -> None:
    metric_store = MetricStore(tmp_path / "series.db")
    metric_store.take("u", [batch(1, name="\x1b[2Jloss")])
    (one,) = metric_store.series("u")
    assert "\x1b" not in one.name
    assert one.name.endswith("loss")
    assert list(one.series.columns[MEAN]) == [0.5]


def test_the_first_of_a_name_is_read_alone_and_is_the_same_from_log_memory_and_file(
    tmp_path: Path,
) -> None:
    metric_store = MetricStore(tmp_path / "series.db")
    metric_store.take("u", [batch(1, rank=4, points=3), batch(1, rank=2, points=2, source="b")])
    held = metric_store.first("u", "loss")
    assert held is not None
    assert len(held) == 2, "of the lowest rank"
    assert metric_store.first("u", "other") is None
    assert metric_store.first("nobody", "loss") is None
    logged = MetricStore(tmp_path / "series.db").first("u", "loss")
    assert logged is not None
    metric_store._write("u", metric_store._of("u"))
    alone = MetricStore(tmp_path / "series.db")
    folded = alone.first("u", "loss")
    assert folded is not None
    assert held.columns == logged.columns == folded.columns
    assert not alone._cache, "a look at a list does not bring whole trainings into memory"


def test_the_newest_value_of_each_rank(tmp_path: Path) -> None:
    metric_store = MetricStore(tmp_path / "series.db")
    metric_store.take("u", [batch(1, rank=4), batch(1, name="x", source="b")])
    assert metric_store.newest_values("u", ["loss"]) == {(4, 0, "loss"): 0.5}


def test_batches_that_never_came_are_counted_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LOG_BYTES", 1)  # folded at once
    metric_store = MetricStore(tmp_path / "series.db")
    metric_store.take("u", [batch(1), batch(4), batch(2, source="b")])
    metric_store.take("u", [batch(3), batch(4)])  # late, or again: counts neither way
    assert (counted(metric_store), metric_store.missed("u")) == (3, 3)
    again = MetricStore(tmp_path / "series.db")
    assert again.missed("u") == 3
    again.take("u", [batch(10**11)])
    assert again.missed("u") == store.MAX_MISSED
