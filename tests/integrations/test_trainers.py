"""Two replicas in processes of their own, through `file://`, with the real libraries.

Run by `make integrations`, in an environment that has them. Imports take most of the time, so two
processes train all cases one after another, and the tests look at what came out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PACKAGES = ("transformers", "accelerate", "datasets", "trl", "peft", "lightning")
IS_ASKED = bool(os.environ.get("ATOLL_INTEGRATIONS"))  # then a package that is missing fails
MISSING = [name for name in PACKAGES if find_spec(name) is None]

pytestmark = [
    pytest.mark.skipif(
        bool(MISSING) and not IS_ASKED,
        reason=f"`make integrations` runs it: no {', '.join(MISSING)} here",
    ),
    pytest.mark.timeout(600),
]

# Those that train alike with every library: same parameters, and data that differs.
ALIKE = {
    "plain": 4,
    "accumulation": 4,
    "workers": 2,
    "autocast": 2,
    "compiled": 2,
    "rounds": 2,
    "odd_end": 3,
    "resumed": 4,
    "sft": 2,
    "adapter": 2,
    "grpo": 2,
    "lightning": 4,
    "lightning_accumulation": 4,
    "lightning_autocast": 2,
    "lightning_files": 2,
}
OTHERS = ("raises",)


def start(
    folder: Path, rank: int, *cases: str, command: Sequence[str] = ()
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command, str(HERE / "replica.py"), str(folder), *cases],
        env={
            **os.environ,
            "ATOLL_RANK": str(rank),
            "ATOLL_WORLD_MAX": "2",
            "ATOLL_REPORTS": f"file://{folder}/reports",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes: subprocess.Popen[str]) -> list[str]:
    words = [process.communicate(timeout=500)[0] for process in processes]
    for process, said in zip(processes, words, strict=True):
        assert process.returncode == 0, said[-4000:]
    return words


def read(folder: Path, case: str) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{case}.{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    finish(*(start(folder, rank, *ALIKE, *OTHERS) for rank in (0, 1)))
    return folder


@pytest.mark.parametrize("case", ALIKE)
def test_replicas_end_with_the_same_parameters(trained: Path, case: str) -> None:
    one, two = read(trained, case)
    assert one["digest"] == two["digest"]
    assert one["round"] == two["round"] == ALIKE[case]
    assert all(members == [0, 1] for members in one["manifests"])


@pytest.mark.parametrize("case", ["plain", "accumulation", "resumed", "grpo", "lightning"])
def test_each_replica_reads_its_own_data(trained: Path, case: str) -> None:
    one, two = (set(each["read"]) for each in read(trained, case))
    assert one
    assert two
    assert not one & two


def test_a_training_that_goes_on_reads_what_was_not_read(trained: Path) -> None:
    for each in read(trained, "resumed"):
        # A Trainer fetches one batch ahead, which was not trained on.
        assert not set(each["first"]["read"][:-4]) & set(each["read"])
        assert each["step"] == 20
        assert each["rates"] == read(trained, "plain")[0]["rates"]


def test_replicas_do_not_write_into_each_other_s_folder(trained: Path) -> None:
    for out in (trained / "resumed/shared", trained / "resumed/shared/replica-1"):
        assert (out / "checkpoint-10").is_dir()
    files = trained / "lightning_files"
    for root in (files, files / "replica-1"):
        assert len(list(root.glob("lightning_logs/version_*/checkpoints/*.ckpt"))) == 1
        assert len(list(root.glob("lightning_logs/version_*/metrics.csv"))) == 1


def test_what_a_trainer_logs_is_a_metric_of_its_rank(trained: Path) -> None:
    steps: dict[tuple[int, str], set[int]] = {}
    for file in (trained / "reports").iterdir():
        for batch in map(json.loads, file.read_text().splitlines()):
            for name, points in batch["metrics"].items():
                steps.setdefault((batch["rank"], name), set()).update(p[1] for p in points)
    for rank in (0, 1):
        assert {1, 2, 20} <= steps[rank, "loss"]
        assert 20 in steps[rank, "learning_rate"]
        assert 10 in steps[rank, "train/loss"]
        assert steps[rank, "reward"], "of TRL's trainers, too"


def test_a_training_that_raises_leaves_the_run_to_the_others(trained: Path) -> None:
    one, two = read(trained, "raises")
    assert two["error"] == "at step 7"
    assert one["step"] == 20
    assert one["manifests"] == [[0, 1], [0], [0], [0]]


def test_a_killed_replica_goes_on_with_the_step_and_the_rate_of_the_run(tmp_path: Path) -> None:
    steady, victim = start(tmp_path, 0, "killed"), start(tmp_path, 1, "killed")
    victim.communicate(timeout=500)
    assert victim.returncode == -9
    finish(steady, start(tmp_path, 1, "killed"))
    one, two = read(tmp_path, "killed")
    assert one["step"] == two["step"] == 60
    assert one["digest"] == two["digest"]
    assert [0, 1] in two["manifests"]
    assert min(map(int, two["rates"])) > 5
    assert min(two["losses"]) > min(one["losses"]) / 2  # the mean of its own steps
    # The step in which a replica that was behind came up to the run was made with its rate before.
    steady_on = [at for at in two["rates"] if str(int(at) - 1) in two["rates"]]
    assert len(steady_on) > 10
    assert [one["rates"][at] for at in steady_on] == [two["rates"][at] for at in steady_on]
    # The rounds have no sample twice, and what they have was read by its rank.
    used = {int(rank): set(samples) for rank, samples in one["used"].items()}
    assert len(used[0]) + len(used[1]) == one["count"] == len(used[0] | used[1])
    assert used[0] <= set(one["read"])
    assert used[1] - set(two["read"]) <= set(map(int, (tmp_path / "first").read_text().split()))


def test_a_replica_may_be_many_processes_of_torchrun(tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    many, one = start(tmp_path, 0, "plain", command=torchrun), start(tmp_path, 1, "plain")
    finish(many, one)
    names = ("plain.0.0", "plain.0.1", "plain.1")
    ends = [json.loads((tmp_path / f"{name}.json").read_text()) for name in names]
    assert len({end["digest"] for end in ends}) == 1
    assert [end["round"] for end in ends] == [4, 4, 4]
    # A Trainer fetches one batch ahead, and pads none here.
    assert sum(len(end["read"]) for end in ends) == len({at for end in ends for at in end["read"]})


def test_the_example_for_accelerate_trains_two_replicas(tmp_path: Path) -> None:
    example = HERE.parents[1] / "examples" / "diloco_accelerate.py"
    env = {"ATOLL_WORLD_MAX": "2", "ATOLL_RENDEZVOUS_URI": f"file://{tmp_path}"}
    both = [
        subprocess.Popen(
            [sys.executable, str(example)],
            env={**os.environ, **env, "ATOLL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in (0, 1)
    ]
    ends = [said.splitlines()[-1].partition(" after ")[2] for said in finish(*both)]
    assert ends[0].startswith("12 rounds")
    assert ends[0] == ends[1]
