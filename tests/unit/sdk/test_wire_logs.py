"""A followed log over the death of a server, cut at every line of it: each line comes once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from atoll.core.model import encode
from atoll.core.status import LogLine
from atoll.logs.files import read_lines
from atoll.logs.segments import LogWriter
from atoll.sdk import wire
from atoll.sdk.flows import TrainingRef
from atoll.sdk.wire import LogPosition, Wire
from atoll.server.handlers.logs import read_offsets

# What each rank writes, in this order, each a second after the one before. Rank 2 has no times.
WRITES = [
    *((0, b"0\n"), (1, b"0\n1\n"), (2, b"0\n"), (0, b"1\n2"), (1, b"2\n3\n")),
    *((0, b"\n3\n"), (2, b"1\n2\n"), (1, b"4"), (0, b"4\n"), (1, b"\n"), (2, b"3\n4\n")),
]
WHOLE = {rank: [str(number) for number in range(5)] for rank in range(3)}


class Killed(Exception):
    pass


def answer(folder: Path, offsets: Mapping[int, int], is_over: Callable[[], bool]) -> list[bytes]:
    """What a server sends that is asked to follow; `is_over` is called before each look."""

    async def read() -> list[bytes]:
        sent: list[bytes] = []
        with contextlib.suppress(Killed):
            async for line in read_lines(folder, offsets, ranks=None, follow=is_over):
                sent.append(encode(line) + b"\n")
        return sent

    return asyncio.run(read())


def first_answer(folder: Path, written: int) -> list[bytes]:
    """That of one that is killed: it sees so many writes come, one by one, and no end."""
    numbers = iter(range(written))

    def is_over() -> bool:
        number = next(numbers, None)
        if number is None:
            raise Killed
        write(folder, number, number + 1)
        return False

    return answer(folder, {}, is_over)


class DyingServer:
    """Sends `first` and is gone; the next one goes on after the places it is asked for."""

    def __init__(self, first: bytes, folder: Path) -> None:
        self.endpoint = SimpleNamespace(lost=lambda: None)
        self._first: bytes | None = first
        self._folder = folder

    def client(self) -> DyingServer:
        return self

    @contextlib.contextmanager
    def stream(self, *_: Any, params: Mapping[str, Any], **__: Any) -> Iterator[Any]:
        first, self._first = self._first, None

        def chunks() -> Iterator[bytes]:
            if first is not None:
                yield first
                raise ConnectionResetError
            offsets = read_offsets(params.get("offsets"))
            yield from answer(self._folder, offsets, lambda: True)

        yield SimpleNamespace(status_code=200, iter_bytes=chunks)


def write(folder: Path, start: int, end: int) -> None:
    for number, (rank, data) in enumerate(WRITES[start:end], start):
        log = LogWriter(folder / str(rank), clock=lambda at=number: float(at))  # type: ignore[misc]
        log.write(data)
        log.close()
        if rank == 2:
            for times in (folder / "2").glob("*.times"):
                times.unlink()


def follow(server: DyingServer) -> list[LogLine]:
    position = LogPosition(TrainingRef("a", "u"), None, None, follow=True)
    return list(wire.read_log(cast(Wire, server), position))


@pytest.mark.parametrize("written", range(len(WRITES) + 1))
def test_each_line_comes_once_wherever_the_server_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    monkeypatch.setattr(wire, "LOG_RETRY_S", 0)
    sent = first_answer(tmp_path, written)
    write(tmp_path, written, len(WRITES))
    for count in range(len(sent) + 1):
        whole = b"".join(sent[:count])
        halves = (
            [sent[count][: len(sent[count]) // 2], sent[count][:-1]] if count < len(sent) else []
        )
        for half in (b"", *halves):
            lines = follow(DyingServer(whole + half, tmp_path))
            by_rank = {rank: [each.text for each in lines if each.rank == rank] for rank in WHOLE}
            assert by_rank == WHOLE, (count, half)
