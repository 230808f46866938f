"""Ctrl-C before anything has begun, output that cannot be written, no home: one line each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ATOLL, is_alive

INTERRUPTING = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
# Interrupts when the client's part of atoll is imported, which a control plane never does.
INTERRUPTING_CLIENT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "atoll.sdk.training":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.parametrize("module", ["click", "msgspec"])
def test_ctrl_c_while_the_command_is_loaded_is_one_line(
    atoll: Any, tmp_path: Path, module: str
) -> None:
    """The module stands for the moment: importing it interrupts."""
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / f"{module}.py").write_text(INTERRUPTING)
    path = f"{tmp_path / 'first'}:{atoll.env['PYTHONPATH']}"
    done = atoll("run", "--", "true", PYTHONPATH=path)
    assert done.returncode == 130
    assert done.stderr.split("\n") == ["", "atoll: interrupted, nothing was started", ""]


def test_ctrl_c_of_a_detached_run_says_where_to_look(atoll: Any, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(INTERRUPTING_CLIENT)
    path = f"{tmp_path / 'first'}:{atoll.env['PYTHONPATH']}"
    done = atoll("run", "-d", "--", "true", PYTHONPATH=path)
    assert done.returncode == 130
    assert done.stderr.strip() == "atoll: interrupted; 'atoll ps' lists it if it was stored"


def test_a_sigint_that_is_ignored_stays_ignored(atoll: Any) -> None:
    code = "import atoll.cli.start, os, signal; os.kill(os.getpid(), signal.SIGINT); print('on')"
    words = ["sh", "-c", f"trap '' INT; exec {sys.executable} -c \"{code}\""]
    done = subprocess.run(words, env=atoll.env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "on\n")


@pytest.mark.parametrize("words", [("run",), ("run", "--json")])
def test_a_full_disk_while_following_is_one_line(atoll: Any, words: tuple[str, ...]) -> None:
    command = [*ATOLL, *words, "-n", "2", "--", "sh", "-c", "echo words"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, env=atoll.env, cwd=atoll.cwd, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert told == [
        "atoll: the output cannot be written: No space left on device; still following, "
        "Ctrl-C cancels"
    ]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("logs", "full"), ("ps",), ("ps", "--json"), ("doctor",)])
def test_a_full_disk_is_one_line(atoll: Any, words: tuple[str, ...]) -> None:
    assert atoll("run", "--name", "full", "--", "echo", "words").returncode == 0
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*ATOLL, *words], env=atoll.env, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 1
    assert done.stderr == "atoll: error: No space left on device\n"
    assert atoll("rm", "-f", "full").returncode == 0


@pytest.mark.parametrize(
    ("home", "told"),
    [
        (
            "/proc/nobody",
            "cannot keep state in /proc/nobody/.local/state/atoll: No such file or directory; "
            "set ATOLL_STATE_DIR",
        ),
        ("", "there is no home directory to keep state in: set ATOLL_STATE_DIR"),
    ],
)
def test_a_home_that_does_not_exist_is_one_line(lone_atoll: Any, home: str, told: str) -> None:
    env = {name: value for name, value in lone_atoll.env.items() if name != "ATOLL_STATE_DIR"}
    env.pop("XDG_STATE_HOME", None)
    for words in (("run", "--", "true"), ("ps",)):
        done = subprocess.run(
            [*ATOLL, *words], env=env | {"HOME": home}, capture_output=True, text=True
        )
        assert (done.returncode, done.stderr) == (1, f"atoll: error: {told}\n")
    done = lone_atoll("run", "--", "true", HOME=home)
    assert done.returncode == 0, done.stderr
    assert is_alive(lone_atoll.server_pid())
