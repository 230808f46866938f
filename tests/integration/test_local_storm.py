"""A storm of kills, stops and clock jumps over every process of the local backend.

Afterwards no exit is lost, no attempt was started twice, nothing is left behind, and `ready`
counts what really runs: by the journals and /proc, with which the status must agree. The seed
picks the faults; the machine decides how far things have come by then.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from tests.support.control_plane import serving
from tests.support.storm import Clock, Storm

FAULTS = int(os.environ.get("ATOLL_STORM_FAULTS", "1000"))
SEED = int(os.environ.get("ATOLL_STORM_SEED", "1"))


def weather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: int, seed: int) -> None:
    clock = Clock(tmp_path) if shutil.which("cc") else None
    for name, value in (clock.environment if clock else {}).items():
        monkeypatch.setenv(name, value)
    with serving(tmp_path / "state") as plane:
        storm = Storm(plane, tmp_path, clock, seed)
        try:
            storm.run(faults)
        finally:
            said = ", ".join(f"{name} {count}" for name, count in sorted(storm.faults.items()))
            print(f"seed {seed}: {sum(storm.faults.values())} faults: {said}")  # noqa: T201


def test_short_storm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weather(tmp_path, monkeypatch, faults=20, seed=SEED)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_long_storm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weather(tmp_path, monkeypatch, faults=FAULTS, seed=SEED)
