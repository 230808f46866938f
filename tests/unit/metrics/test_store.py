"""Series survive a kill, count each batch once, stay bounded, and go with their training."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.agent.metrics import Teller, batch_of
from atoll.core.errors import ValidationError
from atoll.metrics import store
from atoll.metrics.series import COUNT, MEAN
from atoll.metrics.store import SeriesKeeper


def batch(n: int, *, rank: int = 0, name: str = "loss", points: int = 1, life: str = "a") -> bytes:
    told = [[float(n * points + at), n * points + at, 0.5] for at in range(points)]
    return batch_of(Teller(rank, 1, 0, life), n, {name: told}, 0)


def counted(keeper: SeriesKeeper, uid: str = "u") -> int:
    return int(sum(sum(one.series.columns[COUNT]) for one in keeper.series(uid)))


def test_what_was_taken_is_there_after_a_kill(tmp_path: Path) -> None:
    first = SeriesKeeper(tmp_path / "series.db")
    first.take("u", [batch(1), batch(2)])  # no close: the process is gone here
    second = SeriesKeeper(tmp_path / "series.db")
    assert counted(second) == 2
    assert second.uids() == {"u"}


def test_a_batch_that_comes_twice_counts_once_also_after_a_restart(tmp_path: Path) -> None:
    keeper = SeriesKeeper(tmp_path / "series.db")
    assert keeper.take("u", [batch(1), batch(1)]) == 1
    assert counted(keeper) == 1
    assert keeper.take("u", [batch(1)]) == 0
    again = SeriesKeeper(tmp_path / "series.db")
    assert again.take("u", [batch(1)]) == 0
    assert counted(again) == 1


def test_the_log_is_folded_and_the_series_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LOG_BYTES", 2_000)
    monkeypatch.setattr(store, "MAX_BUCKETS", 50)
    keeper = SeriesKeeper(tmp_path / "series.db")
    for n in range(1, 200):
        keeper.take("u", [batch(n, points=3)])
    logged = keeper._db.execute("select count(*), total(length(body)) from batches").fetchone()
    assert logged[1] < 50_000, "the log is emptied"
    assert counted(keeper) == 597
    again = SeriesKeeper(tmp_path / "series.db")
    assert counted(again) == 597
    assert again.take("u", [batch(150)]) == 0, "what was folded counts once"
    assert len(again.series("u")[0].series) <= 50


def test_many_trainings_are_read_back_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_HELD", 3)
    keeper = SeriesKeeper(tmp_path / "series.db")
    for number in range(10):
        keeper.take(f"u{number}", [batch(1, points=number + 1)])
    assert [counted(keeper, f"u{number}") for number in range(10)] == list(range(1, 11))


def test_series_of_a_large_training_share_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_OF_TRAINING", 400)
    keeper = SeriesKeeper(tmp_path / "series.db")
    for n in range(1, 6):
        keeper.take("u", [batch(n, rank=rank, points=20, life=str(rank)) for rank in range(20)])
    lengths = [len(one.series) for one in keeper.series("u")]
    assert len(lengths) == 20
    assert max(lengths) <= 20
    assert counted(keeper) == 20 * 100


def test_a_removed_training_leaves_nothing(tmp_path: Path) -> None:
    keeper = SeriesKeeper(tmp_path / "series.db")
    keeper.take("u", [batch(1)])
    keeper.remove("u")
    assert keeper.series("u") == []
    assert SeriesKeeper(tmp_path / "series.db").uids() == set()


def test_too_many_names_are_counted_as_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_SERIES", 2)
    keeper = SeriesKeeper(tmp_path / "series.db")
    keeper.take("u", [batch(n, name=f"n{n}") for n in range(1, 6)])
    assert [one.name for one in keeper.series("u")] == ["n1", "n2"]
    assert keeper.skipped("u") == 3


@pytest.mark.parametrize("line", [b"", b"{}", b"\xff\xfe", b'{"rank":0}', b"[" * 1000])
def test_what_is_no_report_is_refused_and_nothing_of_it_is_kept(
    tmp_path: Path, line: bytes
) -> None:
    keeper = SeriesKeeper(tmp_path / "series.db")
    with pytest.raises(ValidationError, match="report"):
        keeper.take("u", [batch(1), line])
    assert keeper.series("u") == []


def test_a_report_of_ten_megabytes_is_refused_with_its_size(tmp_path: Path) -> None:
    keeper = SeriesKeeper(tmp_path / "series.db")
    with pytest.raises(ValidationError, match="10000000 bytes"):
        keeper.take("u", [b" " * 10_000_000])


def test_names_from_ranks_have_no_control_characters(tmp_path: Path) -> None:
    keeper = SeriesKeeper(tmp_path / "series.db")
    keeper.take("u", [batch(1, name="\x1b[2Jloss")])
    (one,) = keeper.series("u")
    assert "\x1b" not in one.name
    assert one.name.endswith("loss")
    assert list(one.series.columns[MEAN]) == [0.5]


def test_the_first_of_a_name_is_read_alone_and_is_the_same_from_log_memory_and_file(
    tmp_path: Path,
) -> None:
    keeper = SeriesKeeper(tmp_path / "series.db")
    keeper.take("u", [batch(1, rank=4, points=3), batch(1, rank=2, points=2, life="b")])
    held = keeper.first("u", "loss")
    assert held is not None
    assert len(held) == 2, "of the lowest rank"
    assert keeper.first("u", "other") is None
    assert keeper.first("nobody", "loss") is None
    logged = SeriesKeeper(tmp_path / "series.db").first("u", "loss")
    assert logged is not None
    keeper._write("u", keeper._of("u"))
    alone = SeriesKeeper(tmp_path / "series.db")
    folded = alone.first("u", "loss")
    assert folded is not None
    assert held.columns == logged.columns == folded.columns
    assert not alone._held, "a look at a list does not bring whole trainings into memory"


def test_the_newest_value_of_each_rank(tmp_path: Path) -> None:
    keeper = SeriesKeeper(tmp_path / "series.db")
    keeper.take("u", [batch(1, rank=4), batch(1, name="x", life="b")])
    assert keeper.lasts("u", ["loss"]) == {(4, 0, "loss"): 0.5}


def test_batches_that_never_came_are_counted_also_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LOG_BYTES", 1)  # folded at once
    keeper = SeriesKeeper(tmp_path / "series.db")
    keeper.take("u", [batch(1), batch(4), batch(2, life="b")])
    keeper.take("u", [batch(3), batch(4)])  # late, or again: counts neither way
    assert (counted(keeper), keeper.missed("u")) == (3, 3)
    again = SeriesKeeper(tmp_path / "series.db")
    assert again.missed("u") == 3
    again.take("u", [batch(10**11)])
    assert again.missed("u") == store.MAX_MISSED
