"""Names that are made from commands."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cli.options import generated
from atoll.core.checks import check_name


@pytest.mark.parametrize(
    ("command", "stem"),
    [
        ("python train.py --lr 3", "train"),
        ("python3.11 -u scripts/train_gpt2.py", "train-gpt2"),
        ("python -m nanogpt.train", "nanogpt-train"),
        ("torchrun --nproc-per-node=4 My_Model.py", "my-model"),
        ("/usr/bin/env FOO=1 python eval.py", "eval"),
        ("./run.sh", "run"),
        ("nvidia-smi", "nvidia-smi"),
        ("python -c pass", "python"),
        ("bash -c true", "bash"),
        ("true", "true"),
    ],
)
def test_a_name_says_what_is_run(command: str, stem: str) -> None:
    assert re.fullmatch(rf"{re.escape(stem)}-[a-z2-9]{{5}}", generated(command.split()))


@settings(max_examples=50)
@given(st.lists(st.text(max_size=80), max_size=5))
def test_whatever_is_run_the_name_is_a_dns_label(command: list[str]) -> None:
    check_name("name", generated(command))


def test_two_runs_of_one_command_have_two_names() -> None:
    assert len({generated(["true"]) for _ in range(100)}) == 100
