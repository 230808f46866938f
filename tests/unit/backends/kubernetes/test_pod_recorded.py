"""The shell words before a rank's command on a cluster, run for real in images of several kinds."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.agent import process
from atoll.agent.process import read_record
from atoll.backends.kubernetes.names import REPORT_DIR
from atoll.backends.kubernetes.render import TERMINATION_LOG, render_recorded

SHELLS = {
    "sh": ["/bin/sh"],
    "bash": ["bash"],
    "busybox": ["busybox", "sh"],
}
SHELLS = {name: words for name, words in SHELLS.items() if shutil.which(words[0])}


class Image:
    """A folder of programs, and the file that the kubelet reads."""

    def __init__(self, folder: Path, shell: list[str]) -> None:
        self.log = folder / "termination-log"
        self.log.touch()
        self.programs = folder / "bin"
        self.programs.mkdir()
        self._shell = [shutil.which(shell[0]) or shell[0], *shell[1:]]

    def add(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run(self, *command: str) -> tuple[int, str]:
        words = render_recorded(list(command), "python")
        script = words[2].replace(TERMINATION_LOG, str(self.log))
        script = script.replace(REPORT_DIR, os.path.dirname(process.__file__))
        done = subprocess.run(
            [*self._shell, "-c", script, *words[3:]],
            env={"PATH": str(self.programs)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout


@pytest.fixture(params=SHELLS)
def image(request: pytest.FixtureRequest, tmp_path: Path) -> Image:
    made = Image(tmp_path, SHELLS[request.param])
    made.add("train", 'printf "%s|" "$@"; exit 7')
    return made


def test_with_python_the_rank_leaves_its_record(image: Image) -> None:
    image.add("python3", f'exec {sys.executable} "$@"')
    assert image.run("train", "a b", "$HOME") == (7, "a b|$HOME|")
    record = read_record(image.log.read_text())
    assert record is not None
    assert (record["code"], record["tail"]) == (7, ["a b|$HOME|"])


PYTHONS = {
    "none": None,
    "too old": "echo 'SyntaxError: invalid syntax' >&2; exit 1",
    "broken": "echo 'Fatal Python error: init_fs_encoding' >&2; kill -ABRT $$",
}


@pytest.mark.parametrize("python", PYTHONS)
def test_without_a_fit_python_the_command_runs_exactly_as_given(image: Image, python: str) -> None:
    if (text := PYTHONS[python]) is not None:
        image.add("python3", text)
    code, out = image.run("train", "a b", "$HOME")
    assert (code, out.splitlines()[-1]) == (7, "a b|$HOME|")
    assert image.log.read_text() == ""  # so that the kubelet falls back on the log


@pytest.mark.parametrize("has_python", [True, False])
@pytest.mark.parametrize("name", ["trian", "/no/such 'file\" %s\\n"])
def test_a_command_that_is_not_there_is_told_as_such(
    image: Image, name: str, *, has_python: bool
) -> None:
    if has_python:
        image.add("python3", f'exec {sys.executable} "$@"')
    code, out = image.run(name)
    assert code == 127
    assert "atoll: " in out
    record = read_record(image.log.read_text())
    assert record is not None
    assert (record["code"], record["reason"]) == (127, "CommandNotFound")
    assert record["message"].startswith(name)
