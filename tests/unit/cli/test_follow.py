"""Following a training whose output is taken slowly."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from atoll.cli.follow import LINES_AHEAD, Following
from atoll.core.phase import Phase
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import LogLine, Status, Training

SPEC = TrainingSpec(name="t", world_size=WorldSize(min=1, target=1, max=1), command=["true"])
OVER = Training(namespace="default", uid="u", spec=SPEC, status=Status(phase=Phase.SUCCEEDED))


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_no_more_is_read_ahead_than_fits_and_no_line_is_lost() -> None:
    made: list[int] = []
    printed: list[str] = []

    class Talkative:
        last = OVER

        def stream_logs(self) -> Iterator[LogLine]:
            for number in range(3 * LINES_AHEAD):
                made.append(number)
                yield LogLine(rank=0, text=str(number))

    class SlowReport:
        def line(self, line: LogLine) -> None:
            if not printed:  # the first line is not taken before the reader has come to a halt
                deadline = time.monotonic() + 30
                while len(made) <= LINES_AHEAD and time.monotonic() < deadline:
                    time.sleep(0.01)
                assert len(made) == LINES_AHEAD + 1
            printed.append(line.text)

        def __getattr__(self, name: str) -> Any:
            return lambda *_: None

    class NoClient:
        def run(self, flow: Any) -> Training:
            return OVER

    report: Any = SlowReport()
    training: Any = Talkative()
    client: Any = NoClient()
    assert Following(None).run(client, training, report) == 0
    assert printed == [str(number) for number in range(3 * LINES_AHEAD)]
