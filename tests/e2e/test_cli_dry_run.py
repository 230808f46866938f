"""`atoll run --dry-run`: what would be submitted, of each kind of executor, and nothing done."""

from __future__ import annotations

import json

import pytest

from .conftest import Shell

CONFIG = """
[executors.lab]
kind = "slurm"
partition = "gpu"
[executors.eu]
kind = "kubernetes"
image = "train:1"
namespace = "mine"
[executors.cloud]
kind = "modal"
gpu = "H100"
store = "s3://my-bucket/runs"
[executors.aws]
kind = "sagemaker"
role = "arn:aws:iam::123456789012:role/trainer"
image = "train:1"
store = "s3://my-bucket/runs"
"""


@pytest.fixture
def shell(lone_atoll: Shell) -> Shell:
    lone_atoll.configure(CONFIG)
    return lone_atoll


def test_what_would_be_submitted_is_printed_and_nothing_is_done(shell: Shell) -> None:
    printed = {}
    for name in ("lab", "eu", "cloud", "aws"):
        done = shell("run", "--dry-run", "--executor", name, "-n", "2", "--", "python", "t.py")
        assert (done.returncode, done.stderr) == (0, ""), name
        printed[name] = done.stdout
    assert "#SBATCH --array=0-1\n" in printed["lab"]
    assert "#SBATCH --partition=gpu\n" in printed["lab"]
    objects = json.loads(printed["eu"])["items"]
    assert [item["kind"] for item in objects] == ["ConfigMap", "Service", "Job"]
    assert {item["metadata"]["namespace"] for item in objects} == {"mine"}
    assert [box["tags"]["atoll-rank"] for box in json.loads(printed["cloud"])] == ["0", "1"]
    jobs = json.loads(printed["aws"])
    assert [job["AlgorithmSpecification"]["TrainingImage"] for job in jobs] == ["train:1"] * 2
    assert not (shell.cwd / "state").exists()
    assert list(shell.cwd.iterdir()) == []


def test_what_is_not_honoured_is_told_beside_it(shell: Shell) -> None:
    asked = {
        "lab": ('bench = "on-start"', "bench on-start: links are not measured under Slurm"),
        "cloud": ('topology_spread = "pack"', "topology_spread pack: Modal places sandboxes"),
        "aws": ('topology_spread = "pack"', "topology_spread pack: each rank is a job"),
        "eu": ("min_gpu_memory_gb = 40", "min_gpu_memory_gb 40: gpu_count is 0"),
    }
    for name, (default, said) in asked.items():
        shell.configure(f"{CONFIG}[defaults]\n{default}\n")
        done = shell("run", "--dry-run", "--executor", name, "--", "true")
        assert done.returncode == 0, done.stderr
        assert done.stderr.startswith(f"atoll: {name} does not support {said}")
        assert len(done.stderr.splitlines()) == 1
        assert done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--executor", "local"], "--dry-run: 'local' submits nothing"),
        ([], "--dry-run: 'local' submits nothing"),
        (["--executor", "nope"], "'nope' is not valid: expected one of local, lab"),
        (["--executor", "cloud", "--gpus", "9"], "at most 8"),
    ],
)
def test_what_cannot_be_shown_is_one_line(shell: Shell, words: list[str], said: str) -> None:
    done = shell("run", "--dry-run", *words, "--", "true")
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_wrong_option_names_file_and_table(shell: Shell) -> None:
    toml = shell.toml
    toml.write_text(toml.read_text().replace("train:1", "").replace('"gpu"', "7"))
    done = shell("run", "--dry-run", "--executor", "lab", "--", "true")
    assert done.returncode == 2
    assert f"{toml}: executors.lab.partition: 7" in done.stderr
