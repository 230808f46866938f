"""A stand-in for Hugging Face Jobs: a server of our own for the unmodified `huggingface_hub`.

It speaks the routes of `HfApi.run_job` and its neighbours as the client's source has them, and runs
each job as a process of this machine. The real service has not been asked: what it says of a job
that it ended, and how it ends one, is our guess.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from datetime import UTC, datetime
from typing import Any

from tests.support.stand_in import Answer, HttpStandIn, ProcessJob, Request

Json = dict[str, Any]

OWNER = {"id": "5e9ecfc04957053f60648a3e", "name": "tester", "type": "user"}
PAGE = 100


def stamp(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class StandInJob(ProcessJob):
    """One job: what was asked for, and the process that it is."""

    variable = "JOB_ID"

    def __init__(self, server: HFJobsStandIn, spec: Json) -> None:
        self.spec = spec
        id = f"{len(server.jobs) + 0x687FB701029421:024x}"
        super().__init__(server, id, dict(spec.get("labels") or {}), spec.get("timeoutSeconds"))

    @property
    def stage(self) -> str:
        return self.end[0] if self.end else "RUNNING" if self.process else "SCHEDULING"

    def command(self) -> list[str]:
        return list(self.spec["command"])

    def env(self) -> dict[str, str]:
        own = {**(self.spec.get("environment") or {}), **(self.spec.get("secrets") or {})}
        return {**own, "ACCELERATOR": "none", "CPU_CORES": "2"}

    def true_end(self, code: int) -> tuple[str, str]:
        return ("ERROR", "Job failed") if code else ("COMPLETED", "")

    def refusal(self) -> tuple[str, str] | None:
        if self.verdict is not None:  # cancelled before it began
            return self.verdict
        is_bad = self.spec.get("dockerImage", "").partition(":")[0] in self.server.bad_images
        return ("ERROR", "the image could not be pulled") if is_bad else None

    def document(self) -> Json:
        kept = ("dockerImage", "command", "arguments", "environment", "flavor", "labels")
        return {
            "id": self.id,
            "owner": OWNER,
            "status": {"stage": self.stage, "message": (self.end and self.end[1]) or None},
            "createdAt": stamp(self.created),
            **{name: self.spec.get(name) for name in kept},
        }

    def cancel(self) -> None:
        if self.is_running:
            self.lose("CANCELED", "")


class HFJobsStandIn(HttpStandIn):
    page = PAGE

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs so that the client talks to this server and to no other."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": "hf_stand_in",
            "HF_HOME": str(self.folder / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }

    def answer(self, request: Request) -> Answer:
        if request.headers.get("Authorization") != "Bearer hf_stand_in":
            return Answer(401, {"error": "Invalid credentials in Authorization header"})
        if request.path == "/api/whoami-v2":
            self.calls["whoami"] += 1
            return Answer(200, OWNER)
        match = re.fullmatch(r"/api/jobs/tester(?:/(\w+))?(?:/(cancel|logs))?", request.path)
        if match is None:
            return Answer(404, {"error": "Not found"})
        if match[1] is None:
            return self._create(request.body) if request.verb == "POST" else self._list(request)
        job = self.jobs.get(match[1])
        if job is None:
            return Answer(404, {"error": "Job not found"})
        self.calls[match[2] or "inspect"] += 1
        if match[2] == "cancel":
            job.cancel()
        if match[2] == "logs":
            return self._logs(job, int(request.query.get("tail", ["0"])[0]))
        return Answer(200, job.document())

    def _create(self, body: Json) -> Answer:
        self.calls["create"] += 1
        if not body.get("command") or not (body.get("dockerImage") or body.get("spaceId")):
            return Answer(400, {"error": "expected a command and an image"})
        with self.lock:
            job = StandInJob(self, body)
            self.add(job)
        if self.lost_answers > 0:
            self.lost_answers -= 1
            return Answer(503, {"error": "the answer was lost"})
        return Answer(200, job.document())

    def _list(self, request: Request) -> Answer:
        self.calls["list"] += 1
        if self.is_spoiling and self.calls["list"] % 2:
            return Answer(500, {"error": "the page was lost"})
        query = request.query
        wanted = dict(label.partition("=")[::2] for label in query.get("label", []))
        found = [j for j in list(self.jobs.values()) if wanted.items() <= j.labels.items()]
        found.sort(key=lambda job: -job.created)
        first = int(query.get("cursor", ["0"])[0])
        end = first + self.page
        more = urllib.parse.urlencode({**query, "cursor": [str(end)]}, doseq=True)
        link = {"Link": f'<{self.url}/api/jobs/tester?{more}>; rel="next"'}
        documents = [job.document() for job in found[first:end]]
        return Answer(200, documents, link if end < len(found) else {})

    def _logs(self, job: StandInJob, tail: int) -> Answer:
        lines = job.log.read_text(errors="replace").splitlines()
        events = [{"timestamp": stamp(job.created), "data": line} for line in lines[-tail:]]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
        return Answer(200, text, {"Content-Type": "text/event-stream"})
