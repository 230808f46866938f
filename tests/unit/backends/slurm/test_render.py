"""What is submitted, byte for byte."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from atoll.backends.slurm.options import SlurmOptions
from atoll.backends.slurm.render import (
    chunks,
    command_env,
    read_job_name,
    render_command,
    render_script,
    task_spans,
)
from atoll.core.spec import Resources, TrainingSpec, WorldSize
from atoll.core.status import Training

GOLDEN = Path(__file__).parents[3] / "golden" / "slurm"
FULL = SlurmOptions(
    partition="gpu",
    account="lab-7",
    qos="high",
    constraint="a100&nvlink",
    reservation="course",
    time="2-00:00:00",
    gres="nvme:1",
    gpu_types={"A100": "a100_80g"},
    sbatch=["--exclusive", "--mail-type=FAIL"],
    prologue=["module load cuda/12.4", "export NCCL_DEBUG=WARN"],
)


def training(**more: object) -> Training:
    spec = TrainingSpec(
        name="t",
        world_size=WorldSize(min=1, target=4, max=8),
        command=["python", "train.py"],
        **more,  # type: ignore[arg-type]
    )
    return Training(namespace="default", uid="0a1b2c", spec=spec)


CASES = {
    "plain": (training(), SlurmOptions(), 0, 0, [0, 1, 2, 3]),
    "full": (
        training(resources=Resources(cpu="7500m", memory="12Gi", gpu_count=2, gpu_models=["A100"])),
        FULL,
        0,
        0,
        [0, 1, 2, 3],
    ),
    "restart": (training(), SlurmOptions(partition="main"), 3, 1000, [0, 2, 3]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_script(name: str, request: pytest.FixtureRequest) -> None:
    each, options, attempt, offset, tasks = CASES[name]
    script = render_script(
        each, options, folder="/shared/atoll/0a1b2c", python="/usr/bin/python3",
        attempt=attempt, offset=offset, tasks=tasks,
    )  # fmt: skip
    path = GOLDEN / f"{name}.sh"
    if request.config.getoption("--update-golden", default=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(script)
    assert path.exists(), f"{path} is missing: run pytest --update-golden, and read it"
    assert script == path.read_text()


@pytest.mark.parametrize(
    ("container", "words"),
    [
        (
            "pyxis",
            "srun --ntasks=1 --export=ALL --container-image=nvcr.io#nvidia/pytorch:25.01 "
            "--container-mounts=/f:/f,/data:/data:ro --container-workdir=/w python t.py",
        ),
        (
            "apptainer",
            "apptainer exec --nv --bind /f:/f --bind /data:/data:ro --pwd /w "
            "nvcr.io#nvidia/pytorch:25.01 python t.py",
        ),
    ],
)
def test_a_command_in_its_container(container: str, words: str) -> None:
    options = SlurmOptions(container=container, container_mounts=["/data:/data:ro"])  # type: ignore[arg-type]
    spec = training(
        image="nvcr.io#nvidia/pytorch:25.01", working_dir="/w", resources=Resources(gpu_count=1)
    ).spec
    assert " ".join(render_command(spec, options, "/f", ["python", "t.py"], "/w")) == words


def test_arrays_hold_at_most_what_the_cluster_takes() -> None:
    assert chunks(range(4), 1000) == {0: [0, 1, 2, 3]}
    assert chunks([999, 1000, 1003, 2001], 1000) == {0: [999], 1000: [0, 3], 2000: [1]}


def test_tasks_in_spans() -> None:
    assert task_spans([5, 0, 1, 2, 7, 8]) == "0-2,5,7-8"


def test_names_of_jobs() -> None:
    assert read_job_name("atoll-0a1b2c-3-1000") == ("0a1b2c", 3, 1000)
    assert read_job_name("atoll-x") is None
    assert read_job_name("my-atoll-0a-1-0") is None


def test_a_folder_of_any_name_gets_the_log(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "$HOME" `x` \\ é'
    script = render_script(
        training(),
        SlurmOptions(),
        folder=str(folder),
        python="echo",
        attempt=0,
        offset=0,
        tasks=[0],
    )
    env = {"PATH": os.defpath, "SLURM_ARRAY_TASK_ID": "3", "SLURMD_NODENAME": "n1", "HOME": "/"}
    subprocess.run(["bash", "-c", script], env=env, check=True)
    (log,) = (folder / "logs" / "3").iterdir()
    assert log.read_text().endswith(f"{folder}/records 3 0 --host n1\n")


def test_what_a_shell_sets_for_slurm_does_not_win_over_the_script() -> None:
    kept = {
        *("PATH", "SLURM_CONF", "SBATCH_ACCOUNT", "SBATCH_EXPORT", "SBATCH_HINT", "SBATCH_QOS"),
        *("SBATCH_MEM_PER_NODE",),
    }
    lost = {
        *("SBATCH_JOB_NAME", "SBATCH_ARRAY_INX", "SBATCH_WAIT", "SBATCH_REQUEUE", "SBATCH_OUTPUT"),
        *("SBATCH_PARTITION", "SBATCH_TIMELIMIT", "SBATCH_CONSTRAINT", "SBATCH_EXCLUSIVE"),
        *("SQUEUE_STATES", "SCANCEL_INTERACTIVE", "ATOLL_TOKEN"),
    }
    options = SlurmOptions(partition="gpu", time="30", sbatch=["--exclusive", "-C a100"])
    script = render_script(
        training(), options, folder="/f", python="python3", attempt=0, offset=0, tasks=[0]
    )
    assert command_env(dict.fromkeys(kept | lost, "x"), script).keys() == kept
    asks = training(resources=Resources(memory="1Gi"))
    script = render_script(
        asks, options, folder="/f", python="python3", attempt=0, offset=0, tasks=[0]
    )
    assert "SBATCH_MEM_PER_NODE" not in command_env(dict.fromkeys(kept, "x"), script)
