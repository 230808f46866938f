"""What tests read of a process: no line is left behind in a buffer."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.support.finish import finish

SCRIPT = "import sys\nsys.stdout.write('1\\n2\\n3\\n')\nsys.stderr.write('a\\nb\\n')"


def test_lines_that_came_together_with_one_that_was_read_are_in_the_rest() -> None:
    words = [sys.executable, "-c", SCRIPT]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "1\n"
        assert finish(process, 60) == ("2\n3\n", "a\nb\n")


def test_one_that_does_not_end_is_killed() -> None:
    words = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            finish(process, 0.2)
    assert process.returncode == -9
