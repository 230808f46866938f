"""Server-sent events, as far as the watch uses them."""

from __future__ import annotations

from collections.abc import Iterator

from atoll.core.errors import Temporary
from atoll.core.model import decode
from atoll.core.ports import Change
from atoll.core.problem import Problem
from atoll.core.status import Training


class Parser:
    """Chunks in, changes out. Raises Temporary when the server ends the stream with an error."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[Change]:
        *whole, self._rest = (self._rest + chunk).split(b"\n\n")
        for block in whole:
            change = _change(block)
            if change is not None:
                yield change


def _change(block: bytes) -> Change | None:
    fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line)
    if b"data" not in fields or b"event" not in fields:
        return None
    if fields[b"event"] == b"error":
        raise Temporary(decode(fields[b"data"], Problem).detail)
    return Change(
        version=int(fields[b"id"]),
        training=decode(fields[b"data"], Training),
        is_removed=fields[b"event"] == b"removed",
    )
