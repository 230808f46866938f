"""Each attempt of a rank is a job of Hugging Face Jobs, with its records in an object store.

A job has a stage and no exit code: how a rank ended is in its records. A start cannot be repeated
without a second job, but whoever comes second finds the attempt claimed, and ends. Labels say which
attempt a job is, so one list answers for the whole gang, whoever has started it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from atoll.backends.base import UID, StoreBackend, key_of
from atoll.backends.hfjobs.client import Jobs, check_credentials
from atoll.backends.hfjobs.options import HFJobsOptions
from atoll.backends.hfjobs.render import render_job
from atoll.backends.records import AttemptKey, JobState, best_jobs
from atoll.core.errors import BackendError
from atoll.core.phase import ExitReason
from atoll.core.status import Training

# Of the Hub's words on a job that it ended, those that name a cause, in lower case.
CAUSES = {
    "oom": ExitReason.OOM_KILLED,
    "out of memory": ExitReason.OOM_KILLED,
    "timeout": ExitReason.TIME_LIMIT,
    "timed out": ExitReason.TIME_LIMIT,
    "preempt": ExitReason.PREEMPTED,
    "node": ExitReason.HOST_LOST,
}


class HFJobsBackend(StoreBackend):
    """The Executor of Hugging Face Jobs. Ranks do not reach each other."""

    name = "hfjobs"
    options_type = HFJobsOptions
    job_variable = "JOB_ID"
    options: HFJobsOptions
    render = staticmethod(render_job)
    check_machine = staticmethod(check_credentials)

    def __init__(self, options: HFJobsOptions, *, clock: Callable[[], float] | None = None) -> None:
        super().__init__(options, clock=clock)
        self.jobs = Jobs(options.namespace, options.requests)
        self._printed: dict[str, str] = {}  # the last lines of jobs that ran nothing of ours

    async def probe(self) -> None:
        await self.jobs.find({UID: "none"})

    async def start_jobs(self, training: Training, attempt: int, ranks: Sequence[int]) -> None:
        requests = [render_job(training, (rank, attempt), self.options) for rank in ranks]
        await asyncio.gather(*map(self.jobs.start, requests))

    async def list_jobs(self, training: Training) -> Mapping[AttemptKey, JobState]:
        ids: dict[AttemptKey, list[str]] = self.gang(training)
        ids.clear()
        listed = await self.jobs.find({UID: training.uid})
        own = [(key, job) for job in listed if (key := key_of(job.labels)) is not None]
        for key, job in own:
            ids.setdefault(key, []).append(job.id)
        jobs = best_jobs((key, read_job(job)) for key, job in own)
        claims = self.claims(training)
        for key, state in jobs.items():
            if not state.is_active and key not in claims:
                printed = await self._last_words(ids[key][-1])
                jobs[key] = state._replace(message=f"{state.message}{printed}")
        return jobs

    async def stop_jobs(self, training: Training, attempts: Sequence[AttemptKey]) -> None:
        ids = self.gang(training)
        await asyncio.gather(*(self.jobs.cancel(id) for key in attempts for id in ids.get(key, ())))

    async def _last_words(self, job_id: str) -> str:
        """What a job printed that never reached the store, asked once."""
        if job_id not in self._printed:
            try:
                lines = await self.jobs.last_lines(job_id)
            except BackendError:  # it is a detail, and may be had next time
                return ""
            self._printed[job_id] = "".join(f"; {line.strip()}" for line in lines if line.strip())
        return self._printed[job_id]


def read_job(job: Any) -> JobState:
    """What the Hub says of a job, and what of it is to be believed. It has no exit code."""
    stage, text = (
        str(getattr(job.status.stage, "value", job.status.stage)),
        job.status.message or "",
    )
    message = f"Hugging Face: {stage}" + (f", {text}" if text else "")
    if stage == "SCHEDULING":
        return JobState("pending", message=text or "Hugging Face is scheduling it")
    if stage == "RUNNING":
        return JobState("running", message="Hugging Face has not started it yet")
    if stage in ("CANCELED", "DELETED"):
        return JobState("ended", ExitReason.DELETED.value, message)
    cause = next((cause.value for word, cause in CAUSES.items() if word in text.lower()), "")
    return JobState("ended", cause if stage == "ERROR" else "", message)
