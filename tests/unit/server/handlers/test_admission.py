"""What is refused before a training is stored."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.core.errors import Conflict, ValidationError
from atoll.core.phase import Phase
from atoll.core.ports import Executor, Snapshot
from atoll.core.spec import Code, RendezvousSpec, TrainingSpec, WorldSize
from atoll.core.status import Status, Training
from atoll.server.handlers.admission import Setup, admit, check_run


def test_somebody_elses_code_cannot_be_had_by_its_digest() -> None:
    code = Code(content=b"an archive", size=10, unpacked=30, files=2).by_digest()
    spec = TrainingSpec(
        name="a", command=["x"], code=code, world_size=WorldSize(min=1, target=1, max=1)
    )
    plane: Any = None
    with pytest.raises(ValidationError, match="expected the archive itself"):
        admit(spec, plane, "default")


def one(name: str, **more: Any) -> TrainingSpec:
    size = WorldSize(min=1, target=1, max=1)
    return TrainingSpec(name=name, command=["x"], executor="local", world_size=size, **more)


class Stored:
    """The store of a plane with one training."""

    def __init__(self, spec: TrainingSpec, phase: Phase) -> None:
        status = Status(phase=phase)
        self._stored = Training(namespace="default", uid="u", spec=spec, status=status)
        self.store = self

    async def snapshot(self) -> Snapshot:
        return Snapshot(1, [self._stored], [])


def test_a_run_of_a_training_that_has_not_ended_is_in_use() -> None:
    first, uri = one("first", run_id="exp"), RendezvousSpec(uri="s3://b/x")
    running: Any = Stored(first, Phase.READY)
    with pytest.raises(Conflict, match="run_id 'exp' is in use by the training 'first'.* ready"):
        asyncio.run(check_run(one("second", run_id="exp"), running, "default"))
    for other in (
        one("second", run_id="else"),
        one("second"),
        one("second", run_id="exp", rendezvous=uri),
        first,
    ):
        asyncio.run(check_run(other, running, "default"))
    ended: Any = Stored(first, Phase.FAILED)
    asyncio.run(check_run(one("second", run_id="exp"), ended, "default"))


def test_a_rank_that_stands_still_is_started_again_where_the_executor_can() -> None:
    class Restarting(Executor):
        SUPPORTS = ()

    plane: Any = SimpleNamespace(executors={"local": Executor()}, setup=Setup())
    spec = one("a", stall_s=5.0, stall_restart=True, max_restarts=1)
    with pytest.raises(ValidationError, match="stall_restart.*cannot restart stalled ranks"):
        admit(spec, plane, "default")
    assert admit(one("a", stall_s=5.0), plane, "default").stall_s == 5.0, "it may be told of"
    plane.executors["local"] = Restarting()
    assert admit(spec, plane, "default").stall_restart
