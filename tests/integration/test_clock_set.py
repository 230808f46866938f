"""A control plane and its ranks on a machine whose clock is set, by Debian's libfaketime."""

from __future__ import annotations

from glob import glob
from pathlib import Path

import pytest
from tests.support.control_plane import serving

LIBRARY = glob("/usr/lib/*/faketime/libfaketime.so.1")

pytestmark = pytest.mark.skipif(not LIBRARY, reason="needs Debian's package faketime")


def test_a_clock_that_is_set_fails_bills_and_forgets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, go = tmp_path / "clock", tmp_path / "go"
    clock.write_text("+0\n")
    settings = {
        "LD_PRELOAD": LIBRARY[0],
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with serving(tmp_path / "state") as plane:
        long = plane.create("exec sleep 1000", 2, deadline_s=3600.0)
        plane.until_ready(long, 2)
        short = plane.create("exit 0", ttl_seconds=600)
        plane.until_over(short)
        script = f"until [ -e {go} ]; do sleep 0.02; done; [ $ATOLL_ATTEMPT = 2 ] || exit 3"
        again = plane.create(script, max_restarts=2)
        plane.until_ready(again, 1)
        clock.write_text("-3600\n")
        go.touch()
        assert plane.until_over(again).status.phase == "succeeded"
        clock.write_text("+7200\n")
        for _ in range(2):  # the one that ran meanwhile, and one that starts then
            plane.until_over(plane.create("exit 0"))
            plane.restart()
        assert plane.get(long).status.phase == "ready"
        assert plane.get(short).status.phase == "succeeded"
        plane.ask(long, cancel=True)
        status = plane.until_over(long).status
        assert [r.termination_reason for r in status.rank_exits] == ["Stopped", "Stopped"]
        assert sum(r.metered_s for r in status.ranks) < 600
