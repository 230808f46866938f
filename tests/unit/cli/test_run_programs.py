"""Names that are made from commands, and scripts that run with the caller's Python."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.cli.main import app
from atoll.cli.run import generate_name, misplaced, program
from atoll.core.checks import check_name
from atoll.core.errors import ValidationError


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
        ("torchrun --nproc-per-node 2 train.py", "train"),
        ("torchrun --nproc-per-node 2 -m pkg.train --lr 3", "pkg-train"),
        ("torchrun --nproc-per-node 2", "torchrun"),
        ("accelerate launch --num_processes 2 sft.py", "sft"),
        ("nice -n 5 ./train", "train"),
        ("uv run train.py", "train"),
        ("sleep 60", "sleep"),
        ("./bin/fit --config a.py", "fit"),
    ],
)
def test_a_name_says_what_is_run(command: str, stem: str) -> None:
    assert re.fullmatch(rf"{re.escape(stem)}-[a-z2-9]{{5}}", generate_name(command.split()))


@settings(max_examples=50)
@given(st.lists(st.text(max_size=80), max_size=5))
def test_whatever_is_run_the_name_is_a_dns_label(command: list[str]) -> None:
    check_name("name", generate_name(command))


def test_two_runs_of_one_command_have_two_names() -> None:
    assert len({generate_name(["true"]) for _ in range(10)}) == 10


def test_a_python_script_runs_with_the_callers_python(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    assert program([str(script), "--lr"], {}) == [sys.executable, str(script), "--lr"]
    assert program(["train.py"], {"working_dir": tmp_path}) == [sys.executable, "train.py"]
    assert program(["train.py"], {"executor": "eu"}) == ["python", "train.py"]
    assert program(["python", "train.py"], {}) == ["python", "train.py"]
    module = program(["pkg.train", "--lr"], {}, is_module=True)
    assert module == [sys.executable, "-m", "pkg.train", "--lr"]
    assert generate_name(module).startswith("pkg-train-")
    assert program(["m"], {"executor": "eu"}, is_module=True) == ["python", "-m", "m"]


def test_a_python_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=f"'trian.py'.*there is none at {tmp_path}/trian.py"):
        program(["trian.py"], {"working_dir": tmp_path})


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("run train.py -n 2", "-n goes to train.py"),
        ("run train.py --lr 3 --uri=s3://b/r", "--uri=s3://b/r goes to train.py"),
        ("run -n 2 train.py --lr 3", ""),
        ("run -- train.py -n 2", ""),
        ("run python train.py -n 2", ""),
    ],
)
def test_options_behind_a_script_are_told_of(typed: str, said: str) -> None:
    words = typed.split()
    at = next(at for at, word in enumerate(words) if word in ("train.py", "python"))
    assert misplaced(words[at:], words).startswith(said)
    assert bool(misplaced(words[at:], words)) == bool(said)


def test_what_cannot_be_run_here_is_refused_here_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").touch()
    (tmp_path / "go").touch(mode=0o755)
    for word in (".", "./notes", "x.ipynb", str(tmp_path), "python -m x", "A=1", "a && b"):
        with pytest.raises(ValidationError, match="expected a"):
            program([word], {"working_dir": tmp_path})
        assert program([word], {"executor": "eu"}) == [word]
    (tmp_path / "my program").touch(mode=0o755)
    for word in ("./go", "notes", "./not-there", "my program"):
        assert program([word], {"working_dir": tmp_path}) == [word]


def test_help_is_a_command_too() -> None:
    for words, said in ((["help"], "Commands:"), (["help", "run"], "Usage: atoll run")):
        done = CliRunner().invoke(app, words, prog_name="atoll")
        assert (done.exit_code, said in done.output) == (0, True)
