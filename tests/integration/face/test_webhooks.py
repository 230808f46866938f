"""Events reach an address that is slow to accept them, over the death of the control plane."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import atoll

from .conftest import Plane, Served, stop, until


class Receiver:
    """An address that answers with `status` and keeps what it was sent."""

    def __init__(self) -> None:
        self.status = 200
        self.messages: list[tuple[dict[str, str], bytes]] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.messages.append(({k.lower(): v for k, v in self.headers.items()}, body))
                self.send_response(receiver.status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/hook"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def reasons(self) -> list[str]:
        return [json.loads(body)["type"] for _, body in self.messages]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    yield found
    found.server.shutdown()
    found.server.server_close()


def is_signed(secret: str, headers: dict[str, str], body: bytes) -> bool:
    content = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = base64.b64encode(hmac.new(key, content, hashlib.sha256).digest()).decode()
    return headers["webhook-signature"] == f"v1,{digest}"


def test_events_wait_until_the_address_accepts_them(where: Path, receiver: Receiver) -> None:
    with atoll.Client() as client:
        made = client.add_webhook(receiver.url, ["Accepted", "Failed"])
        assert made.secret is not None
        receiver.status = 503
        training = client.deploy_distributed("a", command=["false"], world_size=1)
        with pytest.raises(atoll.BelowMinimumWorld):
            training.result(60)
        training.delete()  # what was not delivered outlives its training
        until(lambda: {"Accepted", "Failed"} <= set(receiver.reasons()))
        until(lambda: "503" in client.webhooks()[0].last_error)
        stop(where, signal.SIGKILL)
    receiver.status, receiver.messages = 200, []
    with atoll.Client() as client:
        until(lambda: client.webhooks()[0].delivered == 2)
        (hook,) = client.webhooks()
        assert (hook.waiting, hook.dropped, hook.last_error, hook.secret) == (0, 0, "", None)
        assert sorted(receiver.reasons()) == ["Accepted", "Failed"]
        for headers, body in receiver.messages:
            assert is_signed(made.secret, headers, body)
        (failed,) = [body for _, body in receiver.messages if b'"Failed"' in body]
        assert json.loads(failed)["data"]["training"] == "a"
        client.remove_webhook(made.id)
        assert client.webhooks() == []
        with pytest.raises(atoll.NotFound, match=made.id):
            client.remove_webhook(made.id)


def test_the_command_adds_lists_tests_and_removes(
    plane: Plane, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_URL", plane.url)
    monkeypatch.setenv("ATOLL_TOKEN", plane.token)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "atoll.cli", "webhook", *words]
        return subprocess.run(command, capture_output=True, text=True)

    id, secret = run("add", receiver.url, "-e", "warnings").stdout.split("\nsecret: ")
    assert receiver.url in run("list").stdout
    assert "whsec" not in run("list", "--json").stdout
    tested = run("test", id)
    assert (tested.returncode, tested.stdout.startswith(f"{id}: accepted, 200")) == (0, True)
    headers, body = receiver.messages[-1]
    assert is_signed(secret.strip(), headers, body)
    receiver.status = 302
    tested = run("test", id)
    assert (tested.returncode, tested.stderr) == (1, f"{id}: not accepted: it answered 302\n")
    assert len(receiver.messages) == 2, "no redirect is followed"
    bad = run("add", "ftp://x/")
    assert (bad.returncode, "url" in bad.stderr) == (2, True)
    assert run("rm", id).stdout == f"{id}: removed\n"
    assert run("test", id).returncode == 1


def test_a_namespace_has_its_own_and_a_plane_without_says_so(served: Served) -> None:
    answer = served.http.get("/v1/webhooks")
    assert answer.status_code == 409
    assert "keeps no webhooks" in answer.text
