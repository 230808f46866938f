"""`atoll logs` prints lines as they come."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from atoll.cli import follow, trainings
from atoll.core.status import LogLine
from atoll.sdk import wire as sdk_wire


@pytest.mark.parametrize("words", [(), ("--follow",), ("--json",)])
def test_a_line_is_printed_before_the_next_is_read(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    printed: list[str] = []
    asked: list[Any] = []

    def lines(wire: object, position: sdk_wire.LogPosition) -> Iterator[LogLine]:
        asked.append(position.request["params"])
        for number in range(3):
            assert len(printed) == number, "what was read before is printed"
            yield LogLine(rank=0, text=f"line {number}", time=None)

    spec = SimpleNamespace(world_size=SimpleNamespace(max=1))
    training = SimpleNamespace(name="t", uid="u", last=SimpleNamespace(spec=spec, name="t"))
    client = SimpleNamespace(get=lambda name: training, wire=None)
    monkeypatch.setattr(trainings, "Client", lambda: client)
    monkeypatch.setattr(sdk_wire, "read_log", lines)
    monkeypatch.setattr(follow.LinePrinter, "print", lambda self, line: printed.append(line.text))
    monkeypatch.setattr("atoll.cli.trainings.print_json", lambda line: printed.append(line.text))
    done = CliRunner().invoke(trainings.logs, ["t", *words], catch_exceptions=False)
    assert done.exit_code == 0
    assert printed == ["line 0", "line 1", "line 2"]
    assert asked
