"""A training with `--run-id` goes on where the one before ended."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import Shell, until

SCRIPT = str(Path(__file__).with_name("resumed.py"))
pytestmark = pytest.mark.timeout(300)


def said(out: str, word: str) -> set[str]:
    """What the ranks say after `word`; the same of all if there is one."""
    return set(re.findall(rf"\b{word} (.*)", out))


def finished(atoll: Shell, *words: str) -> str:
    """What a training says that ends well, however long a busy machine takes for it."""
    process = atoll.start(*words)
    out, errors = process.communicate(timeout=250)
    assert process.returncode == 0, out + errors
    return out


@pytest.mark.parametrize("place", ["state", pytest.param("own", marks=pytest.mark.soak)])
def test_a_second_training_goes_on_where_the_first_ended(
    lone_atoll: Shell, tmp_path: Path, place: str
) -> None:
    words = ["run", "-n", "2", "--run-id", "exp-7"]
    if place == "own":
        words += ["--uri", (tmp_path / "store").as_uri()]
    first = finished(lone_atoll, *words, "--", sys.executable, SCRIPT, "2")
    assert said(first, "began") == {"0 0"}
    second = finished(lone_atoll, *words, "--", sys.executable, SCRIPT, "4")
    assert said(second, "began") == {"2 10"}
    assert said(first, "resumed") == set()
    assert second.count("resumed exp-7 at step 10, round 2") == 1
    third = finished(lone_atoll, *words, "--", sys.executable, SCRIPT, "4")
    assert third.count("exp-7 is already at its end (step 20, round 4)") == 1
    # 20 steps of 2 replicas with 4 samples each; rounds of the first training count, too.
    assert said(second, "used") == {"160 8"}
    assert len(said(second, "norm")) == 1
    steps = {int(line.split()[0]) for line in said(second, "rate")}
    assert steps == set(range(11, 21))
    store = tmp_path / "store" if place == "own" else lone_atoll.state / "runs"
    assert [each.name for each in store.iterdir() if each.is_dir()] == ["exp-7"]


def test_a_run_that_a_training_is_at_is_refused(atoll: Shell) -> None:
    sleeping = atoll.start("run", "--name", "at-mine", "--run-id", "mine", "--", "sleep", "600")
    try:
        until(lambda: any(each["name"] == "at-mine" for each in atoll.json("ps")))
        again = atoll("run", "--run-id", "mine", "--", "true")
        assert again.returncode != 0
        (line,) = again.stderr.splitlines()
        assert "run_id 'mine' is in use by the training 'at-mine'" in line
        other = atoll("run", "--run-id", "else", "--", "sh", "-c", "echo $ATOLL_RUN_ID")
        assert other.returncode == 0, other.stderr
        assert "else" in other.stdout
    finally:
        atoll("cancel", "at-mine")
        sleeping.communicate(timeout=60)
    after = atoll("run", "--", "sh", "-c", "echo $ATOLL_RUN_ID", ATOLL_RUN_ID="mine")
    assert after.returncode == 0, after.stderr
    assert "mine" in after.stdout


BAD: list[tuple[list[str], Callable[[str], bool]]] = [
    (["--run-id", "../x"], lambda text: "--run-id" in text and "'../x'" in text),
    (["--run-id", ""], lambda text: "--run-id" in text),
    (
        ["--uri", "memory://x"],
        lambda text: "--uri" in text and "memory:// is within one process" in text,
    ),
]


@pytest.mark.parametrize(("words", "is_right"), BAD, ids=["slash", "empty", "memory"])
def test_a_run_that_cannot_be_is_one_clear_line(
    atoll: Shell, words: list[str], is_right: Callable[[str], bool]
) -> None:
    done = atoll("run", *words, "--", "true")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert is_right(line), line
