"""What stand-ins for services have in common: jobs that are processes, and an HTTP server.

A stand-in says how its service names things and routes requests; `hfjobs_stand_in.py` is one.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

GIVEN = ("LANG", "TZ", "VIRTUAL_ENV", "PYTHONPATH")  # what an image would bring itself


class ProcessJob:
    """One job: a process, known by a variable that only it and its children have.

    `end` is the state and message of its end; `None` while it has none.
    """

    variable: ClassVar[str]  # in which the service tells a job its id

    def __init__(
        self, server: HttpStandIn, id: str, labels: dict[str, str], timeout_s: float | None = None
    ) -> None:
        self.server, self.id, self.labels, self.timeout_s = server, id, labels, timeout_s
        self.created = time.time()
        self.end: tuple[str, str] | None = None
        self.verdict: tuple[str, str] | None = None  # in place of the true end
        self.process: subprocess.Popen[bytes] | None = None
        self.again: list[subprocess.Popen[bytes]] = []
        self.log = server.folder / id
        self.log.touch()
        self.thread = threading.Thread(target=self._live, daemon=True)

    def command(self) -> Sequence[str]:
        raise NotImplementedError

    def env(self) -> dict[str, str]:
        raise NotImplementedError

    def true_end(self, code: int) -> tuple[str, str]:
        """What the service says of a job that ended by itself, by the code of its process."""
        raise NotImplementedError

    def refusal(self) -> tuple[str, str] | None:
        """What the service says of a job that it cannot start."""
        return None

    @property
    def rank(self) -> int:
        return int(self.labels.get("atoll-rank", "-1"))

    @property
    def is_running(self) -> bool:
        return self.end is None

    def pids(self) -> list[int]:
        """Every process of the job."""
        mark, found = f"{self.variable}={self.id}".encode(), []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    found.append(int(name))
        return found

    def kill(self) -> None:
        """Everything ends at once, as with a container."""
        while pids := self.pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for process in (self.process, *self.again):
                if process is not None:
                    process.poll()
            time.sleep(0.002)

    def lose(self, state: str, message: str) -> None:
        """It is killed, and the service says this of it."""
        self.verdict = state, message
        self.kill()

    def run_again(self) -> None:
        """The service starts the same job a second time, beside the first."""
        self.again.append(self._spawn())

    def _live(self) -> None:
        try:
            self.end = self.refusal()
            if self.end is not None:
                return
            self.process = self._spawn()
        except OSError as error:
            self.end = ("ERROR", str(error))
            return
        if self.verdict is not None:  # cancelled meanwhile
            self.kill()
        try:
            code = self.process.wait(self.timeout_s)
        except subprocess.TimeoutExpired:
            self.lose("ERROR", "Job timeout")
            code = self.process.wait()
        self.kill()  # whatever the command left behind
        self.end = self.verdict or self.true_end(code)

    def _spawn(self) -> subprocess.Popen[bytes]:
        env = {
            **{name: os.environ[name] for name in GIVEN if name in os.environ},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # the image has atoll
            "HOME": str(self.server.folder),
            **self.env(),
            self.variable: self.id,
        }
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.command(),
                env=env,
                cwd=self.server.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


class Request(NamedTuple):
    verb: str
    path: str
    query: dict[str, list[str]]
    body: Any
    headers: Any


class Answer(NamedTuple):
    status: int
    body: Any  # bytes, or what JSON holds
    headers: dict[str, str] = {}


class HttpStandIn:
    """The server, in threads of its own. Its public fields arrange faults and count calls."""

    def __init__(self) -> None:
        self.jobs: dict[str, Any] = {}
        self.calls: Counter[str] = Counter()
        self.bad_images: set[str] = set()
        self.is_away = False
        self.is_spoiling = False  # every second page of a list is an error
        self.lost_answers = 0  # so many starts are taken, and their answers are lost
        self._home = tempfile.TemporaryDirectory(prefix="stand-in-")
        self.folder = Path(self._home.name)
        self.lock = threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def answer(self, request: Request) -> Answer:
        raise NotImplementedError

    def add(self, job: ProcessJob) -> None:
        self.jobs[job.id] = job
        job.thread.start()

    def running(self, uid: str) -> list[Any]:
        return [j for j in self.jobs.values() if j.labels.get("atoll-uid") == uid and j.is_running]

    def close(self) -> None:
        for job in self.jobs.values():
            if job.is_running:
                job.lose("DELETED", "")
        for job in self.jobs.values():
            job.thread.join(30)
        self._server.shutdown()
        self._server.server_close()
        self._home.cleanup()


def _handler(server: HttpStandIn) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _route(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else {}
            url = urllib.parse.urlsplit(self.path)
            query = urllib.parse.parse_qs(url.query)
            request = Request(self.command, url.path, query, body, self.headers)
            if server.is_away:
                status, answer, headers = Answer(503, {"error": "come again"})
            else:
                status, answer, headers = server.answer(request)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_DELETE = _route

    return Handler
