"""What ranks of a real Slurm tell of themselves: figures, rounds, use of the machine, lines."""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm.test_slurm_cli import Shell, shell
from tests.support.slurm_cluster import needs_slurm

__all__ = ["shell"]
pytestmark = [needs_slurm, pytest.mark.slurm, pytest.mark.timeout(400)]
PATIENCE_S = 150.0

SCRIPT = """
import os, pathlib, time, atoll, numpy as np
from atoll.diloco.allreduce import ObjectStoreAllReduce
rank = int(os.environ["ATOLL_RANK"])
with ObjectStoreAllReduce(
    os.environ["ATOLL_RENDEZVOUS_URI"], rank, 2, run_id=os.environ["ATOLL_UID"], grace_s=60.0
) as reduce:
    for step in range(1, 4):
        reduce.allreduce([np.full(8, rank, np.float32)], weight=1.0)
        atoll.report(step=step, loss=1 / step + rank)
        print("round", step, flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
"""


def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.2)


def rows(shell: Shell, *words: str) -> Iterator[dict[str, str]]:
    done = shell.atoll("metrics", "told", *words, "--csv")
    assert done.returncode == 0, done.stderr
    return csv.DictReader(io.StringIO(done.stdout))


def test_figures_rounds_and_lines_of_ranks_are_there_to_look_at(shell: Shell) -> None:
    folder = Path(shell.folder)
    (folder / "train.py").write_text(SCRIPT)
    words = ("--executor", "lab", "--no-code", "-C", str(folder), "-n", "2", "--rendezvous", "none")
    made = shell.atoll("run", "-d", "--name", "told", *words, "--", sys.executable, "train.py")
    assert made.returncode == 0, made.stderr
    until(lambda: len(list(rows(shell, "loss"))) == 6)
    until(lambda: {row["rank"] for row in rows(shell, "machine/memory")} == {"0", "1"})
    (folder / "go").touch()
    waited = shell.atoll("wait", "told", "--timeout", "90")
    assert waited.returncode == 0, waited

    told = {
        (int(row["rank"]), int(row["step"])): float(row["value"]) for row in rows(shell, "loss")
    }
    assert told == {(rank, step): 1 / step + rank for rank in range(2) for step in range(1, 4)}
    # The end of a training leaves what its ranks stored, or its last rounds could not be read.
    assert len(list(folder.glob("shared/*/rendezvous/*/manifest/*"))) == 3
    until(lambda: len(json.loads(shell.atoll("rounds", "told", "--json").stdout)["round"]) == 3)
    rounds = json.loads(shell.atoll("rounds", "told", "--json").stdout)
    assert rounds["members"] == [[0, 1]] * 3
    assert set(rounds["source"]) == {"store"}

    logged = shell.atoll("logs", "told", "--timestamps", "--json")
    assert logged.returncode == 0, logged.stderr
    lines = [json.loads(line) for line in logged.stdout.splitlines()]
    assert len(lines) == 6
    times = [line["time"] for line in lines]
    assert all(times)
    assert times == sorted(times)


HUNG = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def hang():
    open(f"up{os.environ['ATOLL_RANK']}", "w")
    while True: time.sleep(1000)
hang()
"""


def test_stacks_and_signals_reach_ranks_and_a_kill_leaves_its_stack(shell: Shell) -> None:
    folder = Path(shell.folder)
    (folder / "hung.py").write_text(HUNG)
    words = ("--executor", "lab", "--no-code", "-C", str(folder), "-n", "2", "--rendezvous", "none")
    more = ("--stop-grace", "1s", "--min", "1", "--", sys.executable, "hung.py")
    made = shell.atoll("run", "-d", "--name", "hung", *words, *more)
    assert made.returncode == 0, made.stderr
    until(lambda: (folder / "up0").exists() and (folder / "up1").exists())
    until(lambda: "2 ranks (0-1) in hung.py:6 in hang" in shell.atoll("stacks", "hung").stdout)
    refused = shell.atoll("exec", "hung", "--", "true")
    assert "log in to the host, which 'atoll status' names" in refused.stderr
    sent = shell.atoll("kill", "hung", "1", "-s", "USR1")
    assert "sent SIGUSR1 to rank 1" in sent.stdout, sent.stderr
    stopped = shell.atoll("cancel", "hung")
    assert stopped.returncode == 0, stopped.stderr
    shell.atoll("wait", "hung", "--timeout", "90")
    status = json.loads(shell.atoll("status", "hung", "--json").stdout)
    ended = {end["rank"]: end for end in status["rankExits"]}
    assert ended[1]["signal"] == "SIGUSR1"
    assert "hung.py:6 in hang" in ended[0]["stack"][0]
    kept = shell.atoll("stacks", "hung", "--stored").stdout
    assert "taken because it did not end within its grace period (rank 0)" in kept
