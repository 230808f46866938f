"""For how long ranks have not moved, from what arrives of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.agent.machine_use import batch_of as wrapper_batch
from atoll.agent.metrics import MetricWriter, batch_of
from atoll.metrics.store import MetricStore, ReportedIdle, decode_batch

STARTED = 1000.0


class Clocks:
    def __init__(self) -> None:
        self.now = STARTED + 1.0

    def idle(self) -> ReportedIdle:
        return ReportedIdle(lambda: self.now, lambda: self.now - 500.0)


def test_a_rank_is_quiet_for_as_long_as_its_wrapper_says_and_it_reports_nothing() -> None:
    clocks = Clocks()
    still, started = clocks.idle(), {0: STARTED, 1: STARTED, 2: STARTED}
    clocks.now = STARTED + 100
    still.note("u", 0, idle_s=40.0, has_report=False)
    still.note("u", 1, idle_s=40.0, has_report=True)
    still.note("u", 2, idle_s=None, has_report=True)
    assert still.idle_s("u", started) == {0: 40.0, 1: 0.0}, "of rank 2 nobody knows"
    clocks.now += 30
    assert still.idle_s("u", started) == {0: 40.0, 1: 30.0}, "no more than was said"
    still.note("u", 0, idle_s=0.0, has_report=False)
    assert still.idle_s("u", started)[0] == 0.0
    still.forget("u")
    assert still.idle_s("u", started) == {}


def test_what_was_said_of_an_attempt_does_not_count_for_the_next() -> None:
    clocks = Clocks()
    still = clocks.idle()
    clocks.now = STARTED + 100
    still.note("u", 0, idle_s=90.0, has_report=False)
    assert still.idle_s("u", {0: STARTED + 101}) == {}
    clocks.now = STARTED + 110
    still.note("u", 0, idle_s=90.0, has_report=False)  # however that may be
    assert still.idle_s("u", {0: STARTED + 101}) == {0: 9.0}
    assert still.idle_s("u", {0: None}) == {}, "it does not run"


def wrapper_line(n: int, idle_s: float | None, rank: int = 0) -> bytes:
    env = {"ATOLL_RANK": str(rank), "ATOLL_ATTEMPT": "1"}
    return wrapper_batch(env, "machine-a", n, [(1.0, {"cpu": 0.0})], idle_s)


def test_the_keeper_hears_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metric_store, heard = MetricStore(tmp_path / "db"), list[tuple[Any, ...]]()
    monkeypatch.setattr(
        metric_store.idle_tracker,
        "note",
        lambda uid, rank, **rest: heard.append((uid, rank, *rest.values())),
    )
    figures = batch_of(MetricWriter(1, 1, 0, "b"), 1, {"loss": [[1.0, 1, 0.5]]}, 0)
    metric_store.take("u", [wrapper_line(1, 12.5), figures])
    metric_store.take(
        "u", [wrapper_line(1, 99.0), wrapper_line(2, None)]
    )  # once more, and an older one
    assert heard == [("u", 0, 12.5, False), ("u", 1, None, True), ("u", 0, None, False)]
    assert {one.name for one in metric_store.series("u")} == {"loss", "machine/cpu"}


def test_no_rank_was_still_for_less_than_no_time() -> None:
    document = json.loads(wrapper_line(1, 3.0)) | {"idle_s": -5}
    assert decode_batch(json.dumps(document).encode()).idle_s is None
