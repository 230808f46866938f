"""`atoll sweep` as a user runs it: a grid, early stops, a resume, Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any

from .conftest import until

SCRIPT = """
import argparse, os, time, atoll
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--width", type=int, default=1)
args = parser.parse_args()
with open(os.environ["MARKS"], "a") as marks:
    marks.write(f"{args.lr}/{args.width}\\n")
for step in range(3):
    atoll.report(step=step, loss=args.lr * args.width / (step + 1))
if args.lr == 9:
    raise SystemExit("no such lr")
while args.lr == 7 and not os.path.exists(os.environ["MARKS"] + ".go"):
    atoll.report(step=1000, loss=70.0)
    time.sleep(0.1)
"""


def sweep(atoll: Any, *arguments: str) -> Any:
    (atoll.cwd / "train.py").write_text(SCRIPT)
    marks = atoll.cwd / "marks"
    return atoll("sweep", "-e", f"MARKS={marks}", *arguments, "train.py")


def runs(atoll: Any) -> list[str]:
    marks = atoll.cwd / "marks"
    return sorted(marks.read_text().splitlines()) if marks.exists() else []


def test_a_sweep_tries_all_prints_a_table_and_resumes(atoll: Any) -> None:
    options = ("--name", "grid", "-j", "2", "--set", "lr=0.1,9", "--set", "width=1,2")
    done = sweep(atoll, *options)
    assert done.returncode == 1, done.stderr  # those with 9 failed
    head, *rows, why = done.stdout.splitlines()
    assert why.startswith("grid-lr9-width1 and 1 more failed: rank 0 failed first: it exited")
    assert "grid-lr9-width2 failed: rank 0 failed first" in done.stderr
    assert head.split()[-3:] == ["LR", "WIDTH", "LOSS"]
    assert [row.split()[:2] for row in rows] == [
        ["grid-lr0.1-width1", "succeeded"],
        ["grid-lr0.1-width2", "succeeded"],
        ["grid-lr9-width1", "failed"],
        ["grid-lr9-width2", "failed"],
    ]
    assert rows[0].split()[-3:] == ["0.1", "1", "0.0333333"]
    assert runs(atoll) == ["0.1/1", "0.1/2", "9.0/1", "9.0/2"]
    again = sweep(atoll, *options, "--json")
    assert again.returncode == 1
    items = {each["name"]: each for each in json.loads(again.stdout)["items"]}
    assert items["grid-lr0.1-width2"]["settings"] == {"lr": 0.1, "width": 2}
    assert items["grid-lr0.1-width2"]["metrics"]["loss"]["max"] == 0.2
    assert runs(atoll) == ["0.1/1", "0.1/2", "9.0/1", "9.0/1", "9.0/2", "9.0/2"]
    listed = [row.split()[0] for row in atoll("ps").stdout.splitlines()[1:]]
    assert listed.count("grid") == 1
    assert "grid-lr9-width1" not in listed
    other = sweep(atoll, "--name", "grid", "--set", "lr=0.1", "--set", "width=1", "--env", "A=b")
    assert other.returncode == 0  # the same command: nothing is run again
    assert len(runs(atoll)) == 6


def test_a_training_is_stopped_early_and_stays_so(atoll: Any) -> None:
    options = ("--name", "early", "--set", "lr=0.5,7", "--stop-when", "loss>5@1000")
    done = sweep(atoll, *options)
    assert done.returncode == 0, done.stderr
    assert "early-lr7: stopped early: loss>5@1000: it was 70 at step 1000" in done.stdout
    assert runs(atoll).count("7.0/1") == 1
    again = sweep(atoll, *options)
    assert again.returncode == 0, again.stderr
    assert runs(atoll).count("7.0/1") == 1


def test_a_rule_for_a_metric_that_nobody_reported_is_named(atoll: Any) -> None:
    done = sweep(atoll, "--name", "typo", "--set", "lr=0.1", "--stop-when", "lss>5")
    assert done.returncode == 0, done.stderr
    assert "--stop-when lss>5: no training reported 'lss'; they reported loss" in done.stderr


def test_ctrl_c_cancels_what_runs_and_the_same_command_goes_on(lone_atoll: Any) -> None:
    atoll = lone_atoll
    (atoll.cwd / "train.py").write_text(SCRIPT)
    marks = atoll.cwd / "marks"
    options = ["sweep", "-e", f"MARKS={marks}", "-j", "1", "--set", "lr=7,0.25", "train.py"]
    command = [sys.executable, "-m", "atoll.cli", *options]
    process = subprocess.Popen(command, cwd=atoll.cwd, env=atoll.env, stderr=subprocess.PIPE)
    until(lambda: runs(atoll).count("7.0/1") == 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"1 of 2 over, 1 not started: the same command continues" in err
    phases = {each["settings"]["lr"]: each["phase"] for each in atoll.json("ps")}
    assert phases == {7: "cancelled"}  # 0.25 was never started
    (atoll.cwd / "marks.go").touch()
    done = atoll(*options)
    assert done.returncode == 0, done.stderr
    assert runs(atoll) == ["0.25/1", "7.0/1", "7.0/1"]


def test_a_dry_run_starts_nothing_and_bad_input_is_named(atoll: Any) -> None:
    shown = sweep(atoll, "--dry-run", "--json", "--name", "dry", "--set", "lr=1,2")
    assert [each["name"] for each in json.loads(shown.stdout)] == ["dry-lr1", "dry-lr2"]
    assert runs(atoll) == []
    for arguments, message in (
        ((), "nothing to vary"),
        (("--set", "lr"), "expected NAME=VALUE"),
        (("--set", "lr=1..2"), "--samples"),
        (("--set", "lr=1", "--stop-when", "loss"), "--stop-when"),
        (("--from", "missing.csv"), "cannot be read"),
    ):
        refused = sweep(atoll, *arguments)
        assert refused.returncode == 2, refused.stderr
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr
