"""`atoll.report` never raises, never waits, merges what cannot be handed on, and tells what it
left out."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from atoll.rank import figures, sinks
from atoll.rank.figures import Reporter, merged
from atoll.rank.sinks import FolderSink, sink_of


@pytest.fixture
def reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reporter:
    monkeypatch.setenv("ATOLL_REPORTS", tmp_path.as_uri())
    monkeypatch.setenv("ATOLL_RANK", "3")
    monkeypatch.setenv("ATOLL_ATTEMPT", "2")
    monkeypatch.setattr(figures, "SOON_S", 3600.0)  # the test hands on by itself
    return Reporter()


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(folder.iterdir())
        for line in path.read_bytes().splitlines()
    ]


def test_figures_arrive_with_rank_attempt_step_and_time(reporter: Reporter, tmp_path: Path) -> None:
    reporter.add(7, {"loss": 0.25, "tokens": 4096})
    reporter.flush()
    (batch,) = lines(tmp_path)
    assert (batch["rank"], batch["attempt"], batch["n"]) == (3, 2, 1)
    (point,) = batch["figures"]["loss"]
    assert point[1:] == [7, 0.25]
    assert batch["figures"]["tokens"][0][2] == 4096


def test_whatever_a_figure_is_report_does_not_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hostile:
        def __float__(self) -> float:
            raise RuntimeError("no")

    monkeypatch.setenv("ATOLL_REPORTS", tmp_path.as_uri())
    monkeypatch.setattr(figures, "_REPORTER", Reporter())
    monkeypatch.setattr(figures, "_TOLD", set())
    for _ in range(3):
        figures.report(step="x", loss=1.0)  # type: ignore[arg-type]
        figures.report(loss="word", other=Hostile(), good=1)
    figures._REPORTER.flush()
    (batch,) = lines(tmp_path)
    assert list(batch["figures"]) == ["good"]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(set(told)) == 3, "each trouble is told once"


def test_outside_a_training_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_REPORTS", raising=False)
    before = threading.active_count()
    outside = Reporter()
    outside.add(1, {"loss": object()})
    assert threading.active_count() == before


def test_numbers_that_are_not_finite_are_valid_json(reporter: Reporter, tmp_path: Path) -> None:
    reporter.add(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    reporter.flush()
    (batch,) = lines(tmp_path)
    assert [batch["figures"][name][0][2] for name in "abc"] == ["nan", "inf", "-inf"]


def test_many_points_between_two_rounds_are_merged_and_keep_their_extremes(
    reporter: Reporter, tmp_path: Path
) -> None:
    for step in range(5000):
        reporter.add(step, {"loss": 100.0 if step == 2500 else 1.0})
    reporter.flush()
    points = lines(tmp_path)[0]["figures"]["loss"]
    assert len(points) <= figures.POINTS_A_NAME
    assert sum(point[5] for point in points) == 5000
    assert max(point[4] for point in points) == 100.0


def test_what_cannot_be_handed_on_is_kept_and_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "SOON_S", 3600.0)
    blocked = tmp_path / "figures"
    blocked.write_text("a file where the folder belongs")
    monkeypatch.setenv("ATOLL_REPORTS", blocked.as_uri())
    held = Reporter()
    for step in range(1000):
        held.add(step, {"loss": float(step)})
        if step % 100 == 0:
            held.flush()
    held.flush()
    blocked.unlink()
    held.flush()
    held.flush()
    batches = lines(blocked)
    points = [point for batch in batches for point in batch["figures"]["loss"]]
    assert sum(point[5] if len(point) > 3 else 1 for point in points) == 1000
    assert [batch["n"] for batch in batches] == [1, 2], "a failed try uses up no number"


def test_a_fork_tells_nothing_twice(reporter: Reporter, tmp_path: Path) -> None:
    reporter.add(1, {"loss": 1.0})
    pid = os.fork()
    if pid == 0:
        try:
            reporter.add(2, {"loss": 2.0})
            reporter.flush()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    reporter.flush()
    batches = lines(tmp_path)
    assert sorted(batch["figures"]["loss"][0][1] for batch in batches) == [1, 2]
    assert len({batch["id"] for batch in batches}) == 2


def test_more_names_than_are_kept_are_counted(reporter: Reporter, tmp_path: Path) -> None:
    reporter.add(1, {f"n{number}": 1.0 for number in range(figures.MAX_NAMES + 5)})
    reporter.flush()
    (batch,) = lines(tmp_path)
    assert len(batch["figures"]) == figures.MAX_NAMES
    assert batch["skipped"] == 5


def test_a_file_that_is_large_enough_gets_a_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "SEGMENT_BYTES", 10)
    sink = FolderSink(tmp_path, "0.1.0.a")
    pauses = [sink.hand_on(b"0123456789\n") for _ in range(12)]
    assert len(list(tmp_path.iterdir())) == 12
    assert pauses[0] < pauses[-1], "where nobody reads, less is written"


def test_merging_keeps_the_order_and_the_newest_step() -> None:
    points = [[float(n), n, float(n)] for n in range(10)]
    assert [point[1] for point in merged(points, 5)] == [1, 3, 5, 7, 9]


def test_processes_of_torchrun_in_one_rank_are_told_apart() -> None:
    life = figures.Teller.of({"ATOLL_RANK": "1", "LOCAL_RANK": "3", "TORCHELASTIC_RUN_ID": "x"})
    assert (life.rank, life.process) == (1, 3)
    assert figures.Teller.of({"ATOLL_RANK": "1", "LOCAL_RANK": "1"}).process == 0
    assert sink_of({}, "0.1.0.a") is None
