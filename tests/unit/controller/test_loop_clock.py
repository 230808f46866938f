"""The mark that a control plane leaves of its clock."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.controller import loop as module
from atoll.controller.loop import machine_clock, write_mark


def test_a_mark_is_found_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = {"wall": 1000.0, "monotonic": 50.0}
    monkeypatch.setattr(module.time, "time", lambda: now["wall"])
    monkeypatch.setattr(module.time, "monotonic", lambda: now["monotonic"])
    first = machine_clock(tmp_path / "clock")
    now.update(wall=8200.0, monotonic=50.0)
    assert first().monotonic == 1000.0
    write_mark(first, tmp_path / "clock")
    assert os.stat(tmp_path / "clock").st_mode & 0o777 == 0o600
    now.update(wall=8210.0, monotonic=60.0)
    assert machine_clock(tmp_path / "clock")().monotonic == 1010.0


@pytest.mark.parametrize("content", [b"", b"{", b'{"boot": 1}'])
def test_a_broken_or_missing_mark_is_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "clock"
    assert machine_clock(path).mark.skew == 0.0
    path.write_bytes(content)
    assert machine_clock(path).mark.skew == 0.0


def test_a_directory_that_is_gone_keeps_nobody_from_going_on(tmp_path: Path) -> None:
    write_mark(machine_clock(), tmp_path / "gone" / "clock")
