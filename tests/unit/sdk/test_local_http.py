"""The small HTTP client against a server that answers with given bytes."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.backends.local.state import listen_locally
from atoll.sdk.local_http import Broken, LocalClient, Unreachable

TIMEOUT = (5.0, 5.0, 5.0, None)
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@contextmanager
def answering(*scripts: list[bytes]) -> Iterator[tuple[LocalClient, list[bytes]]]:
    """One script a connection: an answer for each request, then the connection is closed."""
    heads: list[bytes] = []
    with tempfile.TemporaryDirectory() as place, listen_locally(Path(place), 5) as listener:

        def serve() -> None:
            for script in scripts:
                connection, _ = listener.accept()
                with connection:
                    for answer in script:
                        heads.append(connection.recv(65536))
                        connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        client = LocalClient(Path(place), {"Authorization": "Bearer t"})
        yield client, heads
        client.close()
        thread.join(60)


def get(client: LocalClient, url: str = "/a", **params: object) -> tuple[int, bytes]:
    with client.stream("GET", url, params=params, timeout=TIMEOUT) as answer:
        return answer.status_code, answer.read()


def test_a_request_is_written_as_the_server_reads_it() -> None:
    with answering([OK]) as (client, heads):
        assert get(client, "/v1/a b", rank=[1, 2], follow=True, name="ü&") == (200, b"ok")
    lines = heads[0].decode().split("\r\n")
    assert lines[0] == "GET /v1/a%20b?rank=1&rank=2&follow=true&name=%C3%BC%26 HTTP/1.1"
    assert "Authorization: Bearer t" in lines
    assert lines[-2:] == ["", ""]


def test_a_connection_is_used_again_and_left_when_the_server_closed_it() -> None:
    closing = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with answering([OK, closing], [OK]) as (client, heads):
        assert [get(client) for _ in range(3)] == [(200, b"ok")] * 3
    assert len(heads) == 3


def test_an_answer_in_chunks_is_read_as_it_comes() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with answering([head + b"2\r\nab\r\n3;x=y\r\ncde\r\n0\r\n\r\n", OK]) as (client, _):
        with client.stream("GET", "/", params={}, timeout=TIMEOUT) as answer:
            assert b"".join(answer.iter_bytes()) == b"abcde"
        assert get(client) == (200, b"ok")


@pytest.mark.parametrize(
    "bytes_sent",
    [
        b"",
        b"HTTP/1.1 200",
        b"SSH-2.0 hello\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\n\r\nno length",
    ],
)
def test_what_is_no_whole_answer_is_an_error(bytes_sent: bytes) -> None:
    with answering([bytes_sent]) as (client, _), pytest.raises(Broken):
        get(client)


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(Unreachable, match=f"{tmp_path}/socket: No such file"):
        get(LocalClient(tmp_path, {}))
    listen_locally(tmp_path, 5).close()  # as one that was killed leaves it
    with pytest.raises(Unreachable, match=f"{tmp_path}/socket: Connection refused"):
        get(LocalClient(tmp_path, {}))


def test_a_line_break_in_a_header_is_not_sent(tmp_path: Path) -> None:
    client = LocalClient(tmp_path, {"Authorization": "Bearer a\r\nb: c"})
    with pytest.raises(Broken):
        get(client)
