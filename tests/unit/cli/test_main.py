"""The help of all commands, and `python -m atoll`."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from atoll.cli.main import COMMANDS, app


@pytest.mark.parametrize(
    "group", [[], *([name] for name in COMMANDS if name in ("token", "k8s", "weights"))], ids=str
)
def test_the_list_of_commands_has_whole_sentences(group: list[str]) -> None:
    done = CliRunner().invoke(app, [*group, "--help"], terminal_width=80)
    assert done.exit_code == 0
    assert "Commands:" in done.output
    assert "..." not in done.output.partition("Commands:")[2]


def test_python_m_atoll_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "atoll", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("atoll ")


def test_a_number_that_is_none_is_refused_with_its_bounds() -> None:
    from atoll.cli.main import expected_number

    assert expected_number(click.IntRange(1, 9)) == "expected a whole number from 1 to 9"
    assert expected_number(click.FloatRange(min=0)) == "expected a number of at least 0"
    assert expected_number(click.INT) == "expected a whole number"
