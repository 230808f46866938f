"""Connections that only take: half open, slow, silent, or many. Others are served meanwhile."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import atoll
from atoll.sdk.endpoint import read_token
from atoll.server.http.server import Limits

from .conftest import Served

HEAD = b"GET /v1/trainings HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer token-one\r\n"
POST = b"POST /v1/trainings HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer token-one\r\n"

Serve = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    with contextlib.ExitStack() as opened:

        def begin(**limits: Any) -> Served:
            served = Served(tmp_path, limits=Limits(**limits))
            opened.callback(served.close)
            return served

        yield begin


@contextlib.contextmanager
def connected(url: str, count: int = 1) -> Iterator[list[socket.socket]]:
    host, _, port = url.removeprefix("http://").partition(":")
    with contextlib.ExitStack() as opened:
        yield [
            opened.enter_context(socket.create_connection((host, int(port)), timeout=30))
            for _ in range(count)
        ]


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes it."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(2**16):
            received += piece
    return received


def test_a_head_that_does_not_come_is_not_waited_for(serve: Serve) -> None:
    served = serve(head_s=0.3)
    with connected(served.url, 3) as (silent, begun, again):
        begun.sendall(HEAD)
        again.sendall(HEAD + b"\r\n")
        assert b"200 OK" in again.recv(2**16)
        again.sendall(b"GET /v1/tr")
        assert rest(silent) == b""
        assert rest(begun).startswith(b"HTTP/1.1 408 ")
        assert b"HTTP/1.1 408 " in rest(again)


def test_a_head_without_end_is_refused(serve: Serve) -> None:
    with connected(serve().url) as (connection,):
        with contextlib.suppress(ConnectionError):
            for number in range(100):
                connection.sendall(b"X-%d: " % number + b"a" * 10_000 + b"\r\n" if number else HEAD)
        assert b" 431 " in rest(connection)[:40]


@pytest.mark.parametrize("path", [b"POST /v1/trainings", b"GET /healthz"])
def test_a_body_that_does_not_come_is_not_waited_for(serve: Serve, path: bytes) -> None:
    served = serve(body_s=0.3, body_rate=1e9)
    with connected(served.url) as (connection,):
        head = HEAD.replace(b"GET /v1/trainings", path)
        connection.sendall(head + b'Content-Length: 100000\r\n\r\n{"name":')
        received = rest(connection)
        expected = b"200 OK" if b"healthz" in path else b"408 Request Timeout"
        assert received.startswith(b"HTTP/1.1 " + expected)


def test_strangers_make_room_for_strangers_and_those_with_a_token_stay(serve: Serve) -> None:
    served = serve(connections=64, unauthenticated=8, per_namespace=40)
    served.create("a")
    with contextlib.ExitStack() as opened:
        (watch,) = opened.enter_context(connected(served.url))
        watch.sendall(HEAD.replace(b"trainings", b"trainings/a?watch") + b"\r\n")
        received = b""
        while b"heartbeat" not in received:
            received += watch.recv(2**16)
        for stranger in opened.enter_context(connected(served.url, 100))[:50]:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(b"GET / HT")
        served.wait_for(lambda: len(served.server.limiter.open) <= 8 + 3)
        assert served.http.get("/v1/trainings/a").status_code == 200
        with served.client("two") as late:
            assert late.get("/v1/trainings").status_code == 200
        served.see("a", "ready", 2)
        received = b""
        while b"event: changed" not in received:
            piece = watch.recv(2**16)
            assert piece, "the watch was closed"
            received += piece


def test_one_namespace_cannot_take_every_connection(serve: Serve) -> None:
    served = serve(connections=64, unauthenticated=8, per_namespace=10)
    with contextlib.ExitStack() as opened:
        answers = []
        for _ in range(12):
            (connection,) = opened.enter_context(connected(served.url))
            connection.sendall(HEAD + b"\r\n")
            answers.append(connection.recv(2**16))
            if b"503" in answers[-1]:
                answers[-1] += connection.recv(2**16)
        assert [b"200 OK" in answer for answer in answers] == [True] * 10 + [False] * 2
        assert b"HTTP/1.1 503 " in answers[-1]
        assert b"'one' has 10 connections" in answers[-1]
        with served.client("two") as other:
            assert other.get("/v1/trainings").status_code == 200
    served.wait_for(lambda: served.server.limiter.authenticated["one"] == 0)
    assert served.http.get("/v1/trainings").status_code == 200


def test_an_answer_that_nobody_reads_is_given_up(serve: Serve) -> None:
    served = serve(write_timeout_s=0.3)
    for name in "abcd":
        served.create(name, args=["x" * 900_000])
    with connected(served.url) as (deaf,):
        deaf.sendall((HEAD.replace(b"trainings", b"trainings?limit=2") + b"\r\n") * 20)
        served.wait_for(
            lambda: served.server.limiter.authenticated["one"] == 2
        )  # this one, and the test's
        served.wait_for(lambda: served.server.limiter.authenticated["one"] == 1)


def test_a_stranger_is_not_kept_for_long_after_its_answer(serve: Serve) -> None:
    served = serve(unauthenticated_idle_s=0.3)
    with connected(served.url) as (connection,):
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n")
        assert b"200 OK" in rest(connection)


FILES = 256


def test_half_open_connections_do_not_take_the_server_down_when_files_are_few(
    tmp_path: Path,
) -> None:
    def few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, FILES))

    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "atoll.cli", "serve", "--port", "0"]
        server = subprocess.Popen(
            [*command, "--state-dir", str(tmp_path / "state")],
            stdout=subprocess.PIPE,
            stderr=log,
            preexec_fn=few_files,
        )
    try:
        assert server.stdout is not None
        url = json.loads(server.stdout.readline())["url"]
        with connected(url, 150) as silent, connected(url, 150):
            for connection in silent:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(b"GET / HTTP/1.1\r\n")
            with atoll.Client(url, read_token(tmp_path / "state")) as client:
                for number in range(20):
                    client.deploy_distributed(f"t{number}", command=["true"], world_size=1)
                assert client.get("t1").result(60) is None
        soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        assert (soft, hard) == (FILES, FILES)
        assert server.poll() is None
        assert (tmp_path / "log").stat().st_size < 20_000
    finally:
        with atoll.Client(url, read_token(tmp_path / "state")) as client:
            for training in client.list():
                training.delete()
        server.terminate()
        server.wait(30)
        server.stdout.close()


@pytest.mark.soak
def test_a_flood_of_a_minute_is_sat_out(serve: Serve) -> None:
    """Strangers come as fast as they can, with half a request each; one client works on."""
    served = serve(connections=200, unauthenticated=50, per_namespace=100)
    ends_at = time.monotonic() + 60
    served_in_time = 0
    while time.monotonic() < ends_at:
        with connected(served.url, 300) as unauthenticated:
            for stranger in unauthenticated:
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(b"GET / HTTP/1.1\r\nX: ")
            with served.client("one") as http:
                assert http.get("/v1/trainings").status_code == 200
                served_in_time += 1
    assert served_in_time > 10
