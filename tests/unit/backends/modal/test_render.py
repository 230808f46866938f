"""The sandbox of one attempt, against golden files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from atoll.backends.modal.options import MAX_LIFETIME_S, ModalOptions
from atoll.backends.modal.render import WRAPPER, planned_lifetime_s, render_sandbox
from atoll.core.spec import RendezvousSpec, Resources, TrainingSpec, WorldSize
from atoll.core.status import Training

TRAINING = Training(
    namespace="default",
    uid="0123456789abcdef0123456789abcdef",
    spec=TrainingSpec(
        name="t",
        command=["true"],
        world_size=WorldSize(min=1, target=2, max=2),
        rendezvous=RendezvousSpec(uri="s3://bucket/run"),
        resources=Resources(cpu="1500m", memory="2Gi", gpu_count=2, gpu_models=["H100"]),
    ),
)


GOLDEN = Path(__file__).parents[3] / "golden" / "modal"
CASES = {
    "plain": (
        replace(TRAINING, spec=replace(TRAINING.spec, resources=Resources())),
        ModalOptions(),
    ),
    "everything": (
        replace(TRAINING, spec=replace(TRAINING.spec, image="other:2")),
        ModalOptions(
            store="s3://bucket/all", image="train:1", python="python3.12", lifetime_s=7200, cpu=2.0
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_asked_for(name: str, pytestconfig: pytest.Config) -> None:
    training, options = CASES[name]
    made = render_sandbox(training, (1, 2), options)
    rendered = json.dumps(made, indent=2) + "\n"
    path = GOLDEN / f"{name}.json"
    if pytestconfig.getoption("--update-golden"):
        path.write_text(rendered)
    assert rendered == path.read_text()


RECORDS = "s3://bucket/atoll-ranks/0123456789abcdef0123456789abcdef/records"


def test_a_sandbox_is_named_after_its_attempt_and_lives_as_long_as_modal_lets_it() -> None:
    made = render_sandbox(TRAINING, (1, 3), ModalOptions(image="img:1", store="s3://bucket"))
    assert made["name"] == "0123456789abcdef0123456789abcdef-r1-a3"
    assert made["tags"] == {
        "atoll-uid": TRAINING.uid,
        "atoll-rank": "1",
        "atoll-attempt": "3",
    }
    assert made["image"] == "img:1"
    assert made["command"] == ["python3", "-c", WRAPPER, RECORDS, "1", "3"]
    assert (made["gpu"], made["cpu"], made["memory"]) == ("H100:2", 1.5, 2048)
    assert made["timeout"] == MAX_LIFETIME_S, "the client's own default is 300 s"


def test_the_longest_name_fits() -> None:
    made = render_sandbox(TRAINING, (9_999, 1_000_000), ModalOptions(store="s3://b"))
    assert len(made["name"]) <= 64


def test_a_rank_makes_room_before_its_sandbox_ends() -> None:
    assert planned_lifetime_s(ModalOptions(), 10.0) == MAX_LIFETIME_S - 70
    assert planned_lifetime_s(ModalOptions(lifetime_s=100), 3600.0) == 50
