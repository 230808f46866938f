"""The snippets for trackers run as ranks, and leave the ids of their training in the tracker."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "monitor.md"
BLOCK = re.compile(r'^```python title="(\w+)_train.py"\n(.*?)^```', re.M | re.S)
SNIPPETS = dict(BLOCK.findall(PAGE.read_text()))

pytestmark = pytest.mark.soak  # importing the libraries takes most of the time


def run(atoll: Any, name: str, title: str, *options: str) -> dict[str, Any]:
    (atoll.cwd / "train.py").write_text(SNIPPETS[title])
    words = ("run", "--name", name, "-n", "1", "--rendezvous", "none", *options)
    done = atoll(*words, "--", sys.executable, "train.py")
    assert done.returncode == 0, done.stderr + done.stdout
    status: dict[str, Any] = atoll.json("status", name)
    reported = atoll.json("metrics", name, "loss")
    assert reported["count"] == [1] * 10, "the same is in atoll"
    return status


def test_tensorboard_has_the_curve_and_the_ids(atoll: Any) -> None:
    pytest.importorskip("torch")
    status = run(atoll, "in-tensorboard", "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(atoll.cwd / "runs" / "in-tensorboard" / "rank0-0")).Reload()
    assert [event.step for event in events.Scalars("loss")] == list(range(10))
    [text] = events.Tensors("atoll/text_summary")
    assert status["uid"] in text.tensor_proto.string_val[0].decode()
    atoll("rm", "-f", "in-tensorboard")


def test_wandb_has_the_ids_in_its_config(atoll: Any) -> None:
    pytest.importorskip("wandb", reason="it is large: docs/monitor.md says how it was tried")
    status = run(
        atoll, "in-wandb", "wandb", "--env", "WANDB_MODE=offline", "--env", "WANDB_SILENT=1"
    )
    [written] = (atoll.cwd / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert status["uid"].encode() in content
    assert b"in-wandb" in content
    atoll("rm", "-f", "in-wandb")
