"""Names, labels and settings of a training, as people give them."""

from __future__ import annotations

from typing import Any

import pytest

from atoll.core.model import decode, encode
from atoll.core.settings import dns_label, merge_settings, parse_flags, parse_value
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Status, Training


def training(**changes: Any) -> Training:
    size = WorldSize(min=1, target=1, max=1)
    status = changes.pop("status", Status())
    fields = {"name": "t", "command": ["python", "train.py"], **changes}
    return Training(
        namespace="n", uid="u", spec=TrainingSpec(world_size=size, **fields), status=status
    )


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ("train", "train"),
        ("train-lr0.1", "train-lr0-1"),
        ("My Run_2", "my-run-2"),
        ("a" * 63, "a" * 63),
        ("run+", "run"),
    ],
)
def test_a_name_becomes_a_dns_label(given: str, label: str) -> None:
    assert dns_label(given) == label
    assert dns_label(label) == label


def test_names_that_differ_in_other_characters_or_at_their_end_stay_apart() -> None:
    names = ["run-α", "run-β", "a" * 64, "a" * 65]
    labels = [dns_label(name) for name in names]
    assert len(set(labels)) == len(names)
    assert all(len(label) <= 63 for label in labels)


def test_a_spec_has_the_label_as_its_name_and_shows_the_name_as_given() -> None:
    known = training(name="train-lr0.1")
    assert (known.name, known.display_name) == ("train-lr0-1", "train-lr0.1")
    again = decode(encode(known.spec), TrainingSpec)
    assert again == known.spec
    assert training(name="plain").spec.display_name is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("1e-3", 0.001),
        ("0.1", 0.1),
        ("true", True),
        ("False", False),
        ("adam", "adam"),
        ("nan", "nan"),
        ("1_000", "1_000"),
        ("", ""),
        ("9" * 40, 1e40),
    ],
)
def test_values_are_numbers_where_they_look_like_it(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert (type(parsed), parsed) == (type(value), pytest.approx(value))


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        ("python train.py --lr 0.1 --width=64 --fast", {"lr": 0.1, "width": 64, "fast": True}),
        ("python train.py --fast --lr -0.5", {"fast": True, "lr": -0.5}),
        ("torchrun --nproc-per-node 2 train.py --lr 1", {"lr": 1}),
        ("python -m pkg.train --lr 1", {"lr": 1}),
        ("./train --lr 1 in.txt", {"lr": 1}),
        ("python -c print() --lr 1", {}),
        ("train.sh --lr 1 -- --width 2", {"lr": 1}),
        ("train.py -v data.csv", {}),
        ("train.py --fast -v 3 --lr -1e-4 --in -", {"fast": True, "lr": -1e-4, "in": "-"}),
    ],
)
def test_flags_of_a_command_are_settings(command: str, settings: dict[str, object]) -> None:
    assert parse_flags(command.split()) == settings


def test_what_a_rank_reported_counts_before_what_was_given_and_that_before_flags() -> None:
    command = ["train.py", "--lr", "1", "--batch-size", "8", "--seed", "0"]
    settings = merge_settings(command, {"lr": 2, "seed": 5}, {"lr": 3, "batch_size": 16})
    assert settings == {"lr": 3, "batch-size": 16, "seed": 5}


def test_a_training_has_its_settings_before_and_after_its_first_status() -> None:
    command = ["python", "train.py", "--lr", "0.1"]
    assert training(command=command).settings == {"lr": 0.1}
    observed = Status(settings={"lr": 0.2, "depth": 3})
    assert training(command=command, status=observed).settings == {"lr": 0.2, "depth": 3}
    source = {"kind": "script", "content": b"x"}
    from atoll.core.spec import Source

    script = training(command=None, source=Source(**source), args=["--lr", "3"])  # type: ignore[arg-type]
    assert script.settings == {"lr": 3}
