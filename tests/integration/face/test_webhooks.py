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

from .conftest import stop, until


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


SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


@pytest.fixture
def config(tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The configuration of the control plane that a client starts."""
    path = tmp_path / "config" / "atoll.toml"
    path.parent.mkdir(mode=0o700)
    path.write_text(
        f"""
        [[webhooks]]
        url = "{receiver.url}"
        events = ["Accepted", "Failed"]
        secret_file = "webhook.key"
        private = true
        """
    )
    (path.parent / "webhook.key").touch(0o600)
    (path.parent / "webhook.key").write_text(SECRET + "\n")
    monkeypatch.setenv("ATOLL_CONFIG", str(path))
    return path


@pytest.mark.usefixtures("config")
def test_events_wait_until_the_address_accepts_them(where: Path, receiver: Receiver) -> None:
    """Over the end of the training, and the death of the control plane in the middle of it."""
    receiver.status = 503
    with atoll.Client() as client:
        training = client.deploy_distributed("a", command=["false"], world_size=1)
        with pytest.raises(atoll.BelowMinimumWorld):
            training.result(60)
        training.delete()  # what was not delivered outlives its training
        until(lambda: {"Accepted", "Failed"} <= set(receiver.reasons()))
        stop(where, signal.SIGKILL)
    before = {headers["webhook-id"] for headers, _ in receiver.messages}
    receiver.messages, receiver.status = [], 200
    with atoll.Client() as client:
        assert client.list() == []
        until(lambda: sorted(receiver.reasons()) == ["Accepted", "Failed"])
    assert {headers["webhook-id"] for headers, _ in receiver.messages} == before
    for headers, body in receiver.messages:
        assert is_signed(SECRET, headers, body)
    (failed,) = [body for _, body in receiver.messages if b'"Failed"' in body]
    assert json.loads(failed)["data"]["training"] == "a"


def test_a_secret_that_others_can_read_keeps_the_control_plane_from_starting(
    where: Path, config: Path
) -> None:
    (config.parent / "webhook.key").chmod(0o644)
    command = [sys.executable, "-m", "atoll.cli", "serve", "--state-dir", str(where)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert f"{config}: webhooks[0].secret_file" in done.stderr
    assert "chmod 600" in done.stderr
    assert "whsec" not in done.stderr


def test_a_file_in_the_working_directory_may_not_post_events_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hook = "[[webhooks]]\nurl = 'https://x/'\nsecret_env = 'HOME'\n"
    (tmp_path / "atoll.toml").write_text(hook)
    command = [sys.executable, "-m", "atoll.cli", "run", "--dry-run", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "webhooks" in done.stderr
    assert "expected [defaults] alone in a working directory" in done.stderr
