"""Port leases among real processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from atoll.backends.local import rendezvous
from atoll.backends.local.rendezvous import lease_port, outside
from atoll.core.errors import Temporary

SRC = Path(__file__).parents[2] / "src"
LEASE_MANY = """
import sys
from atoll.backends.local.rendezvous import lease_port
leases = [lease_port() for _ in range(40)]
print(*[lease.port for lease in leases], flush=True)
sys.stdin.read()
"""


def test_processes_that_lease_at_once_never_share_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    # Few ports, so that they do collide where nothing prevents it.
    code = (
        "import atoll.backends.local.rendezvous as p; p.LOWEST, p.HIGHEST = 15000, 15399\n"
        + LEASE_MANY
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(SRC)},
        )
        for _ in range(6)
    ]
    held: list[str] = []
    for worker in workers:
        assert worker.stdout is not None
        held += worker.stdout.readline().decode().split()
    for worker in workers:
        worker.communicate()
    assert len(held) == 240
    assert len(set(held)) == 240


def only(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setattr(rendezvous, "LOWEST", port)
    monkeypatch.setattr(rendezvous, "HIGHEST", port)


def test_a_leased_port_can_be_bound_by_the_rank_and_by_nobody_else_leased(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lease = lease_port()
    with socket.create_server(("127.0.0.1", lease.port)):
        pass
    only(monkeypatch, lease.port)
    with pytest.raises(Temporary, match=str(lease.port)):
        lease_port()
    lease.release()
    again = lease_port()
    assert again.port == lease.port
    again.release()
    again.release()  # twice is once


def test_a_port_somebody_listens_on_is_not_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    lease = lease_port()
    lease.release()
    only(monkeypatch, lease.port)
    for address in ("127.0.0.1", "0.0.0.0"):
        with socket.create_server((address, lease.port)), pytest.raises(Temporary):
            lease_port()


def test_a_lease_ends_with_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", LEASE_MANY],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(SRC)},
    )
    assert holder.stdout is not None
    port = int(holder.stdout.readline().split()[0])
    only(monkeypatch, port)
    with pytest.raises(Temporary):
        lease_port()
    holder.kill()
    holder.communicate()
    lease = lease_port()
    assert lease.port == port
    lease.release()


def test_a_program_started_afterwards_does_not_keep_the_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lease = lease_port()
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        lease.release()
        only(monkeypatch, lease.port)
        lease_port().release()
        child.kill()


def test_an_address_that_is_not_ours_is_an_error_and_not_a_search() -> None:
    with pytest.raises(OSError, match="assign"):
        lease_port("192.0.2.1")


def test_ports_the_kernel_hands_out_are_left_alone() -> None:
    assert outside((15_010, 60_999), 15_000, 15_020) == list(range(15_000, 15_010))
    assert outside((1, 65_535), 15_000, 15_002) == [15_000, 15_001, 15_002]
