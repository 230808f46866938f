"""A store over HTTP that refuses, breaks off or forgets its conditions; real sockets, no moto."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from atoll.core.errors import Denied, Permanent, Temporary
from atoll.objectstore import ObjectStore

DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
BODY = bytes(range(251)) * 40_000  # 10 MB


class Server:
    """Answers every request with `answer(handler)`; counts them."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.answer: Callable[[BaseHTTPRequestHandler], None] = lambda handler: None
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                server.requests.append(self.command)
                server.answer(self)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

            def log_message(self, *_: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._http.server_port
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.port}")
    yield server
    server.close()


def reply(handler: BaseHTTPRequestHandler, status: int, body: bytes = b"", **headers: str) -> None:
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.send_header("content-length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("verb", ["put", "create", "get", "list", "delete"])
def test_a_refused_key_is_final_and_names_the_bucket_and_what_to_check(
    server: Server, verb: str, status: int
) -> None:
    server.answer = lambda handler: reply(handler, status, DENIED)
    store = ObjectStore.open("s3://a-bucket/run", patience_s=60)
    request = {
        "put": lambda: store.put("k", b"1"),
        "create": lambda: store.create("k", b"1"),
        "get": lambda: store.get("k"),
        "list": lambda: store.list("k"),
        "delete": lambda: store.delete(["k"]),
    }[verb]
    began = time.monotonic()
    with pytest.raises(Denied) as raised:
        request()
    assert isinstance(raised.value, Permanent)
    assert time.monotonic() - began < 30
    assert len(server.requests) == 1
    assert "s3://a-bucket/run: the store refused access" in str(raised.value)
    assert "check the key, and that it may read, write, list and delete" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_download_that_breaks_off_goes_on_behind_its_last_byte(server: Server) -> None:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        found = re.fullmatch(r"bytes=([0-9]+)-([0-9]*)", handler.headers.get("range", "bytes=0-"))
        assert found is not None
        start, end = int(found[1]), min(int(found[2] or len(BODY)) + 1, len(BODY))
        handler.send_response(206 if "range" in handler.headers else 200)
        handler.send_header("content-range", f"bytes {start}-{end - 1}/{len(BODY)}")
        handler.send_header("content-length", str(end - start))
        handler.send_header("last-modified", "Wed, 21 Oct 2015 07:28:00 GMT")
        handler.send_header("etag", '"1"')
        handler.end_headers()
        handler.wfile.write(BODY[start : min(end, start + 3_000_000)])
        handler.wfile.flush()
        if end - start > 3_000_000:
            handler.connection.close()
            handler.close_connection = True

    server.answer = answer
    # No patience at all: what makes progress is not timed out.
    store = ObjectStore.open("s3://bucket/run", patience_s=0)
    assert bytes(store.get("k")) == BODY
    assert bytes(store.get("k", 5, 9_000_000)) == BODY[5:9_000_000]
    assert store.traffic.bytes_down == len(BODY) + 9_000_000 - 5
    assert len(server.requests) >= 7


def test_a_store_that_fails_is_asked_again_and_then_given_up(server: Server) -> None:
    answers = iter([503, 500, 200])
    server.answer = lambda handler: reply(handler, next(answers), b"", etag='"1"')
    store = ObjectStore.open("s3://bucket/run", patience_s=30)
    store.put("k", b"123")
    assert (store.traffic.requests, store.traffic.bytes_up) == (3, 9)
    server.answer = lambda handler: reply(handler, 503)
    with pytest.raises(Temporary, match="no answer for 0.2 s"):
        ObjectStore.open("s3://bucket/run", patience_s=0.2).put("k", b"1")


def test_a_store_that_ignores_the_condition_is_refused(server: Server) -> None:
    gone = b"<DeleteResult><Deleted><Key>run/x</Key></Deleted></DeleteResult>"
    server.answer = lambda handler: reply(handler, 200, gone, etag="1")
    with pytest.raises(Permanent, match="s3://bucket/run: the store ignores conditional writes"):
        ObjectStore.open("s3://bucket/run").require_conditional_writes("x")


def test_a_refused_condition_is_an_answer(server: Server) -> None:
    server.answer = lambda handler: reply(handler, 412)
    assert not ObjectStore.open("s3://bucket/run").create("k", b"1")
    assert server.requests == ["PUT"]
