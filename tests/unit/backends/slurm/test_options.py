"""What is refused before anything is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.backends.slurm.options import SlurmOptions
from atoll.core.config import options_of
from atoll.core.errors import ValidationError
from atoll.core.spec import (
    BenchSpec,
    ProviderFilter,
    RendezvousSpec,
    Resources,
    TrainingSpec,
    WorldSize,
)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"partition": "a b"}, "partition"),
        ({"account": "x; rm"}, "account"),
        ({"qos": ""}, "qos"),
        ({"constraint": "a\n#SBATCH"}, "constraint"),
        ({"reservation": "$HOME"}, "reservation"),
        ({"time": "2 days"}, "time"),
        ({"folder": "relative/path"}, "folder"),
        ({"folder": "/with space"}, "folder"),
        ({"sbatch": ["exclusive"]}, "sbatch[0]"),
        ({"sbatch": ["--exclusive", "--array=1-5"]}, "sbatch[1]"),
        ({"sbatch": ["--requeue"]}, "sbatch[0]"),
        ({"sbatch": ["--clusters=other"]}, "sbatch[0]"),
        ({"sbatch": ["--partition=x"]}, "sbatch[0]"),
        ({"sbatch": ["--mem=1\n#SBATCH --array=9"]}, "sbatch[0]"),
        ({"prologue": ["a\nb"]}, "prologue[0]"),
        ({"container": "docker"}, "container"),
        ({"container_mounts": ["/a:/a"]}, "container_mounts"),
        ({"heartbeat_timeout_s": 0.1}, "heartbeat_timeout_s"),
        ({"array_size": 0}, "array_size"),
        ({"partiton": "main"}, "partiton"),
    ],
)
def test_options_that_sbatch_would_not_take(options: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        options_of(SlurmOptions, options)
    assert refused.value.field == field


def spec(**more: Any) -> TrainingSpec:
    world = WorldSize(min=1, target=2, max=2)
    return TrainingSpec(**{"name": "t", "world_size": world, "command": ["true"], **more})


@pytest.mark.parametrize(
    ("more", "options", "field"),
    [
        ({"image": "x"}, {}, "image"),
        ({}, {"container": "pyxis"}, "image"),
        ({"rendezvous": RendezvousSpec(backend="etcd-v2")}, {}, "rendezvous_backend"),
        ({"mesh": True}, {}, "mesh"),
        ({"bench": BenchSpec(mode="on-start", require_gbps=1.0)}, {}, "bench_require_gbps"),
        ({"provider_filter": ProviderFilter(exclude=["aws"])}, {}, "provider_filter"),
        ({"topology_spread": "pack"}, {}, "topology_spread"),
        ({"resources": Resources(gpu_count=1, min_gpu_memory_gb=40)}, {}, "min_gpu_memory_gb"),
        ({"resources": Resources(gpu_count=1, gpu_models=["A100", "H100"])}, {}, "gpu_models"),
        ({"resources": Resources(gpu_count=1)}, {"gres": "gpu:2"}, "gpu_count"),
        ({"env": {"SLURM_NTASKS": "1"}}, {}, "env.SLURM_NTASKS"),
    ],
)
def test_trainings_that_slurm_will_never_run(
    more: dict[str, Any], options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ValidationError) as refused:
        SlurmOptions(**options).check(spec(**more))
    assert refused.value.field == field


@pytest.mark.parametrize("time", ["90", "12:00", "12:00:00", "2-0", "2-12:30:00", "UNLIMITED"])
def test_times_as_sbatch_has_them(time: str) -> None:
    assert SlurmOptions(time=time).time == time


def test_everything_else_is_taken() -> None:
    SlurmOptions(gres="nvme:1").check(spec(resources=Resources(gpu_count=8, gpu_models=["H100"])))


def test_a_choice_that_there_is_not_is_told_with_those_there_are() -> None:
    with pytest.raises(ValidationError, match="'docker'.*expected one of 'pyxis', 'apptainer'"):
        options_of(SlurmOptions, {"container": "docker"})
