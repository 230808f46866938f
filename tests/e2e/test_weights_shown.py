"""Weights of a trainer and of rollouts in another training: the page, the CLI and Prometheus."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.e2e.browser import Visitor, open_browser, violations
from tests.e2e.conftest import until

TRAINER = """
import sys, time
from pathlib import Path
import numpy as np
from atoll.weights import Publisher

folder, count = Path(sys.argv[1]), int(sys.argv[2])
publisher = Publisher(folder / "policy")
for step in range(count):
    publisher.publish({"w": np.arange(64, dtype=np.float32) + step}, step=step * 10)
while not (folder / "end").exists():
    time.sleep(0.05)
"""
# Rank 1 stays at the first version: the number after the publisher's claim.
ROLLOUTS = """
import os, sys, time
from pathlib import Path
from atoll.weights import Follower

folder, newest = Path(sys.argv[1]), int(sys.argv[2]) + 1
number = 2 if os.environ["ATOLL_RANK"] == "1" else newest
follower = Follower(folder / "policy", name="engine")
while not follower.next(timeout=1, number=number):
    pass
while not (folder / "end").exists():
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


def run(atoll: Any, name: str, script: str, count: int, ranks: int) -> None:
    (atoll.cwd / f"{name}.py").write_text(script)
    done = atoll(
        "run", "--name", name, "--replicas", str(ranks), "-d", "--",
        sys.executable, f"{name}.py", str(atoll.cwd), str(count),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def followers(atoll: Any, name: str) -> dict[int, dict[str, Any]]:
    channels = atoll.json("weights", name)
    return {row["rank"]: row for channel in channels for row in channel["followers"]}


def test_versions_followers_and_their_lag_are_shown(atoll: Any, browser: Any) -> None:
    run(atoll, "trainer", TRAINER, 3, 1)
    run(atoll, "rollouts", ROLLOUTS, 3, 2)
    try:
        until(lambda: [followers(atoll, "rollouts").get(rank) for rank in (0, 1)].count(None) == 0)
        until(lambda: [row["number"] for row in followers(atoll, "rollouts").values()] == [4, 2])
        uri = f"file://{atoll.cwd}/policy"
        for name in ("trainer", "rollouts"):  # a channel is the same from both sides
            (channel,) = atoll.json("weights", name)
            assert channel["uri"] == uri
            newest, *older = channel["versions"]
            assert (newest["number"], newest["step"]) == (4, 20)
            assert (newest["training"], newest["rank"]) == ("trainer", 0)
            assert [version["number"] for version in older] == [3, 2]
            rows = {row["rank"]: row for row in channel["followers"]}
            assert (rows[0]["behind"], rows[0]["lagS"]) == (0, 0.0)
            assert rows[1]["behind"] == 2
            assert rows[1]["lagS"] >= newest["ageS"]
            assert rows[1]["isFresh"]
        stored = atoll.json("weights", uri)
        assert {row["name"] for row in stored["followers"]} == {
            row["name"] for row in channel["followers"]
        }
        text = atoll("weights", "rollouts").stdout
        assert "trainer/0" in text
        assert "rollouts/1" in text
        (metric,) = {row for row in atoll.json("metrics", "rollouts")["name"] if "weights" in row}
        assert metric == "weights_version"

        endpoint = json.loads((atoll.state / "endpoint.json").read_bytes())
        token = (atoll.state / "token").read_text().strip()
        answer = httpx2.get(
            f"{endpoint['url']}/metrics", headers={"Authorization": f"Bearer {token}"}
        )
        gauges = dict(line.rsplit(" ", 1) for line in answer.text.splitlines() if line[0] != "#")
        labels = '{namespace="default",training="rollouts"}'
        assert float(gauges[f"atoll_training_weights_version{labels}"]) == 4
        assert float(gauges[f"atoll_training_weights_behind{labels}"]) == 2
        assert float(gauges[f"atoll_training_weights_lag_seconds{labels}"]) > 0
        assert not [name for name in gauges if "weights_behind" in name and '"trainer"' in name]

        visitor = Visitor(browser, atoll)
        visitor.sign_in()
        page = visitor.open("/t/rollouts", "#weights table")
        assert "Version 4, step 20" in page.inner_text("#weights")
        assert "1 of 2 followers serve it; the slowest lacks 2 versions" in page.inner_text(
            "#weights"
        )
        cells = page.locator("#weights tbody tr:has-text('rank 1') td").all_inner_texts()
        assert cells[2:4] == ["2", "2"]
        page.wait_for_selector(".jump a:has-text('Weights')")
        assert violations(page) == []
        page = visitor.open("/t/trainer", "#weights table")
        page.wait_for_selector("#weights a:has-text('rollouts')")
        visitor.close()
    finally:
        (atoll.cwd / "end").touch()


def test_a_training_without_weights_shows_none(atoll: Any, browser: Any) -> None:
    done = atoll("run", "--name", "weightless", "--", sys.executable, "-c", "print(1)")
    assert done.returncode == 0, done.stderr
    assert "weightless has no weights" in atoll("weights", "weightless").stdout
    assert atoll.json("weights", "weightless") == []
    visitor = Visitor(browser, atoll)
    visitor.sign_in()
    with visitor.page.expect_response("**/v1/trainings/weightless/weights*"):
        page = visitor.open("/t/weightless", "#logs")
    assert page.locator("#weights").is_hidden()
    visitor.close()


def test_a_name_is_a_training_and_a_path_has_a_slash(atoll: Any) -> None:
    (atoll.cwd / "policy").mkdir()
    refused = atoll("weights", "policy")
    assert refused.returncode == 2
    assert "write ./policy" in refused.stderr
    assert "no version yet" in atoll("weights", "./policy").stdout
    unknown = atoll("weights", "nothing")
    assert unknown.returncode == 1
    assert "training 'nothing' not found" in unknown.stderr
