"""Figures reach a folder, an object store or the control plane, each batch once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from atoll.agent import metric_sinks, metrics
from atoll.agent.metric_sinks import BatchRefused, HttpSink, ObjectSink, sink_of
from atoll.agent.metrics import Reporter
from atoll.core.errors import Temporary
from atoll.metrics import collect
from atoll.metrics.collect import ObjectReader, open_reader
from atoll.metrics.series import COUNT
from atoll.metrics.store import MetricStore
from atoll.objectstore import bucket


def counted(metric_store: MetricStore) -> int:
    return int(sum(sum(one.series.columns[COUNT]) for one in metric_store.series("u")))


def life_of(reporter: Reporter) -> metrics.PendingMetrics:
    return reporter._sessions[os.getpid()]


class LossySink:
    """Takes every batch, and says so for every second one only."""

    patience_s = 0.0

    def __init__(self, metric_store: MetricStore) -> None:
        self.metric_store = metric_store
        self.calls = 0

    def hand_on(self, batch: bytes) -> float:
        self.calls += 1
        self.metric_store.take("u", batch.splitlines())
        if self.calls % 2:
            raise OSError("the answer is lost")
        return 0.0


class RefusingSink:
    patience_s = 0.0

    def hand_on(self, batch: bytes) -> float:
        raise BatchRefused("too large")


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch) -> Reporter:
    monkeypatch.setattr(metrics, "SOON_S", 3600.0)
    monkeypatch.setattr(metrics, "_WARNED", set())
    monkeypatch.setenv("ATOLL_REPORTS", "http://127.0.0.1:1/")
    monkeypatch.setenv("ATOLL_REPORTS_TOKEN", "t")
    return Reporter()


def test_a_batch_whose_answer_was_lost_hides_nothing_that_came_after_it(
    reporter: Reporter, tmp_path: Path
) -> None:
    metric_store = MetricStore(tmp_path / "db")
    reporter.add(0, {"loss": 0.0})
    life_of(reporter).sink = LossySink(metric_store)
    for step in range(1, 10):
        reporter.flush()
        reporter.add(step, {"loss": float(step)})
    for _ in range(4):
        reporter.flush()
    assert counted(metric_store) == 10


def test_what_is_refused_is_left_out_and_told_once(
    reporter: Reporter, caplog: pytest.LogCaptureFixture
) -> None:
    reporter.add(0, {"loss": 0.0})
    life_of(reporter).sink = RefusingSink()
    for step in range(3):
        reporter.flush()
        reporter.add(step, {"loss": 1.0})
    assert [r.getMessage() for r in caplog.records] == [
        "atoll.report: metrics are dropped: too large"
    ]


def test_rounds_that_are_too_large_together_go_one_by_one(
    reporter: Reporter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_BATCH", 1000)
    batches: list[bytes] = []

    class Kept:
        patience_s = 0.0

        def hand_on(self, batch: bytes) -> float:
            batches.append(batch)
            return 0.0

    for number in range(6):
        size = 2000 if number == 3 else 300
        reporter.add_round({"round": number, "x": "x" * size})
    life_of(reporter).sink = Kept()
    for _ in range(6):
        reporter.flush()
    told = b"".join(batches)
    assert all(len(batch) <= 1000 for batch in batches)
    assert [number for number in range(6) if b'"round":%d' % number in told] == [0, 1, 2, 4, 5]


def test_objects_are_read_once_and_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = bucket.Bucket.open(f"memory://{tmp_path}")
    monkeypatch.setattr(bucket.Bucket, "open", lambda uri: shared)
    line = metrics.batch_of(metrics.MetricWriter(0, 1, 0, "a"), 1, {"loss": [[1.0, 1, 0.5]]}, 0)
    more = metrics.batch_of(metrics.MetricWriter(0, 1, 0, "a"), 2, {"loss": [[2.0, 2, "nan"]]}, 0)
    sink = ObjectSink("s3://bucket/x", "0.1.0.a")
    for batch in (line, more):
        assert sink.hand_on(batch) == metric_sinks.OBJECTS_EVERY_S
    metric_store, reader = MetricStore(tmp_path / "db"), ObjectReader("u", "s3://bucket/x")
    assert reader.read(metric_store) is False
    assert counted(metric_store) == 1
    assert shared.entries() == {}
    shared.put("again", line)  # deleting it failed: it is read twice, and counts once
    reader.read(metric_store)
    assert counted(metric_store) == 1


def test_an_object_of_ten_megabytes_is_refused_and_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = bucket.Bucket.open(f"memory://{tmp_path}")
    monkeypatch.setattr(bucket.Bucket, "open", lambda uri: shared)
    monkeypatch.setattr(collect, "_REFUSED", set())
    for name in ("a", "b"):
        shared.put(name, b"x" * 10_000_000)
    metric_store = MetricStore(tmp_path / "db")
    ObjectReader("u", "s3://bucket/x").read(metric_store)
    assert shared.entries() == {}
    assert len(caplog.records) == 1
    assert "10000000 bytes" in caplog.text


def test_a_store_that_fails_holds_figures_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(uri: str) -> Any:
        raise Temporary("no answer")

    monkeypatch.setattr(bucket.Bucket, "open", fail)
    with pytest.raises(OSError, match="no answer"):
        ObjectSink("s3://bucket/x", "a").hand_on(b"{}")


def test_the_scheme_says_where_figures_go(tmp_path: Path) -> None:
    assert isinstance(sink_of({"ATOLL_REPORTS": "s3://b/x"}, "o"), ObjectSink)
    assert isinstance(sink_of({"ATOLL_REPORTS": "https://h/x"}, "o"), HttpSink)
    assert sink_of({"ATOLL_REPORTS": "ftp://h/x"}, "o") is None
    assert isinstance(open_reader("u", "gs://b/x"), ObjectReader)
    assert open_reader("u", "https://h/x") is None
    assert open_reader("u", "") is None
