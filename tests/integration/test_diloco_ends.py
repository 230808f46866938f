"""A replica of several processes ends with the code of its program, however the program ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

WORLD = Path(__file__).parent / "ending_world.py"
# Where the threads of a group outlive Python, the last nearly always aborts, and others sometimes.
ENDS = {
    "close": 0,
    "leave_open": 0,
    "fail": 1,
    "leave": 0,
    "destroy": 0,
    "leave_a_round": 0,
}
# Of a replica of which only the first process exits: the other one fails, and does not hang.
ALONE = {"leave_alone": [0, 1]}


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="the order is set by Linux's scheduler")
@pytest.mark.timeout(600)
def test_processes_of_a_replica_end_with_the_code_of_their_program(tmp_path: Path) -> None:
    command = [sys.executable, str(WORLD), str(tmp_path), *ENDS, *ALONE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    codes = json.loads((tmp_path / "codes.json").read_text())
    expected = {name: [code, code] for name, code in ENDS.items()} | ALONE
    assert codes == expected, done.stderr[-4000:]
