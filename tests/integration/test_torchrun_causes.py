"""A program that fails under torchrun inside a rank: its own exception is the cause, everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.control_plane import ControlPlane

from atoll.agent import process
from atoll.core.describe import describe_end
from atoll.core.ranks import exception_in

pytest.importorskip("torch")

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
WORLD = """
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == dist.get_world_size() - 1:
    raise ValueError("oops")
dist.barrier()
"""
RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise ValueError("oops\\nin two lines")
main()
"""
KILLED = "import os; os.kill(os.getpid(), 9)"
PROGRAMS = {  # the program, how many processes of it, what is told
    "alone": ("raise ValueError('oops')", 1, "ValueError: oops"),
    "world": (WORLD, 2, "ValueError: oops"),
    "recorded": (RECORDED, 2, "ValueError: oops"),
    "killed": (KILLED, 1, "Signal 9 (SIGKILL) received by PID"),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", PROGRAMS)
def test_torchrun_does_not_hide_the_exception(
    shared_plane: ControlPlane, tmp_path: Path, program: str
) -> None:
    text, processes, expected = PROGRAMS[program]
    (tmp_path / "program.py").write_text(text)
    command = [*TORCHRUN, str(processes), str(tmp_path / "program.py")]
    name = shared_plane.create(command, env={"OMP_NUM_THREADS": "1"})
    training = shared_plane.until_over(name, timeout=200)
    cause = training.status.root_cause
    assert cause is not None
    assert cause.message.startswith(expected)
    assert f"it exited with code 1: {expected}" in describe_end(training)
    if program in ("alone", "world"):
        assert cause.log_tail[-1].endswith("ValueError: oops")


@pytest.mark.timeout(300)
def test_the_record_of_a_wrapped_rank_ends_with_the_exception(tmp_path: Path) -> None:
    """As ranks of clusters record their ends."""
    (tmp_path / "program.py").write_text(WORLD)
    wrapper = [sys.executable, "-S", "-I", process.__file__, "--record", str(tmp_path / "record")]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*wrapper, "--", *TORCHRUN, "2", str(tmp_path / "program.py")],
        env=env,
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 1
    record = process.read_record((tmp_path / "record").read_text())
    assert record is not None
    assert exception_in(record["tail"]) == "ValueError: oops"
