"""Ends, times and tables in words."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.backends.kubernetes.client import Cluster
from atoll.cli.main import report_error
from atoll.cli.metrics import parse_count
from atoll.cli.output import end_report, full, ran_cell, table, training_json
from atoll.cli.terminal import after_carriage_return, paint
from atoll.cli.trainings import parse_time
from atoll.core.clock import Now
from atoll.core.describe import describe_end
from atoll.core.errors import Temporary, ValidationError
from atoll.core.phase import Phase
from atoll.core.spec import Source, TrainingSpec, WorldSize
from atoll.core.status import RankExit, Status, Training, training_stats
from atoll.core.text import format_duration

SPEC = TrainingSpec(name="t", world_size=WorldSize(min=1, target=1, max=1), command=["true"])


def ended(phase: Phase, **status: object) -> Training:
    return Training(namespace="default", uid="u", spec=SPEC, status=Status(phase=phase, **status))


def test_a_failure_without_a_failing_rank_says_why() -> None:
    training = ended(Phase.FAILED, reason="DeadlineExceeded", message="still running 5 s after")
    assert end_report(training) == "t failed: still running 5 s after"


def test_restarts_and_silence_are_told() -> None:
    cause = RankExit(rank=2, exit_code=1, termination_reason="Error", restart_count=2)
    text = end_report(ended(Phase.FAILED, root_cause=cause, rank_exits=[cause]))
    assert "rank 2 failed first after 2 restarts: it exited with code 1" in text
    assert "rank 2 printed nothing" in text


def test_only_the_last_lines_are_shown() -> None:
    tail = [f"line {number}" for number in range(50)]
    cause = RankExit(rank=0, exit_code=1, termination_reason="Error", log_tail=tail)
    text = end_report(ended(Phase.FAILED, root_cause=cause, rank_exits=[cause]))
    assert "line 49" in text
    assert "line 39" not in text


def test_a_cancelled_training_is_no_failure() -> None:
    cancelled = ended(Phase.CANCELLED)
    assert describe_end(cancelled) == "t was cancelled"
    removed = replace(cancelled, deletion_requested_at=1.0)
    assert describe_end(removed) == "t was cancelled: it is being removed"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0s"),
        (9.99, "10.0s"),
        (59.9, "59s"),
        (185, "3m05s"),
        (7800, "2h10m"),
        (3e5, "3d11h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_moments() -> None:
    assert parse_time("10m", 1000.0) == 400.0
    assert parse_time("1.5h", 10_000.0) == 4600.0
    assert parse_time("9999d", 1000.0) == 0.0
    assert parse_time("1767225600", 0.0) == 1767225600.0
    assert parse_time("2026-01-31T12:00:00+00:00", 0.0) == 1769860800.0
    assert parse_time(time.strftime("%Y-%m-%d"), 0.0) > 1.7e9
    for wrong in ("", "soon", "m", "tomorrow", "10x"):
        with pytest.raises(ValidationError, match="since"):
            parse_time(wrong, 0.0)


def test_counts() -> None:
    assert (parse_count("7B"), parse_count("350M"), parse_count("1.3e9"), parse_count("12")) == (
        7e9,
        350e6,
        1.3e9,
        12,
    )
    for wrong in ("", "B", "many", "inf", "nan"):
        with pytest.raises(ValidationError, match="parameters"):
            parse_count(wrong)


def test_json_has_every_key_but_not_the_code_that_was_shipped() -> None:
    source = Source(kind="script", content=b"secret " * 1000)
    spec = TrainingSpec(name="t", world_size=SPEC.world_size, source=source)
    told = training_json(Training(namespace="default", uid="u", spec=spec))
    assert told["spec"]["source"] == {"kind": "script", "filename": "source.py"}
    assert told["rootCause"] is None
    assert told["rankExits"] == []
    assert full(SPEC)["maxRestarts"] == 0


def test_columns_line_up_whatever_their_colours() -> None:
    text = table(["A", "B"], [[paint("long word", 31, True), "1"], ["x", "2"]])
    lines = text.replace("\x1b[31m", "").replace("\x1b[0m", "").split("\n")
    assert lines == ["A          B", "long word  1", "x          2"]
    assert table(["A", "B"], []) == "A  B"


def test_a_progress_bar_is_seen_as_it_was_left() -> None:
    assert after_carriage_return("10%\r50%\r100%") == "100%"
    assert after_carriage_return("100%\r") == "100%"
    assert after_carriage_return("plain") == "plain"


def test_what_the_control_plane_said_itself_is_not_taken_for_its_absence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert report_error(Temporary("cannot write atoll.db: disk is full: free some space")) == 1
    assert capsys.readouterr().err.endswith("free some space\n")
    lost = Temporary("cannot reach 127.0.0.1:9")
    lost.__cause__ = ConnectionRefusedError()
    assert report_error(lost) == 1
    assert "is the control plane running?" in capsys.readouterr().err


def test_a_cluster_that_does_not_answer_is_not_taken_for_a_control_plane(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = {"name": "it", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "it", "context": {"cluster": "it", "user": "it"}}
    config = {"clusters": [server], "contexts": [context], "users": [{"name": "it", "user": {}}]}
    file = tmp_path / "config"
    file.write_text(json.dumps({**config, "current-context": "it"}))
    with pytest.raises(Temporary) as lost:
        asyncio.run(Cluster.connect(kubeconfig=str(file)).version())
    assert report_error(lost.value) == 1
    told = capsys.readouterr().err
    assert "does 'kubectl cluster-info' answer?" in told
    assert "ATOLL_URL" not in told


def test_a_training_ran_until_its_last_rank_ended_however_late_that_was_seen() -> None:
    exits = [
        RankExit(rank=0, exit_code=0, termination_reason="Completed", ended_at=11.0),
        RankExit(rank=1, exit_code=0, termination_reason="Completed", ended_at=12.0),
        RankExit(rank=2, exit_code=None, termination_reason="Vanished"),
    ]
    over = ended(Phase.SUCCEEDED, started_at=10.0, ended_at=500.0, rank_exits=exits)
    assert over.status.ran_for(900.0) == 2.0
    assert training_stats(over, Now.at(900.0)).running_s == 2.0
    assert ran_cell(over, 900.0) == "2.0s"
    assert ended(Phase.READY, started_at=10.0).status.ran_for(15.0) == 5.0
    assert ended(Phase.CANCELLED, ended_at=20.0).status.ran_for(30.0) is None
