"""The socket of a control plane: found in directories of any length, and only of the same user."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from pathlib import Path

import pytest

from atoll.backends.local.state import connect_locally, listen_locally, peer_uid
from atoll.core.errors import Permanent
from tests.support.foreign_listener import listening_in, needs_root


def test_directories_of_any_length(tmp_path: Path) -> None:
    directory = tmp_path.joinpath(*["a-long-name-of-a-directory"] * 20)
    directory.mkdir(parents=True)
    with listen_locally(directory, 5) as listening:
        assert stat.S_IMODE((directory / "socket").stat().st_mode) == 0o600
        with connect_locally(directory, 5) as ours, listening.accept()[0] as theirs:
            ours.sendall(b"hello")
            assert theirs.recv(10) == b"hello"
            assert peer_uid(ours) == peer_uid(theirs) == os.geteuid()


@pytest.mark.parametrize("left", ["socket", "file"])
def test_what_a_killed_one_has_left_is_replaced(tmp_path: Path, left: str) -> None:
    if left == "socket":
        listen_locally(tmp_path, 5).close()
    else:
        (tmp_path / "socket").write_text("rubbish")
    with pytest.raises(ConnectionRefusedError):
        connect_locally(tmp_path, 5)
    with listen_locally(tmp_path, 5), connect_locally(tmp_path, 5):
        pass


def test_where_no_socket_can_be_made_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "socket").mkdir()
    with pytest.raises(Permanent, match=f"cannot listen on {tmp_path}/socket: "):
        listen_locally(tmp_path, 5)


@needs_root
def test_a_listener_of_another_user_is_sent_nothing(tmp_path: Path) -> None:
    with listening_in(tmp_path) as process:
        with pytest.raises(Permanent, match="served by the user with id 65534, not by you"):
            connect_locally(tmp_path, 5)
        assert process.communicate()[0] == b"received \n"


def test_a_connection_that_is_refused_leaves_nothing_open(tmp_path: Path) -> None:
    files = os.listdir("/proc/self/fd")
    with pytest.raises(FileNotFoundError):
        connect_locally(tmp_path, 5)
    with contextlib.suppress(FileNotFoundError), socket.socket(socket.AF_UNIX):
        connect_locally(tmp_path / "none", 5)
    assert os.listdir("/proc/self/fd") == files
