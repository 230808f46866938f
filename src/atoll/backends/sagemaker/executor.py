"""The SageMaker backend: each attempt of a rank is a training job of one instance.

The name of a job is what makes its start harmless to repeat. The records of ranks are in S3: a job
has no exit code, and SageMaker may start one a second time. One list answers for the whole gang.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from atoll.backends.base import StoreBackend
from atoll.backends.records import AttemptKey, JobState, Json
from atoll.backends.sagemaker.client import NameTaken, TrainingJobs, connect
from atoll.backends.sagemaker.options import STOP_S, SageMakerOptions
from atoll.backends.sagemaker.read import lacks_capacity, read_end, read_summary
from atoll.backends.sagemaker.render import job_name, read_name, render_job, stem_of
from atoll.core.status import Training

FAILURE_FILE = "/opt/ml/output/failure"
SKEW = timedelta(hours=1)  # by which SageMaker's clock may differ from ours
LIST_LAG = timedelta(minutes=2)  # by which a list may be behind; it is documented as seconds
FULL_S = 600.0  # between two lists of all jobs: a page of 100 takes 10 ms to parse


class _Gang:
    def __init__(self) -> None:
        self.starts: dict[AttemptKey, int] = {}  # the newest start of each attempt
        self.newest: dict[AttemptKey, Json] = {}  # what the list had of it last
        self.listed_at: datetime | None = None  # by AWS's clock
        self.full_at = 0.0
        self.ends: dict[str, Json] = {}  # descriptions of jobs that have ended, by name
        self.wanting: dict[AttemptKey, float] = {}  # since when there was no capacity


class SageMakerBackend(StoreBackend):
    """The Executor of SageMaker. Ranks do not reach each other."""

    name = "sagemaker"
    options_type = SageMakerOptions
    gang_type = _Gang
    eviction_s = float(STOP_S)
    job_variable = "TRAINING_JOB_NAME"
    unclaimed_hint = "does its image have Python and atoll[store], and may its role use the store?"
    options: SageMakerOptions

    def __init__(
        self,
        options: SageMakerOptions,
        *,
        jobs: TrainingJobs | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(options, clock=clock)
        self.jobs = jobs or connect(options)

    @staticmethod
    def render(training: Training, key: AttemptKey, options: SageMakerOptions) -> Json:
        return render_job(training, key, options, region=options.region or "")

    async def probe(self) -> None:
        await self.jobs.summaries("atoll-probe", CreationTimeAfter=datetime.now(UTC))

    async def start_jobs(self, training: Training, attempt: int, ranks: Sequence[int]) -> None:
        await asyncio.gather(*(self._start_one(training, (rank, attempt)) for rank in ranks))

    async def _start_one(self, training: Training, key: AttemptKey) -> None:
        gang: _Gang = self.gang(training)
        number = gang.starts.get(key, 0) + (key in gang.wanting)
        request = render_job(
            training,
            key,
            self.options,
            number=number,
            region=self.jobs.region,
            endpoint=self.jobs.store_endpoint,
        )
        with contextlib.suppress(NameTaken):  # by this process or another one: a list shows it
            await self.jobs.create(request)
        gang.wanting.pop(key, None)
        gang.starts[key] = number

    async def list_jobs(self, training: Training) -> Mapping[AttemptKey, JobState]:
        gang: _Gang = self.gang(training)
        stem = stem_of(training.uid)
        now = time.monotonic()
        if gang.listed_at is not None and now < gang.full_at + FULL_S:
            since = {"LastModifiedTimeAfter": gang.listed_at - LIST_LAG}
        else:
            gang.full_at = now
            created_at = datetime.fromtimestamp(training.created_at, UTC)
            since = {"CreationTimeAfter": created_at - SKEW}
        summaries, gang.listed_at = await self.jobs.summaries(stem, **since)
        for summary in summaries:
            read = read_name(summary["TrainingJobName"], training.uid)
            if read is not None and read[1] >= gang.starts.get(read[0], 0):
                key, gang.starts[read[0]] = read
                gang.newest[key] = summary
        jobs = await asyncio.gather(
            *(self._job(training, gang, key, summary) for key, summary in gang.newest.items())
        )
        return {key: job for key, job in zip(gang.newest, jobs, strict=True) if job is not None}

    async def _job(
        self, training: Training, gang: _Gang, key: AttemptKey, summary: Json
    ) -> JobState | None:
        """What is to be believed of a job; None for one that is to be asked for again."""
        job = read_summary(summary)
        if self.is_recorded(training, key) and not job.is_repeated:
            return JobState("ended")  # by its wrapper; SageMaker may take minutes to see it
        if job.is_active:
            return job
        name = summary["TrainingJobName"]
        if name not in gang.ends:
            gang.ends[name] = await self.jobs.describe(name)
        end = gang.ends[name]
        if lacks_capacity(end) and key not in self.claims(training):
            since = gang.wanting.setdefault(key, time.monotonic())
            if time.monotonic() >= since + self.options.capacity_pause_s:
                return None
            reason = end.get("FailureReason", "")
            message = f"SageMaker has no capacity; atoll tries again: {reason}"
            return JobState("pending", message=message)
        return read_end(end)

    async def stop_jobs(self, training: Training, attempts: Sequence[AttemptKey]) -> None:
        gang: _Gang = self.gang(training)
        names = [job_name(training.uid, key, gang.starts.get(key, 0)) for key in attempts]
        await asyncio.gather(*map(self.jobs.stop, names))

    def launch(self, training: Training) -> Json:
        return {**super().launch(training), "failure_file": FAILURE_FILE}
