"""What an image runs by default, as the image runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import atoll

SOURCE = str(Path(atoll.__file__).parents[1])
MODULE = """
import json, os, sys
def work(rank, world_size, rendezvous_uri, lr):
    print(json.dumps([rank, world_size, rendezvous_uri, lr, os.environ["ATOLL_RENDEZVOUS_URI"]]))
def fail(): raise KeyError("no such layer")
if __name__ == "__main__":
    print(json.dumps([os.environ["RANK"], os.environ["WORLD_SIZE"], sys.argv[1:]]))
"""
PLACE = {"REPLICA_RANK": "1", "WORLD_SIZE": "2", "RENDEZVOUS_URI": "s3://b/run"}


def run(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.py").write_text(MODULE)
    return subprocess.run(
        [sys.executable, "-m", "atoll.replica_entrypoint", *words],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": SOURCE, **env},
        capture_output=True,
        text=True,
    )


def test_a_function_gets_its_arguments_and_its_place(tmp_path: Path) -> None:
    done = run(tmp_path, **PLACE, ENTRYPOINT="job:work", ATOLL_ENTRYPOINT_ARGS='{"lr": 0.1}')
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0]) == [1, 2, "s3://b/run", 0.1, "s3://b/run"]


@pytest.mark.parametrize("entry", ["job", "./job.py", "job.py"])
def test_a_module_or_a_script_gets_words(tmp_path: Path, entry: str) -> None:
    env = {"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2"}
    done = run(tmp_path, **env, ENTRYPOINT=entry, ATOLL_ENTRYPOINT_ARGS='{"lr": 0.1, "t": ["a"]}')
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["1", "2", ["--lr", "0.1", "--t", '["a"]']]


def test_a_failure_is_the_replicas(tmp_path: Path) -> None:
    errors = tmp_path / "error.json"
    done = run(tmp_path, **PLACE, ENTRYPOINT="job:fail", TORCHELASTIC_ERROR_FILE=str(errors))
    assert done.returncode == 1
    assert "KeyError: 'no such layer'" in done.stderr
    assert "no such layer" in errors.read_text()


def test_what_the_module_itself_lacks_is_its_own_failure(tmp_path: Path) -> None:
    (tmp_path / "lacking.py").write_text("import missing_package")
    for entry in ("lacking", "lacking:work"):
        done = run(tmp_path, **PLACE, ENTRYPOINT=entry)
        assert done.returncode == 1
        assert "No module named 'missing_package'" in done.stderr


@pytest.mark.parametrize(
    ("env", "word"),
    [
        ({}, "ENTRYPOINT is not set"),
        ({"ENTRYPOINT": "no such thing"}, "expected module:function"),
        ({"ENTRYPOINT": "missing.py"}, "no such file"),
        ({"ENTRYPOINT": "missing"}, "no such module"),
        ({"ENTRYPOINT": "missing.deep:work"}, "no such module"),
        ({"ENTRYPOINT": "job.work"}, "no such module here; expected module:function"),
        ({"ENTRYPOINT": "job:missing"}, "job has no function 'missing'"),
        ({"ENTRYPOINT": "job:sys"}, "job has no function 'sys'"),
        ({"ENTRYPOINT": "job", "REPLICA_RANK": "2"}, "expected below WORLD_SIZE, which is 2"),
        ({"ENTRYPOINT": "job", "ATOLL_ENTRYPOINT_ARGS": "{"}, "expected JSON"),
        ({"ENTRYPOINT": "job", "ATOLL_ENTRYPOINT_ARGS": "[1]"}, "expected an object"),
        ({"ENTRYPOINT": "job", "REPLICA_RANK": "one"}, "REPLICA_RANK"),
        ({"ENTRYPOINT": "job", "REPLICA_RANK": ""}, "REPLICA_RANK is not set"),
        ({"ENTRYPOINT": "job", "WORLD_SIZE": ""}, "WORLD_SIZE is not set"),
    ],
)
def test_bad_settings_are_one_line(tmp_path: Path, env: dict[str, str], word: str) -> None:
    errors = tmp_path / "error.json"
    done = run(tmp_path, **(PLACE | env), TORCHELASTIC_ERROR_FILE=str(errors))
    assert done.returncode == 2
    assert word in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert word in errors.read_text(), "the record of its end takes the reason from there"


@pytest.mark.parametrize(
    "entry",
    ["atoll.replica_entrypoint", "composer_replication.diloco.serverless.replica_entrypoint"],
)
def test_named_as_the_entrypoint_it_calls_the_trainer(tmp_path: Path, entry: str) -> None:
    args = {"trainer_module": "job", "trainer_fn": "work", "trainer_kwargs": {"lr": 0.1}}
    done = run(tmp_path, **PLACE, ENTRYPOINT=entry, ATOLL_ENTRYPOINT_ARGS=json.dumps(args))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])[:4] == [1, 2, "s3://b/run", 0.1]
    lost = run(tmp_path, **PLACE, ENTRYPOINT=entry)
    assert lost.returncode == 2
    assert f"ENTRYPOINT is {entry}, and trainer_module: None: expected the name" in lost.stderr


def test_composers_flags_say_the_same(tmp_path: Path) -> None:
    flags = ["--rendezvous", "s3://b/flags", "--world-size", "4", "--trainer-module", "job"]
    kwargs = ["--trainer-fn", "work", "--trainer-kwargs-json", '{"lr": 0.2}']
    done = run(tmp_path, *flags, *kwargs, REPLICA_RANK="3")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])[:4] == [3, 4, "s3://b/flags", 0.2]
    assert run(tmp_path, "--world-size", "4", REPLICA_RANK="3").returncode == 2
