"""A DiLoCo run that the release before began goes on, with the same bits and in other shapes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.release import NEW, unpack

SCRIPT = Path(__file__).parent / "diloco_run.py"


def run(path: Path, uri: str, rounds: int, processes: int = 1) -> tuple[int, str]:
    shared = [entry for entry in sys.path if entry.endswith("site-packages")]
    done = subprocess.run(
        [sys.executable, "-S", str(SCRIPT), uri, str(rounds), str(processes)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), *shared])},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    began, digest = done.stdout.split()
    return int(began), digest


@pytest.mark.timeout(600)
def test_a_run_of_the_release_before_goes_on_and_has_the_bits_it_would_have_had(
    tmp_path: Path,
) -> None:
    old = unpack(tmp_path / "old")
    uri = f"file://{tmp_path}/run"
    began, four = run(old, uri, 4)
    assert began == 0
    # Two processes where there was one: they read the start, the checkpoint and the means of it.
    assert run(NEW, uri, 4, processes=2) == (4, four)
    assert run(NEW, f"file://{tmp_path}/fresh", 4) == (0, four)
