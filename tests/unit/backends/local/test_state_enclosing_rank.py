"""Whether a process belongs to a rank, whatever has become of its environment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from atoll.backends.local.state import enclosing_rank

RANK = {"ATOLL_UID": "u", "ATOLL_NAME": "tide", "ATOLL_RANK": "2"}
TOLD = "from atoll.backends.local.state import enclosing_rank; print(enclosing_rank())"


def told(*command: str, **env: str) -> str:
    done = subprocess.run(command, env=dict(os.environ) | env, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


@pytest.mark.parametrize(
    ("code", "env", "answer"),
    [
        (TOLD, {}, "None"),
        (TOLD, {"ATOLL_NAME": "set by hand", "ATOLL_RANK": "2"}, "None"),
        (TOLD, RANK, "rank 2 of tide"),
        (f"import os; os.environ.clear(); {TOLD}", RANK, "rank 2 of tide"),
    ],
    ids=["outside", "without a uid", "a rank", "its environment cleared"],
)
def test_a_process(code: str, env: dict[str, str], answer: str) -> None:
    assert told(sys.executable, "-c", code, **env) == answer


def test_a_child_that_was_given_another_environment() -> None:
    script = f'env -i "{sys.executable}" -c "{TOLD}"; true'
    assert told("sh", "-c", script, **RANK) == "rank 2 of tide"


def test_one_whose_memory_of_its_environment_was_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As programs that set the title of their process do: /proc no longer tells.
    for name, value in RANK.items():
        monkeypatch.setenv(name, value)
    assert str(enclosing_rank()) == "rank 2 of tide"
