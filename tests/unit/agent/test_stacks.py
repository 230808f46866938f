"""Reasons why a process has no stacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from atoll.agent.stacks import SIGNAL, take

# Its dump is interrupted in the middle, as by the scheduler of a machine with too much to do.
INTERRUPTED = f"""
import ctypes, os, time
file = os.memfd_create("atoll-stacks")
def dump(number):
    os.write(file, b"Current thread 0x1 (most recent call first):\\n")
    time.sleep(0.2)
    os.write(file, b'  File "train.py", line 6 in hang\\n')
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(dump)
ctypes.CDLL(None).signal({int(SIGNAL)}, handler)
print(flush=True)
while True:
    time.sleep(1000)
"""


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


def test_a_dump_that_is_interrupted_is_read_to_its_end() -> None:
    with subprocess.Popen([sys.executable, "-I", "-c", INTERRUPTED], stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (dump,) = take(child.pid)
        frames = [frame["function"] for thread in dump["threads"] for frame in thread["frames"]]
        child.kill()
    assert frames == ["hang"]
