"""The table's faults on ranks that are training jobs of the stand-in for SageMaker."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tests.allreduce.s3server import S3Server
from tests.conformance.served_backend import ServedBackend
from tests.conformance.table import Row
from tests.support.control_plane import ControlPlane, serving, wait_for
from tests.support.sagemaker_stand_in import ROLE, SageMakerStandIn, StandInJob

POLL_S = 0.15
# A job takes seconds to start and to end: every run has these rows, `make soak` has all.
SAGEMAKER_QUICK = frozenset(
    {"none", "exit 3", "preempted", "records lost", "exit while the controller is down 9"}
)
OUT_OF_MEMORY = "ClientError: Please use an instance type with more memory, or reduce the size."
LOST = "InternalServerError: We encountered an internal error. Please try again."


class SageMakerJobs(ServedBackend):
    name = "sagemaker"
    image = "train:1"
    why_not = {
        "image error": "SageMaker's word for it is a ClientError, and the job has ended: see "
        "test_an_image_that_is_not_there_fails_with_sagemakers_words",
        "step daemon killed": "'supervisor killed' is this row: nothing else is above a rank",
    }

    def __init__(
        self, plane: ControlPlane, scratch: Path, service: SageMakerStandIn, store: str
    ) -> None:
        super().__init__(plane, scratch, store)
        self._service = service
        self._faults.update({"preempted": self._preempt, "preempted and requeued": self._preempt})

    def _jobs(self, uid: str) -> list[StandInJob]:
        return self._service.running(uid)

    def _go_away(self, is_away: bool) -> None:
        self._service.is_away = is_away

    def _run_out_of_memory(self, row: Row, name: str) -> None:
        self._job(name, row.at).lose(OUT_OF_MEMORY)

    def _lose_host(self, row: Row, name: str) -> None:
        """Everything on the instances is killed. What SageMaker says of that is arranged."""
        for job in self._jobs(self._plane.get(name).uid):
            job.lose(LOST)

    def _preempt(self, row: Row, name: str) -> None:
        """Its spot instance is taken back. There is another one at once, or not for a while."""
        job = self._job(name, row.at)
        is_again = row.fault == "preempted and requeued"
        self._service.again_s = 0.1 if is_again else 10.0
        job.interrupt()
        wait_for(lambda: job.runs == 2 if is_again else not job.is_running)

    def _lose_answer(self, row: Row, name: str) -> None:
        """Starts were taken whose answers did not arrive."""
        wait_for(lambda: self._service.lost_answers == 0)

    def _spoil_listings(self) -> None:
        """Pages are short, and each second one is an error, for some looks."""
        self._service.page, self._service.is_spoiling = 2, True
        asked = self._service.calls["ListTrainingJobs"]
        wait_for(lambda: self._service.calls["ListTrainingJobs"] > asked + 12)
        self._service.page, self._service.is_spoiling = 100, False

    def _start_again(self, row: Row, name: str) -> None:
        job = self._jobs(self._plane.get(name).uid)[0]
        assert "has run, or runs" in job.run_again()

    def deploy(self, row: Row) -> str:
        if row.fault == "control daemon killed after it took a start":
            self._service.lost_answers = 2
        return super().deploy(row)


@contextlib.contextmanager
def sagemaker_plane(folder: Path) -> Iterator[SageMakerJobs]:
    """A control plane whose ranks are training jobs, with an S3 API for their records."""
    (folder / "scratch").mkdir()
    aws = S3Server()
    role = {**aws.environment, "AWS_EC2_METADATA_DISABLED": "true"}
    service = SageMakerStandIn(aws.url, role)
    service.again_s = 3.0
    service.stop_s = 5.0  # where SageMaker waits for two minutes
    bucket = f"conformance-{os.getpid()}"
    aws.make_bucket(bucket)
    options = {"role": ROLE, "python": sys.executable, "poll_s": POLL_S, "is_spot": True}
    env = {
        **aws.environment,
        **service.environment,
        "ATOLL_TEST_EXECUTOR": msgspec.json.encode(["sagemaker", options]).decode(),
    }
    try:
        with serving(folder / "state", env=env) as plane:
            yield SageMakerJobs(plane, folder / "scratch", service, f"s3://{bucket}")
    finally:
        service.close()
        aws.stop()
