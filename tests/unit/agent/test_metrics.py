"""`atoll.report` never raises, never waits, merges what cannot be handed on, and tells what it
left out."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.agent import metric_sinks, metrics
from atoll.agent.metric_sinks import FolderSink, sink_of
from atoll.agent.metrics import Reporter, merged


@pytest.fixture
def reporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reporter:
    monkeypatch.setenv("ATOLL_REPORTS", tmp_path.as_uri())
    monkeypatch.setenv("ATOLL_RANK", "3")
    monkeypatch.setenv("ATOLL_ATTEMPT", "2")
    monkeypatch.setattr(metrics, "SOON_S", 3600.0)  # the test hands on by itself
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
    (point,) = batch["metrics"]["loss"]
    assert point[1:] == [7, 0.25]
    assert batch["metrics"]["tokens"][0][2] == 4096


def test_whatever_a_figure_is_report_does_not_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Hostile:
        def __float__(self) -> float:
            raise RuntimeError("no")

    monkeypatch.setenv("ATOLL_REPORTS", tmp_path.as_uri())
    monkeypatch.setattr(metrics, "_REPORTER", Reporter())
    monkeypatch.setattr(metrics, "_WARNED", set())
    for _ in range(3):
        metrics.report(step="x", loss=1.0)  # type: ignore[arg-type]
        metrics.report(loss="word", other=Hostile(), good=1)
    metrics._REPORTER.flush()
    (batch,) = lines(tmp_path)
    assert list(batch["metrics"]) == ["good"]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(set(told)) == 3, "each trouble is told once"
    assert any("invalid literal" in words for words in told)


STUCK_S = 60.0  # whoever waits for the thread or its lock does so for longer


def returns(work: Callable[[], object]) -> bool:
    """Whether it ends, in a thread of its own: one that waits for ever must not hang the tests."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(STUCK_S)
    return not thread.is_alive()


def test_a_call_returns_while_a_write_is_stuck_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "SOON_S", 3600.0)
    monkeypatch.setenv("ATOLL_REPORTS", tmp_path.as_uri())
    stuck = Reporter()
    stuck.add(0, {"loss": 0.0})
    life = stuck._sessions[os.getpid()]
    os.mkfifo(tmp_path / "stuck.000000")  # nobody reads: to open it for writing never ends
    has_begun = threading.Event()

    class Sink(FolderSink):
        def hand_on(self, batch: bytes) -> float:
            has_begun.set()
            return super().hand_on(batch)

    life.sink = Sink(tmp_path, "stuck")
    writer = threading.Thread(target=life.flush, daemon=True)
    writer.start()
    assert has_begun.wait(STUCK_S)
    assert returns(lambda: [stuck.add(step, {"loss": 1.0}) for step in range(1, 1000)])
    assert returns(lambda: stuck.add_round({"round": 1}))
    assert returns(lambda: stuck.note("x", "words"))
    assert writer.is_alive(), "the write was stuck all the while"
    assert life._handing.locked()
    assert len(life.calls) == 999
    reader = os.open(tmp_path / "stuck.000000", os.O_RDONLY | os.O_NONBLOCK)
    writer.join(STUCK_S)
    assert not writer.is_alive()
    os.close(reader)


def test_a_call_does_not_wait_for_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for whoever reads the output that the log goes to."""
    monkeypatch.setattr(metrics, "SOON_S", 3600.0)
    monkeypatch.setattr(metrics, "_WARNED", set())
    monkeypatch.setenv("ATOLL_REPORTS", tmp_path.as_uri())
    monkeypatch.setattr(metrics, "_REPORTER", Reporter())
    told = threading.Event()

    class Stuck(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.wait()

    handler = Stuck()
    monkeypatch.setattr(metrics.log, "handlers", [handler])
    monkeypatch.setattr(metrics.log, "propagate", False)
    try:
        assert returns(lambda: metrics.report(step="x", loss=1.0))  # type: ignore[arg-type]
        assert returns(lambda: metrics.report(loss="word"))
    finally:
        told.set()


def test_callers_get_the_interpreter_between_slices_of_work(reporter: Reporter) -> None:
    names = [f"n{number}" for number in range(50)]
    for step in range(2000):
        reporter.add(step, {names[step % 50]: 1.0})
    calls_left = []
    life = reporter._sessions[os.getpid()]
    life.flush(lambda: calls_left.append(len(life.calls)))
    longest = max(a - b for a, b in zip([2000, *calls_left], calls_left, strict=False))
    assert longest <= metrics.SLICE_CALLS
    assert len(calls_left) >= 2000 // metrics.SLICE_CALLS + len(names), "the encoder rests as well"


def test_threads_that_report_first_at_once_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "SOON_S", 3600.0)
    monkeypatch.setenv("ATOLL_REPORTS", tmp_path.as_uri())
    several = Reporter()
    gate = threading.Barrier(8)

    def tell(number: int) -> None:
        gate.wait()
        several.add(number, {"loss": 1.0})

    threads = [threading.Thread(target=tell, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    several.flush()
    (batch,) = lines(tmp_path)
    assert sorted(point[1] for point in batch["metrics"]["loss"]) == list(range(8))


ENDING = """
import atexit, os, pathlib, sys
from atoll.agent import metrics
metrics.SOON_S, metrics.LAST_S = 3600.0, float(sys.argv[1])
class Sink:
    patience_s = 5.0
    failures = 1
    def hand_on(self, batch):
        if sys.argv[2] == "stuck":
            os.read(os.pipe()[0], 1)
        if sys.argv[2] == "late" and self.failures:
            self.failures = 0
            raise OSError("not yet")
        with open(sys.argv[3], "ab") as file:
            file.write(batch)
        return 1.0
