"""The command lines of what runs beside ranks."""

from __future__ import annotations

import subprocess
import sys

from atoll.backends.companions import agent_command, bench_command, etcd_arguments


def test_no_page_of_a_browser_may_use_the_etcd_of_a_training() -> None:
    arguments = etcd_arguments(
        "/data", listen="http://0.0.0.0:1", advertise="http://e:1", peer="http://p:2",
        origin="http://127.0.0.1:1", hosts=("e", "localhost"),
    )  # fmt: skip
    assert "--cors=http://127.0.0.1:1" in arguments
    assert "--host-whitelist=e,localhost" in arguments


def test_the_programs_of_companions_take_their_command_lines() -> None:
    commands = [
        bench_command(sys.executable, "pair", "nobody:1", limit_s=1.0),
        agent_command(sys.executable, "rank-0@a", "10.0.0.1", etcd="etcd:2379", folder="f"),
    ]
    for command in commands:  # argparse refuses an option that it does not know before it helps
        done = subprocess.run([*command, "--help"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
