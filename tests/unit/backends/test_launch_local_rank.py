"""`LOCAL_RANK` is a device that the rank can see, and cores are shared, on every backend."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll.agent.records import Due
from atoll.backends.kubernetes.render import render_job
from atoll.backends.local.executor import render_desired
from atoll.backends.local.rank_process import environment_of
from atoll.backends.modal.executor import ModalBackend
from atoll.backends.modal.options import ModalOptions
from atoll.backends.recorded import RecordedBackend
from atoll.backends.sagemaker.executor import SageMakerBackend
from atoll.backends.sagemaker.options import SageMakerOptions
from atoll.backends.slurm.executor import SlurmBackend
from atoll.backends.slurm.options import SlurmOptions
from atoll.core.spec import RendezvousSpec, Resources, WorldSize
from atoll.core.status import DesiredState, Training
from tests.unit.backends.kubernetes.kube import Options, training

LOOKED_AT = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"),
)
MACHINE = 4  # GPUs of a host
HELD = {0: ["4"], 1: ["5"], 2: ["6"]}

WRAPPER = """
import json, os, sys
from atoll.agent.wrapper import Folder, RankAttempt, environment_for
launch, rank, size = json.loads(sys.argv[1])
attempt = RankAttempt(Folder(""), rank, 0, "host")
attempt.desired = {"size": size}
env = environment_for(attempt, launch, {}, {})
print(json.dumps({os.fsdecode(name): os.fsdecode(value) for name, value in env.items()}))
"""

Env = dict[str, str | None]


def world(ranks: int, **spec: Any) -> Training:
    return training(world_size=WorldSize(min=ranks, target=ranks, max=ranks), **spec)


def local_env(one: Training, rank: int, outer: dict[str, str]) -> dict[str, str]:
    size = one.spec.world_size.target
    document = render_desired(
        one,
        DesiredState(version=1, size=size),
        directory=Path("/state/uid"),
        host="here",
        rendezvous={},
        base=outer,
        devices=HELD if one.spec.resources.gpu_count else None,
        machine_devices=MACHINE,
    )
    # As the supervisor reads it: keys of JSON are strings.
    held = {str(rank): devices for rank, devices in document.get("devices", {}).items()}
    due = Due(rank=rank, attempt=0, restarts=0, after=None, delay_s=0.0)
    return environment_of(Path("/state/uid"), document | {"devices": held}, due)


def kubernetes_env(one: Training, rank: int, outer: dict[str, str]) -> dict[str, str]:
    size = one.spec.world_size.target
    job = render_job(one, DesiredState(version=1, size=size), Options())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    env = dict(outer)
    for row in container["env"]:
        is_size = "configMapKeyRef" in row.get("valueFrom", {})
        env[row["name"]] = row.get("value", str(size if is_size else rank))
    return env


def recorded_env(
    backend: RecordedBackend, one: Training, rank: int, outer: dict[str, str]
) -> dict[str, str]:
    """Of a rank whose wrapper is a process with the environment `outer`."""
    facts = [backend.launch(one), rank, one.spec.world_size.target]
    done = subprocess.run(
        [sys.executable, "-c", WRAPPER, json.dumps(facts)],
        env=outer,
        capture_output=True,
        check=True,
    )
    env: dict[str, str] = json.loads(done.stdout)
    return env


def rank_env(backend: str, one: Training, rank: int, outer: dict[str, str] | None = None) -> Env:
    """What a rank finds, of the names that matter here; `outer` is what its host has set."""
    outer = outer or {}
    match backend:
        case "local":
            env = local_env(one, rank, outer)
        case "kubernetes":
            env = kubernetes_env(one, rank, outer)
        case "slurm":
            env = recorded_env(SlurmBackend(SlurmOptions(), Path("/shared")), one, rank, outer)
        case "modal":
            modal = ModalBackend(ModalOptions(store="s3://bucket/runs"))
            env = recorded_env(modal, one, rank, outer)
        case _:
            options = SageMakerOptions(store="s3://bucket/runs", role="arn:aws:iam::1:role/r")
            jobs: Any = object()  # nothing is asked of it
            env = recorded_env(SageMakerBackend(options, jobs=jobs), one, rank, outer)
    return {name: env.get(name) for name in LOOKED_AT}


CLOUDS = ("kubernetes", "slurm", "modal", "sagemaker")
BACKENDS = ("local", *CLOUDS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_with_gpus_of_its_own_finds_the_first_of_them(backend: str) -> None:
    one = world(3, resources=Resources(gpu_count=1))
    # Elsewhere it is the scheduler that sets the variable, in the container or the job.
    seen = {} if backend == "local" else {"CUDA_VISIBLE_DEVICES": "6"}
    assert rank_env(backend, one, 2, seen) == {
        "RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "CUDA_VISIBLE_DEVICES": "6",
        "OMP_NUM_THREADS": "1" if backend == "local" else None,
    }


@pytest.mark.parametrize("backend", CLOUDS)
def test_a_rank_with_a_host_of_its_own_has_all_of_it(backend: str) -> None:
    assert rank_env(backend, world(8), 7) == {
        "RANK": "7",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "CUDA_VISIBLE_DEVICES": None,
        "OMP_NUM_THREADS": None,
    }


@pytest.mark.parametrize(
    ("ranks", "visible", "local_ranks", "local_world"),
    [
        (3, None, ["0", "1", "2"], "3"),  # all four of the machine
        (6, None, ["0", "1", "2", "3", "0", "1"], "4"),
        (3, "5", ["0", "0", "0"], "1"),
        (3, "5,7", ["0", "1", "0"], "2"),
        (3, "", ["0", "1", "2"], "3"),  # none: ranks are counted as ever
        (1, None, ["0"], "1"),
    ],
)
def test_ranks_that_share_the_gpus_of_a_machine_are_counted_through(
    ranks: int, visible: str | None, local_ranks: list[str], local_world: str
) -> None:
    for by_user in (True, False):
        own = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        one = world(ranks, env=own if by_user else {})
        envs = [rank_env("local", one, rank, {} if by_user else own) for rank in range(ranks)]
        assert [env["LOCAL_RANK"] for env in envs] == local_ranks
        assert {env["LOCAL_WORLD_SIZE"] for env in envs} == {local_world}
        assert {env["CUDA_VISIBLE_DEVICES"] for env in envs} == {visible}
        assert [env["RANK"] for env in envs] == [str(rank) for rank in range(ranks)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_are_what_somebody_has_said(backend: str) -> None:
    threads = {"OMP_NUM_THREADS": "3"}
    assert rank_env(backend, world(2, env=threads), 1)["OMP_NUM_THREADS"] == "3"
    assert rank_env(backend, world(2), 1, threads)["OMP_NUM_THREADS"] == "3"
    assert rank_env(backend, world(1), 0)["OMP_NUM_THREADS"] is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_a_rendezvous_a_rank_is_no_process_of_a_world(backend: str) -> None:
    one = world(2, rendezvous=RendezvousSpec(backend="none"))
    seen = {} if backend == "kubernetes" else {"LOCAL_RANK": "5", "LOCAL_WORLD_SIZE": "9"}
    env = rank_env(backend, one, 1, seen)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        assert env[name] is None, name


def test_threads_of_a_rank_that_is_left_alone_are_not_limited_for_ever() -> None:
    # The document of a gang is rendered from the one before, with the environment in it.
    rest: dict[str, Any] = {"directory": Path("/state/uid"), "host": "here", "rendezvous": {}}
    two = render_desired(world(2), DesiredState(version=1, size=2), base={}, **rest)
    one = render_desired(world(1), DesiredState(version=2, size=1), base=two["env"], **rest)
    due = Due(rank=0, attempt=1, restarts=0, after=None, delay_s=0.0)
    assert environment_of(Path("/state/uid"), two, due)["OMP_NUM_THREADS"] == "1"
    assert "OMP_NUM_THREADS" not in environment_of(Path("/state/uid"), one, due)
