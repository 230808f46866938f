"""A real S3 API on loopback (moto) whose answers can be spoilt on the way."""

from __future__ import annotations

import logging
import random
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server


class S3Server:
    """`strips_conditions`: like a server that never heard of If-None-Match.
    `fail_share`: of the requests end with 503, before or after they were done. `has_left`: all do.
    """

    def __init__(self) -> None:
        self.strips_conditions = False
        self.fail_share = 0.0
        self.has_left = False
        self.failed = 0
        self._chance = random.Random(7)
        self._app = DomainDispatcherApplication(create_backend_app)
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._server = make_server("127.0.0.1", 0, self._serve, threaded=True)
        self._server.daemon_threads = True  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def use(self, monkeypatch: pytest.MonkeyPatch, bucket: str) -> str:
        """Point this process at the server; the URI of a new bucket."""
        for name, value in self.environment.items():
            monkeypatch.setenv(name, value)
        self.make_bucket(bucket)
        # Its own prefix: a port may be given again while somebody still asks the last server.
        return f"s3://{bucket}/some/{uuid.uuid4().hex}"

    def make_bucket(self, bucket: str) -> None:
        request = urllib.request.Request(f"{self.url}/{bucket}", method="PUT")
        urllib.request.urlopen(request, timeout=60).close()  # it loads moto first

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _serve(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        if self.strips_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        if self.has_left or self._chance.random() < self.fail_share:
            self.failed += 1
            if not self.has_left and self._chance.random() < 0.5:
                list(self._app(environ, lambda *_: None))  # done, but the answer gets lost
            start("503 Slow Down", [("Content-Length", "0"), ("Connection", "close")])
            return [b""]
        return self._app(environ, start)  # type: ignore[no-any-return]
