"""A stand-in for Hugging Face Jobs: a server of our own for the unmodified `huggingface_hub`.

It speaks the routes of `HfApi.run_job` and its neighbours as the client's source has them, and runs
each job as a process of this machine. The real service has not been asked: what it says of a job
that it ended, and how it ends one, is our guess.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Json = dict[str, Any]

OWNER = {"id": "5e9ecfc04957053f60648a3e", "name": "tester", "type": "user"}
GIVEN = ("LANG", "TZ", "VIRTUAL_ENV", "PYTHONPATH")  # what an image would bring itself
ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
PAGE = 100


def stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class StandInJob:
    """One job: what was asked for, and the process that it is."""

    def __init__(self, server: HFJobsStandIn, spec: Json) -> None:
        self.id = f"{len(server.jobs) + 0x687FB701029421:024x}"
        self.server, self.spec = server, spec
        self.created = time.time()
        self.stage, self.message = "SCHEDULING", ""
        self.verdict: tuple[str, str] | None = None  # in place of the true stage and message
        self.process: subprocess.Popen[bytes] | None = None
        self.again: list[subprocess.Popen[bytes]] = []
        self.log = server.folder / self.id
        self.log.touch()
        self.thread = threading.Thread(target=self._live, daemon=True)

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.spec.get("labels") or {})

    @property
    def rank(self) -> int:
        return int(self.labels.get("atoll-rank", "-1"))

    @property
    def is_running(self) -> bool:
        return self.stage not in ENDED

    def document(self) -> Json:
        status = {"stage": self.stage, "message": self.message or None}
        times = {"createdAt": stamp(self.created)}
        kept = ("dockerImage", "command", "arguments", "environment", "flavor", "labels")
        return {
            "id": self.id,
            "owner": OWNER,
            "status": status,
            **times,
            **{name: self.spec.get(name) for name in kept},
        }

    def pids(self) -> list[int]:
        """Every process of the job, by the variable that only they have."""
        mark, found = f"JOB_ID={self.id}".encode(), []
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and mark in Path(f"/proc/{name}/environ").read_bytes().split(
                    b"\0"
                ):
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

    def lose(self, stage: str, message: str) -> None:
        """It is killed, and the service says this of it."""
        self.verdict = stage, message
        self.kill()

    def cancel(self) -> None:
        if self.is_running:
            self.lose("CANCELED", "")
            if self.process is None:
                self.stage = "CANCELED"

    def run_again(self) -> None:
        """The service starts the same job a second time, beside the first."""
        self.again.append(self._spawn())

    def _live(self) -> None:
        if self.spec.get("dockerImage", "").partition(":")[0] in self.server.bad_images:
            self.stage, self.message = "ERROR", "the image could not be pulled"
            return
        try:
            self.process = self._spawn()
        except OSError as error:
            self.stage, self.message = "ERROR", str(error)
            return
        if self.verdict is None:
            self.stage = "RUNNING"
        else:  # cancelled meanwhile
            self.kill()
        try:
            code = self.process.wait(self.spec.get("timeoutSeconds"))
        except subprocess.TimeoutExpired:
            self.lose("ERROR", "Job timeout")
            code = self.process.wait()
        self.kill()  # whatever the command left behind
        true = ("ERROR", "Job failed") if code else ("COMPLETED", "")
        _, self.message = self.verdict or true
        self.stage = (self.verdict or true)[0]

    def _spawn(self) -> subprocess.Popen[bytes]:
        given = {name: os.environ[name] for name in GIVEN if name in os.environ}
        env = {
            **given,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # the image has atoll
            "HOME": str(self.server.folder),
            **(self.spec.get("environment") or {}),
            **(self.spec.get("secrets") or {}),
            "JOB_ID": self.id,
            "ACCELERATOR": "none",
            "CPU_CORES": "2",
        }
        with self.log.open("ab") as log:
            return subprocess.Popen(
                self.spec["command"],
                env=env,
                cwd=self.server.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )


class HFJobsStandIn:
    """The server, in threads of its own. Its public fields arrange faults and count calls."""

    def __init__(self) -> None:
        self.jobs: dict[str, StandInJob] = {}
        self.calls: Counter[str] = Counter()
        self.bad_images: set[str] = set()
        self.is_away = False
        self.lost_answers = 0  # so many starts are taken, and their answers are lost
        self.is_spoiling = False  # every second page of a list is an error
        self.page = PAGE
        self._home = tempfile.TemporaryDirectory(prefix="hfjobs-stand-in-")
        self.folder = Path(self._home.name)
        self._lock = threading.Lock()
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs so that the client talks to this server and to no other."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": "hf_stand_in",
            "HF_HOME": str(self.folder / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def close(self) -> None:
        for job in self.jobs.values():
            job.cancel()
        for job in self.jobs.values():
            job.thread.join(30)
        self._server.shutdown()
        self._server.server_close()
        self._home.cleanup()

    def running(self, uid: str) -> list[StandInJob]:
        return [j for j in self.jobs.values() if j.labels.get("atoll-uid") == uid and j.is_running]

    def create(self, spec: Json) -> StandInJob:
        with self._lock:
            job = StandInJob(self, spec)
            self.jobs[job.id] = job
        job.thread.start()
        return job

    def listed(self, query: dict[str, list[str]]) -> list[StandInJob]:
        wanted = dict(label.partition("=")[::2] for label in query.get("label", []))
        jobs = [j for j in list(self.jobs.values()) if wanted.items() <= j.labels.items()]
        return sorted(jobs, key=lambda job: -job.created)


def _handler(server: HFJobsStandIn) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._route("GET")

        def do_POST(self) -> None:
            self._route("POST")

        def _route(self, verb: str) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else {}
            url = urllib.parse.urlsplit(self.path)
            if self.headers.get("Authorization") != "Bearer hf_stand_in":
                return self._answer(401, {"error": "Invalid credentials in Authorization header"})
            if server.is_away:
                return self._answer(503, {"error": "come again"})
            if url.path == "/api/whoami-v2":
                server.calls["whoami"] += 1
                return self._answer(200, OWNER)
            match = re.fullmatch(r"/api/jobs/tester(?:/(\w+))?(?:/(cancel|logs))?", url.path)
            if match is None:
                return self._answer(404, {"error": "Not found"})
            if match[1] is None:
                return self._create(body) if verb == "POST" else self._list(url.query)
            job = server.jobs.get(match[1])
            if job is None:
                return self._answer(404, {"error": "Job not found"})
            server.calls[match[2] or "inspect"] += 1
            if match[2] == "cancel":
                job.cancel()
            if match[2] == "logs":
                return self._logs(job)
            return self._answer(200, job.document())

        def _create(self, body: Json) -> None:
            server.calls["create"] += 1
            if not body.get("command") or not (body.get("dockerImage") or body.get("spaceId")):
                return self._answer(400, {"error": "expected a command and an image"})
            job = server.create(body)
            if server.lost_answers > 0:
                server.lost_answers -= 1
                return self._answer(503, {"error": "the answer was lost"})
            return self._answer(200, job.document())

        def _list(self, text: str) -> None:
            server.calls["list"] += 1
            if server.is_spoiling and server.calls["list"] % 2:
                return self._answer(500, {"error": "the page was lost"})
            query = urllib.parse.parse_qs(text)
            found, first = server.listed(query), int(query.get("cursor", ["0"])[0])
            page, end = found[first : first + server.page], first + server.page
            more = urllib.parse.urlencode({**query, "cursor": [str(end)]}, doseq=True)
            link = {"Link": f'<{server.url}/api/jobs/tester?{more}>; rel="next"'}
            documents = [job.document() for job in page]
            return self._answer(200, documents, link if end < len(found) else {})

        def _logs(self, job: StandInJob) -> None:
            lines = job.log.read_text(errors="replace").splitlines()
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            tail = int(query.get("tail", ["0"])[0])
            events = [{"timestamp": stamp(job.created), "data": line} for line in lines[-tail:]]
            text = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
            self._answer(200, text, {"Content-Type": "text/event-stream"})

        def _answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler
