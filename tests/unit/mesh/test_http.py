"""The parser of HTTP responses: the same result however the bytes arrive, and nothing unbounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.mesh.http import MAX_BODY_BYTES, MAX_HEAD_BYTES, ResponseParser, render_request

BODY = b'{"node": {}}\r\n\r\nHTTP/1.1 500 no'
LENGTH = b"HTTP/1.1 200 OK\r\nX-Etcd-Index: 7\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
    + b"%x;note=1\r\n" % len(BODY)
    + BODY
    + b"\r\n0\r\n\r\n"
)
CLOSED = b"HTTP/1.0 200 OK\r\nServer: x\r\n\r\n" + BODY
RESPONSES = {"length": (LENGTH, True), "chunked": (CHUNKED, True), "closed": (CLOSED, False)}


@pytest.mark.parametrize("kind", RESPONSES)
@given(data=st.data())
def test_a_response_is_the_same_however_its_bytes_arrive(kind: str, data: st.DataObject) -> None:
    text, is_reusable = RESPONSES[kind]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(text) - 1))))
    parser, response = ResponseParser(), None
    for first, last in zip([0, *cuts], [*cuts, len(text)], strict=True):
        assert response is None
        response = parser.feed(text[first:last])
    if not is_reusable:
        assert response is None
        response = parser.feed(b"")
    assert response is not None
    assert (response.status, response.body, response.is_reusable) == (200, BODY, is_reusable)
    assert response.headers.get("x-etcd-index", "7") == "7"


@pytest.mark.parametrize("kind", ["length", "chunked"])
def test_a_response_that_breaks_off_is_no_response(kind: str) -> None:
    text, _ = RESPONSES[kind]
    for end in range(len(text)):
        parser = ResponseParser()
        if end:
            assert parser.feed(text[:end]) is None
        with pytest.raises(EOFError):
            parser.feed(b"")


def test_the_status_is_known_before_the_body() -> None:
    parser = ResponseParser()
    assert parser.feed(b"HTTP/1.1 404 Not Found\r\n") is None
    assert parser.status == 404


@pytest.mark.parametrize(
    "text",
    [
        b"SSH-2.0-OpenSSH_9\r\n",
        b"HTTP/1.1 OK\r\n",
        b"HTTP/1.1 20x OK\r\n",
        b"x" * (MAX_HEAD_BYTES + 1),
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * MAX_HEAD_BYTES,
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % (MAX_BODY_BYTES + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nten\r\n",
    ],
)
def test_what_is_not_http_or_has_no_bound_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        ResponseParser().feed(text)


def test_a_request_names_the_host_as_its_address_is_written() -> None:
    request = render_request(("::1", 2379), "PUT", "/v2/keys/a", "value=1", is_last=True)
    head, _, body = request.partition(b"\r\n\r\n")
    assert b"Host: [::1]:2379" in head
    assert b"Content-Length: 7" in head
    assert b"Connection: close" in head
    assert body == b"value=1"