metrics.report(step=0, loss=0.0)
metrics._REPORTER._sessions[os.getpid()].sink = Sink()
if sys.argv[2] == "late":
    metrics._REPORTER.flush()
metrics.report(step=1, loss=1.0)
"""


@pytest.mark.parametrize(("last_s", "how"), [("0.1", "stuck"), ("60", "late"), ("60", "well")])
def test_the_process_ends_with_all_told_or_without_waiting_for_ever(
    tmp_path: Path, last_s: str, how: str
) -> None:
    told = tmp_path / "told"
    env = os.environ | {"ATOLL_REPORTS": tmp_path.as_uri()}
    words = [sys.executable, "-c", ENDING, last_s, how, str(told)]
    done = subprocess.run(words, env=env, timeout=STUCK_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if how == "stuck":
        assert not told.exists()
        return
    batches = [json.loads(line) for line in told.read_bytes().splitlines()]
    steps = [point[1] for batch in batches for point in batch["metrics"]["loss"]]
    assert steps == [0, 1]


def test_what_an_accelerator_still_computes_is_not_waited_for(
    reporter: Reporter, tmp_path: Path
) -> None:
    class Array:
        """As JAX has it."""

        is_done = False

        def block_until_ready(self) -> None: ...

        def __float__(self) -> float:
            assert self.is_done
            return 0.5

    value = Array()
    reporter.add(1, {"loss": value})
    value.is_done = True
    reporter.flush()
    (batch,) = lines(tmp_path)
    assert batch["metrics"]["loss"][0][2] == 0.5


def test_a_loss_that_still_has_its_gradient_is_taken_without_a_word(
    reporter: Reporter, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    torch = pytest.importorskip("torch")
    loss = (torch.ones(2, requires_grad=True) * 2).sum()
    reporter.add(1, {"loss": loss})
    reporter.flush()
    assert not recwarn.list
    assert lines(tmp_path)[0]["metrics"]["loss"][0][2] == 4.0


def test_outside_a_training_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATOLL_REPORTS", raising=False)
    started: list[object] = []
    threads = SimpleNamespace(start_new_thread=lambda *words: started.append(words))
    monkeypatch.setattr(metrics, "_thread", threads)
    outside = Reporter()
    outside.add(1, {"loss": object()})
    outside.add_round({"round": 1})
    life = outside._sessions[os.getpid()]
    assert not started
    assert not life.calls
    assert not life.rounds


def test_numbers_that_are_not_finite_are_valid_json(reporter: Reporter, tmp_path: Path) -> None:
    reporter.add(1, {"a": math.nan, "b": math.inf, "c": -math.inf})
    reporter.flush()
    (batch,) = lines(tmp_path)
    assert [batch["metrics"][name][0][2] for name in "abc"] == ["nan", "inf", "-inf"]


def test_many_points_between_two_rounds_are_merged_and_keep_their_extremes(
    reporter: Reporter, tmp_path: Path
) -> None:
    for step in range(5000):
        reporter.add(step, {"loss": 100.0 if step == 2500 else 1.0})
    reporter.flush()
    points = lines(tmp_path)[0]["metrics"]["loss"]
    assert len(points) <= metrics.POINTS_A_NAME
    assert sum(point[5] for point in points) == 5000
    assert max(point[4] for point in points) == 100.0


def test_what_cannot_be_handed_on_is_kept_and_comes_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "SOON_S", 3600.0)
    blocked = tmp_path / "metrics"
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
    points = [point for batch in batches for point in batch["metrics"]["loss"]]
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
    assert sorted(batch["metrics"]["loss"][0][1] for batch in batches) == [1, 2]
    assert len({batch["id"] for batch in batches}) == 2


def test_more_names_than_are_kept_are_counted(reporter: Reporter, tmp_path: Path) -> None:
    reporter.add(1, {f"n{number}": 1.0 for number in range(metrics.MAX_NAMES + 5)})
    reporter.flush()
    (batch,) = lines(tmp_path)
    assert len(batch["metrics"]) == metrics.MAX_NAMES
    assert batch["skipped"] == 5


def test_a_file_that_is_large_enough_gets_a_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metric_sinks, "SEGMENT_BYTES", 10)
    sink = FolderSink(tmp_path, "0.1.0.a")
    pauses = [sink.hand_on(b"0123456789\n") for _ in range(12)]
    assert len(list(tmp_path.iterdir())) == 12
    assert pauses[0] < pauses[-1], "where nobody reads, less is written"


def test_merging_keeps_the_order_and_the_newest_step() -> None:
    points = [[float(n), n, float(n)] for n in range(10)]
    assert [point[1] for point in merged(points, 5)] == [1, 3, 5, 7, 9]


def test_processes_of_torchrun_in_one_rank_are_told_apart() -> None:
    life = metrics.MetricWriter.of(
        {"ATOLL_RANK": "1", "LOCAL_RANK": "3", "TORCHELASTIC_RUN_ID": "x"}
    )
    assert (life.rank, life.process) == (1, 3)
    assert metrics.MetricWriter.of({"ATOLL_RANK": "1", "LOCAL_RANK": "1"}).process == 0
    assert sink_of({}, "0.1.0.a") is None
