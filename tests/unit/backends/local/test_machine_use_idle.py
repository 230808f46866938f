from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.agent.records import AttemptFacts, start_record
from atoll.backends.local import machine_use
from atoll.backends.local.machine_use import IdleTracker
from atoll.logs.segments import LogWriter

START = start_record(3, 1, 0.0, pid=os.getpid(), startTicks=7)
RANK = AttemptFacts(3, 1, None, START, None)


class Cpu:
    used: float | None = 1.0


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> Cpu:
    found = Cpu()

    def seconds(attempts: list[AttemptFacts]) -> dict[int, float]:
        return {} if found.used is None else {a.pid: found.used for a in attempts}

    monkeypatch.setattr(machine_use, "cpu_seconds", seconds)
    return found


def test_a_line_a_report_and_cpu_are_moves(tmp_path: Path, cpu: Cpu) -> None:
    still = IdleTracker()
    (tmp_path / "metrics").mkdir()
    log = LogWriter(tmp_path / "logs" / "3")

    def quiet(now: float) -> float:
        return still.idle_s("u", tmp_path, [RANK], now)[3]

    assert quiet(100.0) == 0.0
    assert quiet(130.0) == 30.0
    log.write(b"x")
    assert quiet(140.0) == 0.0
    report = tmp_path / "metrics" / "3.1.0.ab.000001"
    report.write_text("one")
    (tmp_path / "metrics" / "4.1.0.ab.000001").write_text("another rank's")
    assert quiet(150.0) == 0.0
    assert quiet(160.0) == 10.0
    (tmp_path / "metrics" / "3.1.0.ab.000002").write_text("two")
    assert quiet(170.0) == 0.0
    report.unlink()  # read by the control plane: no move of the rank
    assert quiet(180.0) == 10.0
    cpu.used = 1.1  # of 10 s
    assert quiet(190.0) == 20.0
    cpu.used = 1.4
    assert quiet(200.0) == 0.0
    cpu.used = None  # it cannot be seen: nothing is claimed
    assert quiet(210.0) == 0.0
    log.close()


def test_a_rank_that_is_started_again_has_just_moved(tmp_path: Path, cpu: Cpu) -> None:
    still = IdleTracker()
    still.idle_s("u", tmp_path, [RANK], 0.0)
    assert still.idle_s("u", tmp_path, [RANK], 9.0) == {3: 9.0}
    assert still.idle_s("u", tmp_path, [RANK._replace(attempt=2)], 10.0) == {3: 0.0}
    assert still.idle_s("u", tmp_path, [RANK._replace(exit={})], 11.0) == {}
    still.forget("u")
    assert still.idle_s("u", tmp_path, [RANK], 12.0) == {3: 0.0}
