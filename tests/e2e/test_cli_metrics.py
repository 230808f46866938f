"""What ranks report is there to look at: through a killed control plane, after the end, and not
after the training is removed."""

from __future__ import annotations

import csv
import io
import os
import signal
import sqlite3
import sys
from pathlib import Path
from typing import Any

from tests.e2e.conftest import until

SCRIPT = """
import os, pathlib, time, atoll
rank = int(os.environ["RANK"])
for step in range(1, 41):
    atoll.report(step=step, loss=1 / step + rank)
    if step == 20:
        pathlib.Path(f"half-{rank}").touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.02)
atoll.report(step=41, loss=float("nan"), **{"<b>": 1})
"""


def rows(atoll: Any, *words: str) -> list[dict[str, str]]:
    done = atoll("metrics", *words, "--csv")
    assert done.returncode == 0, done.stderr
    return list(csv.DictReader(io.StringIO(done.stdout)))


def test_reports_survive_a_killed_control_plane_and_go_with_the_training(atoll: Any) -> None:
    (atoll.cwd / "train.py").write_text(SCRIPT)
    made = atoll("run", "-d", "--name", "told", "-n", "2", "--", sys.executable, "train.py")
    assert made.returncode == 0, made.stderr
    until(lambda: all((atoll.cwd / f"half-{rank}").exists() for rank in range(2)))
    os.kill(atoll.server_pid(), signal.SIGKILL)
    (atoll.cwd / "go").touch()  # the second half is told while nobody listens
    assert atoll("wait", "told", "--timeout", "50").returncode == 0

    uid = atoll.json("status", "told")["uid"]
    told = rows(atoll, "told", "loss")
    assert len(told) == 82, "all of it, as soon as the training is over"
    by_rank = {r: [row for row in told if row["rank"] == r] for r in ("0", "1")}
    for rank, own in by_rank.items():
        assert [int(row["step"]) for row in own] == list(range(1, 42))
        assert float(own[3]["value"]) == 0.25 + int(rank)
        assert own[-1]["value"] == "nan"
        assert {row["attempt"] for row in own} == {own[0]["attempt"]}

    table = atoll.json("metrics", "told", "--rank", "1")
    assert set(table["rank"]) == {1}
    assert "<b>" in table["name"]
    picture = atoll("metrics", "told", "loss", "--plot")
    assert picture.returncode == 0
    assert "loss of told" in picture.stdout
    drawn = atoll("metrics", "told", "loss", "--svg", "loss.svg")
    assert (atoll.cwd / "loss.svg").read_text().startswith("<svg"), drawn.stderr
    for words in (("--plot",), ("--json",), ()):
        refused = atoll("metrics", "told", "los", *words)
        assert refused.returncode == 2
        assert "metric: 'los' is not valid: told has reported" in refused.stderr
        assert "loss" in refused.stderr

    assert atoll("rm", "-f", "told").returncode == 0
    until(lambda: not _stored(atoll.state / "series.db", uid))


def _stored(path: Path, uid: str) -> int:
    with sqlite3.connect(path) as db:
        return sum(
            int(db.execute(f"select count(*) from {table} where uid = ?", (uid,)).fetchone()[0])
            for table in ("series", "batches", "lives")
        )


def test_a_rank_shows_what_it_uses(atoll: Any) -> None:
    busy = "import time\nwhile True: sum(range(100_000)); time.sleep(0.01)"
    made = atoll("run", "-d", "--name", "busy", "-n", "1", "--", sys.executable, "-c", busy)
    assert made.returncode == 0, made.stderr
    until(lambda: any(float(row["value"]) > 0 for row in rows(atoll, "busy", "machine/cpu")))
    used = {row["name"]: float(row["value"]) for row in rows(atoll, "busy")}
    assert used["machine/memory"] > 100_000
    assert used["machine/processes"] == 1
    assert atoll("rm", "-f", "busy").returncode == 0


def test_trainings_are_sorted_by_what_they_reported(atoll: Any) -> None:
    for name, loss in (("worse", 2.5), ("better", 0.5)):
        (atoll.cwd / "once.py").write_text(f"import atoll; atoll.report(step=1, loss={loss})")
        done = atoll("run", "--name", name, "--", sys.executable, "once.py")
        assert done.returncode == 0, done.stderr
        until(lambda name=name: rows(atoll, name, "loss"))  # type: ignore[misc]
    listed = atoll.json("ps", "--sort", "loss")
    named = [each["name"] for each in listed]  # other tests leave trainings here, too
    assert [name for name in named if name in ("better", "worse")] == ["better", "worse"]
    assert listed[0]["metrics"]["loss"]["value"] == 0.5
    table = atoll("ps", "--sort", "-loss").stdout.splitlines()
    assert "LOSS" in table[0]
    assert [line.split()[0] for line in table[1:3]] == ["worse", "better"]
    refused = atoll("ps", "--sort", "nothing")
    assert refused.returncode == 2
    assert "'nothing' is not valid: no training has reported it" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert atoll("rm", "-f", "worse", "better").returncode == 0
