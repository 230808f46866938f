"""The request for one attempt, against golden files and SageMaker's own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.backends.sagemaker.model import check_request
from atoll.backends.sagemaker.options import InputChannel, SageMakerOptions
from atoll.backends.sagemaker.render import NAMES, job_name, read_name, render_job
from atoll.core.spec import RendezvousSpec, Resources, TrainingSpec, WorldSize
from atoll.core.status import Training

GOLDEN = Path(__file__).parents[3] / "golden" / "sagemaker"
ROLE = "arn:aws:iam::123456789012:role/trainer"
UID = "0123456789abcdef0123456789abcdef"


def training(**fields: Any) -> Training:
    spec = TrainingSpec(
        name="tiny-gpt",
        command=["python", "train.py"],
        world_size=WorldSize(min=1, target=4, max=8),
        **fields,
    )
    return Training(namespace="default", uid=UID, spec=spec)


CASES = {
    "plain": (training(), SageMakerOptions(role=ROLE, store="s3://runs/here", image="train:1")),
    "everything": (
        training(
            image="other:2",
            resources=Resources(gpu_count=8, gpu_models=["H100"]),
            rendezvous=RendezvousSpec(uri="s3://runs/run42"),
            deadline_s=3600.5,
        ),
        SageMakerOptions(
            role=ROLE,
            kms_key="alias/key",
            volume_gb=500,
            output="s3://runs/out",
            subnets=["subnet-1", "subnet-2"],
            security_groups=["sg-1"],
            is_spot=True,
            max_wait_s=172_800,
            checkpoints="s3://runs/checkpoints/",
            tags={"team": "research"},
            channels={"train": InputChannel(uri="s3://data/train", mode="FastFile")},
            env={"NCCL_DEBUG": "INFO"},
            install="atoll[store]",
        ),
    ),
    "warm": (
        training(),
        SageMakerOptions(role=ROLE, store="s3://runs/x", image="i", warm_pool_s=900),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_of_sagemaker(name: str, request: pytest.FixtureRequest) -> None:
    asked, options = CASES[name]
    made = render_job(asked, (3, 1), options, region="eu-west-1")
    text = json.dumps(made, indent=2) + "\n"
    file = GOLDEN / f"{name}.json"
    if request.config.getoption("--update-golden", default=False):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), "run pytest --update-golden, and read it"
    check_request("CreateTrainingJob", made, NAMES)
    assert "RetryStrategy" not in made


def test_names_are_keys_that_can_be_read_back_and_fit() -> None:
    key = (9999, 1_000_000)
    name = job_name(UID, key, 99)
    assert len(name) <= 63
    assert read_name(name, UID) == (key, 99)
    assert read_name(job_name(UID, (3, 0)), UID) == ((3, 0), 0)
    for other in ("atoll-x-r1-a0", f"my-{name}", f"{name}-x", job_name("f" * 32, key)):
        assert read_name(other, UID) is None
    assert read_name(job_name("ab-cd", (0, 0)), "ab-cd") == ((0, 0), 0)
