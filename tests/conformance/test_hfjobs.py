"""The table's faults on ranks that are jobs of a stand-in for Hugging Face Jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.allreduce.s3server import S3Server
from tests.conformance.served_backend import ServedBackend
from tests.conformance.table import Row
from tests.conformance.test_table import quick_rows, run
from tests.support.control_plane import ControlPlane, serving, wait_for
from tests.support.hfjobs_stand_in import PAGE, HFJobsStandIn, StandInJob

# Rows that every run of the tests has; `make soak` has all.
QUICK = frozenset(
    {
        *("none", "exit 3", "signal SIGKILL", "out of memory", "cancel", "supervisor killed"),
        *("deadline", "records lost", "attempt started twice", "listing that fails halfway"),
        "controller killed after apply 1",
    }
)
UNSAID = "nothing is documented of what a preempted job leaves"


class HFJobs(ServedBackend):
    name = "hfjobs"
    image = "python:3.11"
    why_not = {
        "image error": "the Hub's word for it is not known: see test_an_image_that_is_missing",
        "preempted": UNSAID,
        "preempted and requeued": UNSAID,
        "step daemon killed": "'supervisor killed' is this row: nothing else is above a rank",
    }

    def __init__(
        self, plane: ControlPlane, scratch: Path, service: HFJobsStandIn, store: str
    ) -> None:
        super().__init__(plane, scratch, store)
        self._service = service

    def _jobs(self, uid: str) -> list[StandInJob]:
        return self._service.running(uid)

    def _go_away(self, is_away: bool) -> None:
        self._service.is_away = is_away

    def _run_out_of_memory(self, row: Row, name: str) -> None:
        self._job(name, row.at).lose("ERROR", "OOMKilled")

    def _lose_host(self, row: Row, name: str) -> None:
        """Everything in the jobs is killed. What the service says of that is arranged."""
        for job in self._jobs(self._plane.get(name).uid):
            job.lose("ERROR", "the node was lost")

    def _spoil_listings(self) -> None:
        """Pages are short, and each second one is an error, for some observations."""
        self._service.page, self._service.is_spoiling = 2, True
        asked = self._service.calls["list"]
        wait_for(lambda: self._service.calls["list"] > asked + 8, timeout=120)
        self._service.page, self._service.is_spoiling = PAGE, False

    def _start_again(self, row: Row, name: str) -> None:
        job = self._jobs(self._plane.get(name).uid)[0]
        job.run_again()
        wait_for(lambda: "has run, or runs" in job.log.read_text())


@pytest.fixture(scope="module")
def hfjobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HFJobs]:
    folder = tmp_path_factory.mktemp("conformance")
    (folder / "scratch").mkdir()
    service, s3 = HFJobsStandIn(), S3Server()
    service.bad_images.add("nonesuch")
    bucket = f"conformance-{os.getpid()}"
    s3.make_bucket(bucket)
    options = {"secrets": sorted(s3.environment), "python": "python", "poll_s": 0.2}
    env = {
        **service.environment,
        **s3.environment,
        "ATOLL_TEST_EXECUTOR": msgspec.json.encode(["hfjobs", options]).decode(),
    }
    try:
        with serving(folder / "state", env=env) as plane:
            yield HFJobs(plane, folder / "scratch", service, f"s3://{bucket}")
    finally:
        service.close()
        s3.stop()


@pytest.mark.parametrize("row", quick_rows(QUICK))
def test_hfjobs(hfjobs: HFJobs, row: Row) -> None:
    run(hfjobs, row)
