"""Values that are set aside come back, whether or not there is room on the disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from atoll.diloco.spill import SpillFile


@pytest.mark.parametrize("is_there", [True, False])
def test_what_is_set_aside_comes_back(
    is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path if is_there else tmp_path / "gone"))
    row = np.random.default_rng(0).standard_normal(1000).astype("f4")
    with SpillFile(row.size) as spill:
        spill.put(600, row[600:])
        spill.put(0, row[:600])
        back = np.empty_like(row)
        spill.get(0, back)
        assert back.tobytes() == row.tobytes()
        part = np.empty(10, np.float32)
        spill.get(595, part)
        assert part.tobytes() == row[595:605].tobytes()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_met_before_anything_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    row = np.arange(5, dtype=np.float32)
    with SpillFile(row.size) as spill:
        spill.put(0, row)
        spill.get(0, back := np.empty_like(row))
    assert back.tolist() == row.tolist()


def test_nothing_is_no_special_case() -> None:
    with SpillFile(0) as spill:
        spill.put(0, np.empty(0, np.float32))
        spill.get(0, np.empty(0, np.float32))
