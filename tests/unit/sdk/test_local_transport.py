"""httpx2 over the socket of the user's own control plane."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import httpx2
import pytest

from atoll.backends.local.state import listen_locally
from atoll.core.errors import Permanent
from atoll.sdk.local_http import Unreachable
from atoll.sdk.local_transport import LocalTransport
from tests.support.foreign_listener import listening_in, needs_root


def get(directory: Path) -> str:
    async def requested() -> str:
        transport = LocalTransport(directory, httpx2.Limits())
        async with httpx2.AsyncClient(transport=transport, trust_env=False) as client:
            answer = await client.get("http://localhost/", headers={"Authorization": "Bearer t"})
            return answer.text

    return asyncio.run(requested())


def test_a_request_goes_through_the_socket_and_nothing_stays_open(tmp_path: Path) -> None:
    directory = tmp_path / ("d" * 200)
    directory.mkdir()
    files = os.listdir("/proc/self/fd")
    with listen_locally(directory, 5) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

        thread = threading.Thread(target=serve)
        thread.start()
        assert get(directory) == "ok"
        thread.join(30)
    assert os.listdir("/proc/self/fd") == files


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=f"{tmp_path}/socket: No such file or directory"):
        get(tmp_path)
    with pytest.raises(Unreachable, match=f"{tmp_path}/none/socket: No such file or directory"):
        get(tmp_path / "none")
    listen_locally(tmp_path, 5).close()
    with pytest.raises(Unreachable, match=f"{tmp_path}/socket: Connection refused"):
        get(tmp_path)


@needs_root
def test_a_listener_of_another_user_is_sent_nothing(tmp_path: Path) -> None:
    with listening_in(tmp_path) as listener:
        with pytest.raises(Permanent, match="served by the user with id 65534, not by you"):
            get(tmp_path)
        assert listener.communicate()[0] == b"received \n"
