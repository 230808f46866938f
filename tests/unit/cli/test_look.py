"""`atoll logs` prints lines as they come: a log may be larger than the memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from atoll.cli import look, report
from atoll.core.status import LogLine
from atoll.sdk import logs as sdk_logs


@pytest.mark.parametrize("words", [(), ("--follow",), ("--json",)])
def test_a_line_is_printed_before_the_next_is_read(
    monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    printed: list[str] = []
    asked: list[Any] = []

    def lines(wire: object, position: sdk_logs.LogPosition) -> Iterator[LogLine]:
        asked.append(position.request["params"])
        for number in range(3):
            assert len(printed) == number, "what was read before is printed"
            yield LogLine(rank=0, text=f"line {number}", time=None)

    spec = SimpleNamespace(world_size=SimpleNamespace(max=1))
    training = SimpleNamespace(name="t", uid="u", last=SimpleNamespace(spec=spec))
    client = SimpleNamespace(get=lambda name: training, wire=None)
    monkeypatch.setattr(look, "Client", lambda: client)
    monkeypatch.setattr(sdk_logs, "lines", lines)
    monkeypatch.setattr(report.LinePrinter, "print", lambda self, line: printed.append(line.text))
    monkeypatch.setattr("atoll.cli.show.print_json", lambda line: printed.append(line.text))
    done = CliRunner().invoke(look.logs, ["t", *words], catch_exceptions=False)
    assert done.exit_code == 0
    assert printed == ["line 0", "line 1", "line 2"]
    assert asked
