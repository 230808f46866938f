"""A small API server over real HTTP, which can be stopped: it keeps Jobs, and no pod ever comes."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class SmallCluster:
    """`start()` listens on the port it had before, and knows what it knew."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}  # by path
        self.port = 0
        self._version = 1
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(*cluster.read(self.path))

            def do_POST(self) -> None:
                self._answer(201, cluster.create(self.path, self._body()))

            def do_PATCH(self) -> None:
                self._answer(200, cluster.patch(self.path, self._body()))

            def _body(self) -> Any:
                return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

            def _answer(self, code: int, body: dict[str, Any]) -> None:
                content = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def read(self, path: str) -> tuple[int, dict[str, Any]]:
        place, _, query = path.partition("?")
        if "watch=" in query:
            return 410, {"code": 410, "reason": "Expired", "message": "watching is not offered"}
        if place in self.objects:
            return 200, self.objects[place]
        if place.rsplit("/", 2)[-2] in ("jobs", "services", "configmaps", "secrets", "deployments"):
            return 404, {"code": 404, "reason": "NotFound", "message": "not found"}
        items = [found for where, found in self.objects.items() if where.startswith(place + "/")]
        return 200, {"metadata": {"resourceVersion": str(self._version)}, "items": items}

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if "dryRun=All" in path:  # accepted, and not stored
            return body
        return self.patch(f"{path.partition('?')[0]}/{body['metadata']['name']}", body)

    def patch(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._version += 1
        place = path.partition("?")[0]
        made = _merged(self.objects.get(place, {"metadata": {}}), body)
        namespace, _, name = place.split("/")[-3:]
        made["metadata"] |= {"namespace": namespace, "name": name, "uid": name}
        made["metadata"]["resourceVersion"] = str(self._version)
        self.objects[place] = made
        return made


def _merged(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    both = {key: _merged(old[key], new[key]) for key in old if isinstance(new.get(key), dict)}
    return {**old, **new, **both}
