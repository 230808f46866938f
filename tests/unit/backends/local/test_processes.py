"""A child is ended whether or not it has made a group of its own yet."""

from __future__ import annotations

import signal
import subprocess

import pytest

from atoll.backends.local import processes


@pytest.mark.parametrize("leads", [True, False])
def test_a_child_is_ended_before_and_after_it_leads_a_group(leads: bool) -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=leads) as child:
        processes.kill_leader(child.pid, signal.SIGTERM)
        assert child.wait(60) == -signal.SIGTERM


def test_the_whole_group_is_ended() -> None:
    command = "sleep 600 & echo $!; wait"
    with subprocess.Popen(
        ["sh", "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        processes.kill_leader(child.pid, signal.SIGKILL)
        assert child.stdout.read() == "", "nobody is left who could write"
