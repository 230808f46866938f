"""The SageMaker backend: each attempt of a rank is a training job of one instance.

The name of a job is what makes its start harmless to repeat. The records of ranks are in S3: a job
has no exit code, and SageMaker may start one a second time. One list answers for the whole gang.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from atoll.agent.records import BY_EXECUTOR
from atoll.backends.bucket_backend import StoreBackend
from atoll.backends.recorded import Json
from atoll.backends.records import AttemptKey, JobState, has_open_cause
from atoll.backends.sagemaker.client import NameTaken, TrainingJobs, connect
from atoll.backends.sagemaker.logs import RankLogs
from atoll.backends.sagemaker.model import check_request
from atoll.backends.sagemaker.options import STOP_S, SUPPORTS, SageMakerOptions
from atoll.backends.sagemaker.read import lacks_capacity, read_end, read_summary
from atoll.backends.sagemaker.render import (
    NAMES,
    job_name,
    prefix_of,
    read_name,
    render_job,
    stem_of,
)
from atoll.core.config import options_of
from atoll.core.executors import PlaneContext
from atoll.core.spec import TrainingSpec
from atoll.core.status import LogLine, Training

FAILURE_FILE = "/opt/ml/output/failure"
SKEW_S = 3600.0  # by which SageMaker's clock may differ from ours
UNSAID = "does its image have Python and atoll[store], and may its role use the store?"


class _Gang:
    """What this process knows of the jobs of one training."""

    def __init__(self) -> None:
        self.starts: dict[AttemptKey, int] = {}  # the newest start of each attempt
        self.ends: dict[str, Json] = {}  # descriptions of jobs that have ended, by name
        self.wanting: dict[AttemptKey, float] = {}  # since when there was no capacity


class SageMakerBackend(StoreBackend):
    """The Executor of SageMaker. Ranks do not reach each other."""

    name = "sagemaker"
    options_type = SageMakerOptions
    SUPPORTS = SUPPORTS
    eviction_s = float(STOP_S)
    job_variable = "TRAINING_JOB_NAME"

    def __init__(
        self,
        options: SageMakerOptions,
        *,
        jobs: TrainingJobs | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(python=options.python, poll_s=options.poll_s, clock=clock)
        self.options = options
        self.jobs = jobs or connect(options)
        self._gangs: dict[str, _Gang] = {}
        self._turns_to_start = asyncio.Semaphore(options.starts)

    @classmethod
    def configured(cls, name: str, options: dict[str, Any], home: PlaneContext) -> SageMakerBackend:
        """Built from `[executors.NAME]`. Raises Permanent without credentials or a region."""
        backend = cls(options_of(SageMakerOptions, options))
        backend.name = name
        return backend

    @classmethod
    def preview(cls, options: SageMakerOptions, home: PlaneContext, training: Training) -> str:
        """The CreateTrainingJob of each rank, as JSON. AWS is not asked."""
        region = options.region or ""
        check_spec(training.spec, options, region)
        ranks = range(training.spec.world_size.target)
        created = [render_job(training, (rank, 0), options, region=region) for rank in ranks]
        return json.dumps(created, indent=2) + "\n"

    async def probe(self) -> None:
        await self.jobs.summaries("atoll-probe", time.time())

    def check(self, spec: TrainingSpec) -> None:
        """Raises ValidationError for what SageMaker would refuse, by its own model."""
        check_spec(spec, self.options, self.jobs.region)

    # The verbs

    async def start_jobs(self, training: Training, attempt: int, ranks: Sequence[int]) -> None:
        await asyncio.gather(*(self._start_one(training, (rank, attempt)) for rank in ranks))

    async def _start_one(self, training: Training, key: AttemptKey) -> None:
        gang = self._gang(training)
        number = gang.starts.get(key, 0) + (key in gang.wanting)
        request = render_job(
            training,
            key,
            self.options,
            number=number,
            region=self.jobs.region,
            endpoint=self.jobs.store_endpoint,
        )
        async with self._turns_to_start:
            try:
                await self.jobs.create(request)
            except NameTaken:  # by this process or another one: the next list shows it
                pass
        gang.wanting.pop(key, None)
        gang.starts[key] = number

    async def list_jobs(self, training: Training) -> Mapping[AttemptKey, JobState]:
        gang = self._gang(training)
        since = training.created_at - SKEW_S
        newest: dict[AttemptKey, Json] = {}
        for summary in await self.jobs.summaries(stem_of(training.uid), since):
            read = read_name(summary["TrainingJobName"], training.uid)
            if read is not None and read[1] >= gang.starts.get(read[0], 0):
                key, gang.starts[read[0]] = read
                newest[key] = summary
        jobs = await asyncio.gather(
            *(self._job(training, gang, key, summary) for key, summary in newest.items())
        )
        return {key: job for key, job in zip(newest, jobs, strict=True) if job is not None}

    async def _job(
        self, training: Training, gang: _Gang, key: AttemptKey, summary: Json
    ) -> JobState | None:
        """What is to be believed of a job; None for one that is to be asked for again."""
        job = read_summary(summary)
        reader = self._readers.get(training.uid)
        record = None if reader is None else reader.exit_of(key)
        has_stop = record is not None and record.get("by") != BY_EXECUTOR
        if record is not None and has_stop and not has_open_cause(record) and not job.is_repeated:
            return JobState("ended")  # by its wrapper; SageMaker may take minutes to see it
        if job.is_active:
            return job
        name = summary["TrainingJobName"]
        if name not in gang.ends:
            gang.ends[name] = await self.jobs.describe(name)
        end = gang.ends[name]
        is_claimed = reader is not None and reader.is_claimed(key)
        if not is_claimed and lacks_capacity(end):
            since = gang.wanting.setdefault(key, time.monotonic())
            if time.monotonic() >= since + self.options.capacity_pause_s:
                return None
            detail = (
                f"SageMaker has no capacity, and is asked again: {end.get('FailureReason', '')}"
            )
            return JobState("pending", message=detail)
        job = read_end(end)
        return job if is_claimed else job._replace(message=f"{job.message}: {UNSAID}")

    async def stop_jobs(self, training: Training, attempts: Sequence[AttemptKey]) -> None:
        gang = self._gang(training)
        names = [job_name(training.uid, key, gang.starts.get(key, 0)) for key in attempts]
        await asyncio.gather(*(self._stop_one(name) for name in names))

    async def _stop_one(self, name: str) -> None:
        async with self._turns_to_start:
            await self.jobs.stop(name)

    # Where things are

    def launch(self, training: Training) -> Json:
        return {**super().launch(training), "failure_file": FAILURE_FILE}

    def prefix(self, training: Training, part: str) -> str:
        return prefix_of(training, self.options, part)

    async def clear(self, training: Training, *, with_logs: bool) -> None:
        if with_logs:
            names = {name for names in self._names(training).values() for name in names}
            for name in sorted(names):
                for stream in await self.jobs.log_streams(name):
                    await self.jobs.delete_log(stream)
            self._gangs.pop(training.uid, None)
        await super().clear(training, with_logs=with_logs)

    def _gang(self, training: Training) -> _Gang:
        return self._gangs.setdefault(training.uid, _Gang())

    # Logs

    async def log_offsets(
        self, training: Training, tail: int, *, ranks: Sequence[int] | None = None
    ) -> dict[int, int]:
        return await self._logs_of(training).offsets(tail, ranks)

    def logs_after(
        self,
        training: Training,
        offsets: Mapping[int, int],
        *,
        ranks: Sequence[int] | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        return self._logs_of(training).lines(offsets, ranks, follow)

    def _logs_of(self, training: Training) -> RankLogs:
        return RankLogs(self.jobs, lambda: self._names(training))

    def _names(self, training: Training) -> dict[int, list[str]]:
        """The jobs of each rank, in order: those that are known, and those of the status."""
        keys = dict(self._gang(training).starts)
        status = training.status
        for rank in (*status.ranks, *status.removed_ranks):
            for attempt in range(rank.attempt + 1):
                keys.setdefault((rank.rank, attempt), 0)
        by_rank: dict[int, list[str]] = {}
        for key, number in sorted(keys.items()):
            by_rank.setdefault(key[0], []).append(job_name(training.uid, key, number))
        return by_rank


def check_spec(spec: TrainingSpec, options: SageMakerOptions, region: str) -> None:
    """Raises ValidationError for what SageMaker would refuse, by its own model."""
    options.check(spec)
    longest = (spec.world_size.max - 1, spec.max_restarts)
    untried = Training(namespace="x", uid="0" * 32, spec=spec)
    request = render_job(untried, longest, options, region=region)
    check_request("CreateTrainingJob", request, NAMES)
