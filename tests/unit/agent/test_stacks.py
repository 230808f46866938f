"""Reasons why a process has no stacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from atoll.agent.stacks import take


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ((sys.executable, "-I", "-c", "print(flush=True); input()"), "it has just been started"),
        (("sh", "-c", "echo; read line"), "it is no Python with atoll's hook"),
    ],
)
def test_a_python_that_was_just_started_is_not_called_one_without_the_hook(
    command: Sequence[str], reason: str
) -> None:
    with subprocess.Popen(command, stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (dump,) = take(child.pid)
        assert dump["reason"].startswith(reason)
        child.kill()
