"""The job of one attempt, against golden files. `pytest --update-golden` writes them anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atoll.backends.hfjobs.options import HFJobsOptions
from atoll.backends.hfjobs.render import render_job
from atoll.core.errors import ValidationError
from atoll.core.spec import RendezvousSpec, TrainingSpec, WorldSize
from atoll.core.status import Training

GOLDEN = Path(__file__).parents[3] / "golden" / "hfjobs"
SPEC = TrainingSpec(
    name="t",
    command=["true"],
    world_size=WorldSize(min=1, target=2, max=2),
    rendezvous=RendezvousSpec(uri="s3://bucket/run"),
)
TRAINING = Training(namespace="default", uid="0123456789abcdef0123456789abcdef", spec=SPEC)
CASES = {
    "plain": HFJobsOptions(image="train:1"),
    "everything": HFJobsOptions(
        image="train:1",
        store="s3://bucket/all",
        python="python3.12",
        namespace="lab",
        flavor="cpu-xl",
        env={"A": "1"},
        secrets=["B", "A_KEY"],
        max_runtime_s=3600,
    ),  # fmt: skip
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_for(name: str, pytestconfig: pytest.Config) -> None:
    rendered = json.dumps(render_job(TRAINING, (1, 2), CASES[name]), indent=2) + "\n"
    path = GOLDEN / f"{name}.json"
    if pytestconfig.getoption("--update-golden"):
        path.write_text(rendered)
    assert rendered == path.read_text()


def test_a_training_without_an_image_is_refused() -> None:
    with pytest.raises(ValidationError, match="image"):
        HFJobsOptions().check(SPEC)
