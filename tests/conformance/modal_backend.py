"""The table's faults on ranks that are sandboxes of the stand-in for Modal."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
from grpclib import GRPCError, Status
from tests.allreduce.s3server import S3Server
from tests.conformance.served_backend import ServedBackend
from tests.conformance.table import Row
from tests.support.control_plane import ControlPlane, serving, wait_for
from tests.support.modal_stand_in import PAGE, ModalStandIn, StandInSandbox

POLL_S = 0.2
# A sandbox takes seconds to start and to end: every run has these rows, `make soak` has all.
MODAL_QUICK = frozenset(
    {
        *("none", "exit 3", "exit 7", "signal SIGKILL", "out of memory", "command not found"),
        *("image error", "preempted", "deadline", "cancel", "supervisor killed", "records lost"),
        *("exit while the controller is down 9", "controller killed after apply 1"),
    }
)
UNSAID = "Modal's wire has no word for it, and what a preempted sandbox leaves is not documented"


class ModalBackend(ServedBackend):
    name = "modal"
    image = "python:3.11"
    why_not = {
        "preempted": UNSAID,
        "preempted and requeued": UNSAID,
        "step daemon killed": "'supervisor killed' is this row: nothing else is above a rank",
    }

    def __init__(self, plane: ControlPlane, scratch: Path, modal: ModalStandIn, store: str) -> None:
        super().__init__(plane, scratch, store)
        self._modal = modal

    def _jobs(self, uid: str) -> list[StandInSandbox]:
        return self._modal.running(uid=uid)

    def _go_away(self, is_away: bool) -> None:
        (self._modal.down if is_away else self._modal.up)()

    def _run_out_of_memory(self, row: Row, name: str) -> None:
        self._modal.lose(self._job(name, row.at), "KERNEL_OOM_KILL")

    def _lose_host(self, row: Row, name: str) -> None:
        """Everything in the sandboxes is killed. What Modal says of that is arranged."""
        for box in self._jobs(self._plane.get(name).uid):
            self._modal.lose(box, "INTERNAL_FAILURE")

    def _spoil_listings(self) -> None:
        """Pages are short, and each second one is an error, for some looks."""
        spoiled = itertools.count()

        async def spoil(_: object) -> None:
            if next(spoiled) % 2:
                raise GRPCError(Status.INTERNAL, "the page was lost")

        self._modal.page = 2
        self._modal.before["SandboxListV2"] = spoil
        asked = self._modal.calls["SandboxListV2"]
        wait_for(lambda: self._modal.calls["SandboxListV2"] > asked + 12)
        self._modal.before.clear()
        self._modal.page = PAGE

    def _start_again(self, row: Row, name: str) -> None:
        box = self._jobs(self._plane.get(name).uid)[0]
        self._modal.run_again(box)
        wait_for(lambda: "has run, or runs" in box.log.read_text())


@contextlib.contextmanager
def modal_plane(folder: Path) -> Iterator[ModalBackend]:
    """A control plane whose ranks are sandboxes, with an S3 API for their records."""
    (folder / "scratch").mkdir()
    modal, s3 = ModalStandIn(), S3Server()
    modal.secrets["store"] = s3.environment
    modal.bad_images.add("nonesuch")
    bucket = f"conformance-{os.getpid()}"
    s3.make_bucket(bucket)
    options = {"secrets": ["store"], "python": "python", "poll_s": POLL_S}
    env = {
        **modal.environment,
        **s3.environment,
        "ATOLL_TEST_EXECUTOR": msgspec.json.encode(["modal", options]).decode(),
    }
    try:
        with serving(folder / "state", env=env) as plane:
            yield ModalBackend(plane, folder / "scratch", modal, f"s3://{bucket}")
    finally:
        modal.close()
        s3.stop()
