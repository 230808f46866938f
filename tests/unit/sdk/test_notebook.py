"""A training is shown until it is over or gone, and a control plane that is away is waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from atoll.core.errors import AtollError, NotFound, Temporary
from atoll.core.phase import Phase
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Status, Training
from atoll.sdk import notebook


def state(phase: Phase) -> Training:
    size = WorldSize(min=1, target=1, max=1)
    spec = TrainingSpec(name="run", command=["true"], world_size=size)
    return Training(namespace="n", uid="u", spec=spec, status=Status(phase=phase))


class Handle:
    """What it reads next is written down beforehand."""

    name = "run"

    def __init__(self, *reads: Training | AtollError) -> None:
        self.last = state(Phase.PENDING)
        self._reads: Iterator[Training | AtollError] = iter(reads)
        self._client = self

    def run(self, flow: Any) -> Any:
        raise Temporary("no figures")

    def refresh(self) -> Training:
        read = next(self._reads)
        if isinstance(read, AtollError):
            raise read
        self.last = read
        return read


def shown(handle: Handle) -> list[tuple[str, str]]:
    drawn: list[tuple[str, str]] = []

    def draw(training: Training, newest_metrics: object, message: str) -> None:
        drawn.append((training.status.phase.value, message))

    notebook.follow(handle, draw, 1.0, pause=lambda seconds: None)  # type: ignore[arg-type]
    return drawn


def test_it_is_shown_to_its_end_also_over_a_control_plane_that_was_away() -> None:
    handle = Handle(state(Phase.READY), Temporary("refused"), state(Phase.SUCCEEDED))
    assert shown(handle) == [
        ("ready", ""),
        ("ready", "not connected: refused"),
        ("succeeded", ""),
    ]


def test_one_that_is_deleted_ends_the_display() -> None:
    [(phase, message)] = shown(Handle(NotFound("training", "run")))
    assert phase == "pending"
    assert "deleted" in message


def test_outside_of_a_notebook_each_change_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    handle = Handle(state(Phase.PENDING), state(Phase.SUCCEEDED))
    notebook.show(handle, wait=True, every_s=0.0)  # type: ignore[arg-type]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("run pending")
    assert lines[1].startswith("run succeeded")
