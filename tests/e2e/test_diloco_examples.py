from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = {"ROUNDS": "3", "SYNC_EVERY": "4", "WIDTH": "16", "DEPTH": "1", "CONTEXT": "16"}


def run(name: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_minimal_example_learns_alone() -> None:
    out = run("diloco_minimal.py")
    assert "after 20 rounds" in out
    assert float(out.split("loss ")[1].split()[0]) < 0.1


@pytest.mark.parametrize("codec", ["e3m0"])
def test_the_gpt_example_trains_through_a_store(codec: str, tmp_path: Path) -> None:
    out = run("diloco_gpt.py", CODEC=codec, ATOLL_RENDEZVOUS_URI=f"file://{tmp_path}", **SMALL)
    assert "round 2 members [0]" in out
    assert "validation loss" in out
    assert any(tmp_path.iterdir())
