"""What publishers and followers in a rank report of their channel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.agent import metrics
from atoll.agent.metrics import Reporter
from atoll.weights import Follower, Publisher, reports


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the reports of this process go; the test sends them by itself."""
    folder = tmp_path / "reports"
    monkeypatch.setenv("ATOLL_REPORTS", folder.as_uri())
    monkeypatch.setattr(metrics, "SOON_S", 3600.0)
    monkeypatch.setattr(metrics, "_REPORTER", Reporter())
    return folder


def sent(folder: Path) -> list[dict[str, Any]]:
    metrics._REPORTER.flush()
    files = sorted(folder.iterdir()) if folder.exists() else []
    return [json.loads(line) for path in files for line in path.read_bytes().splitlines()]


def publish(publisher: Publisher, step: int) -> None:
    publisher.publish({"w": np.arange(100, dtype=np.float32) + step}, step=step)


def test_versions_that_are_published_and_served_are_reported(folder: Path, tmp_path: Path) -> None:
    with Publisher(tmp_path / "c") as publisher, Follower(tmp_path / "c", name="e") as follower:
        assert follower.next() is None
        publish(publisher, 5)
        follower.next()
        follower.next()  # nothing new: nothing is reported
        (batch,) = sent(folder)
    rows = batch["weights"]
    assert [(row["role"], row.get("number", 0), row.get("step")) for row in rows] == [
        ("follower", 0, None), ("publisher", 2, 5), ("follower", 2, 5)
    ]  # fmt: skip
    assert {row["channel"] for row in rows} == {f"file://{tmp_path}/c"}
    assert rows[1]["publisher"] == rows[2]["publisher"] == rows[1]["id"]
    assert rows[0]["id"] == rows[2]["id"]
    assert rows[0]["id"].startswith("e.")
    assert [point[1:] for point in batch["metrics"]["weights_version"]] == [[5, 2], [5, 2]]
    assert [*batch["metrics"]] == ["weights_version"]
    assert sent(folder)[-1]["weights"][0]["is_closed"]


def test_a_follower_without_news_reports_that_it_lives(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "RENEW_S", 0.0)
    with Publisher(tmp_path / "c") as publisher, Follower(tmp_path / "c") as follower:
        publish(publisher, 0)
        follower.next()
        follower.next()
        (batch,) = sent(folder)
    numbers = [row.get("number", 0) for row in batch["weights"] if row["role"] == "follower"]
    assert numbers[-2:] == [2, 2]
    assert len(batch["metrics"]["weights_version"]) == 2


def test_outside_of_a_training_nothing_is_reported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ATOLL_REPORTS")
    with Publisher(tmp_path / "c") as publisher:
        publish(publisher, 0)
    assert sent(folder) == []


def test_a_report_that_fails_ends_no_publish(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(Reporter, "add_weights", fail)
    monkeypatch.setattr(Reporter, "add", fail)
    with Publisher(tmp_path / "c") as publisher:
        publish(publisher, 0)
