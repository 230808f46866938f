"""Rounds are there to look at, equal to the manifests, though no replica reports any."""

from __future__ import annotations

import csv
import io
import os
import signal
import sys
from typing import Any

from atoll.diloco.history import read_manifests
from atoll.objectstore import ObjectStore
from tests.e2e.conftest import until

# The rounds go through the store alone: nothing is reported.
SCRIPT = """
import os, pathlib, sys, numpy as np
from atoll.diloco.allreduce import ObjectStoreAllReduce
rank = int(os.environ["ATOLL_RANK"])
again = pathlib.Path(f"again-{rank}")
with ObjectStoreAllReduce(
    os.environ["ATOLL_RENDEZVOUS_URI"], rank, 3, run_id=os.environ["ATOLL_UID"],
    min_replicas=1, grace_s=0.3,
) as reduce:
    while True:
        reduce.allreduce([np.full(8, rank, np.float32)], weight=rank + 1.0)
        number = reduce.last_round.round
        if rank == 2 and number >= 4 and not again.exists():
            again.touch()
            os._exit(7)
        if number == 6:
            pathlib.Path(f"half-{rank}").touch()
        if number >= 12 and pathlib.Path("go").exists():
            break
"""


def test_rounds_equal_the_rosters_through_kills_though_nobody_reports(atoll: Any) -> None:
    (atoll.cwd / "train.py").write_text(SCRIPT)
    made = atoll(
        "run", "-d", "--name", "many", "-n", "3", "--min", "1", "--rendezvous", "none",
        "--max-restarts", "2", "--", sys.executable, "train.py",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    until(lambda: (atoll.cwd / "half-0").exists())
    os.kill(atoll.server_pid(), signal.SIGKILL)
    (atoll.cwd / "go").touch()
    assert atoll("wait", "many", "--timeout", "50").returncode == 0
    status = atoll.json("status", "many")
    blobs = ObjectStore.open(atoll.state / "ranks" / status["uid"] / "rendezvous")
    manifests = {each.round: each for each in read_manifests(blobs, status["uid"])}
    until(lambda: len(atoll.json("rounds", "many")["round"]) == len(manifests))

    table = atoll.json("rounds", "many")
    shown = list(
        zip(*(table[name] for name in ("round", "members", "weights", "missing")), strict=True)
    )
    held = []
    for number, manifest in sorted(manifests.items()):
        members = sorted(manifest.members, key=lambda member: member.rank)
        ranks, weights = [m.rank for m in members], [m.weight for m in members]
        held.append((number, ranks, weights, sorted(manifest.missing)))
    assert shown == held
    assert set(table["source"]) == {"store"}
    assert table["why"] == "read from the manifests in the store"
    assert all(table["at"])

    summary = atoll.json("status", "many")["rounds"]
    assert summary["rounds"] == len(manifests)
    assert summary["movedAt"] == table["at"][-1]
    text = atoll("status", "many").stdout
    assert f"rounds    {len(manifests)} rounds committed" in text
    listing = atoll("rounds", "many").stdout
    assert "ROUND" in listing
    assert summary["message"] in listing
    rows = list(csv.DictReader(io.StringIO(atoll("rounds", "many", "--csv").stdout)))
    assert [int(row["round"]) for row in rows] == sorted(manifests)
    assert rows[0]["members"].split() == [str(rank) for rank in held[0][1]]


SAME_DATA = """
import torch
from atoll.diloco import DiLoCo
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
inner = torch.optim.SGD(model.parameters(), lr=0.01)
with DiLoCo(model, inner, sync_every=1) as diloco:
    for _ in range(3):
        model(torch.randn(8, 4)).pow(2).mean().backward()
        inner.step()
        inner.zero_grad()
"""


def test_replicas_on_the_same_data_are_not_simply_green(atoll: Any) -> None:
    """The warning of a rank is at the end of `atoll run`, in the status, an event, a condition."""
    (atoll.cwd / "same.py").write_text(SAME_DATA)
    done = atoll("run", "--name", "same", "-n", "2", "--rendezvous", "none", "same.py")
    assert done.returncode == 0
    words = "ranks 0 and 1 have identical pseudo-gradients"
    assert f"  warning: round 0: {words}" in done.stderr
    status = atoll.json("status", "same")
    assert len(status["warnings"]) == 1
    until(lambda: "TrainingWarning" in atoll("events", "same").stdout)
    events = [e for e in atoll.json("events", "same") if e["reason"] == "TrainingWarning"]
    assert [(e["type"], e["count"], words in e["message"]) for e in events] == [
        ("Warning", 1, True)
    ]
    conditions = {c["type"]: c for c in atoll.json("status", "same")["conditions"]}
    assert words in conditions["Warnings"]["message"]
    assert "rounds that each rank took part in: ranks 0-1: 3" in atoll("rounds", "same").stdout


# Rank 1 reads its data slowly. Rounds by the clock would not wait for it; these do.
SLOW_SCRIPT = """
import os, time, torch
from atoll.diloco import DiLoCo
rank = int(os.environ["ATOLL_RANK"])
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def batches():
    while True:
        time.sleep(0.2 if rank else 0.0)
        yield torch.randn(8, 4)

with DiLoCo(model, optimizer, sync_every=4, warmup="none") as diloco:
    for batch in diloco.until(batches(), rounds=5):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        time.sleep(0.02)
        optimizer.step()
"""


def test_a_slow_rank_is_named_with_what_it_spends_its_time_on(atoll: Any) -> None:
    (atoll.cwd / "train.py").write_text(SLOW_SCRIPT)
    made = atoll("run", "--name", "uneven", "--replicas", "2", "--", sys.executable, "train.py")
    assert made.returncode == 0, made.stderr
    (slow,) = atoll.json("rounds", "uneven")["summary"]["slow"]
    assert slow["rank"] == 1
    assert slow["factor"] > 1.5
    assert slow["data"] > slow["compute"]
    assert slow["message"].startswith("rank 1 is slow: ")
    assert slow["message"] in atoll("rounds", "uneven").stdout
    assert slow["message"] in atoll("status", "uneven").stdout
