r"""Splits a stream of bytes into whole lines. Only "\n" ends a line.

`str.splitlines`, and the line readers of HTTP clients that use it, end one at eight other
characters too, some of which JSON leaves as they are.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator


class Lines:
    def __init__(self) -> None:
        self._partial = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that are complete after `data`, without their newlines."""
        *complete, self._partial = (self._partial + data).split(b"\n")
        return [line.decode(errors="replace") for line in complete]

    def last(self) -> list[str]:
        """The unfinished line after the last newline, if there is one."""
        return [self._partial.decode(errors="replace")] if self._partial else []


def split_lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n") if text else []


def lines_of(chunks: Iterable[bytes]) -> Iterator[str]:
    lines = Lines()
    for chunk in chunks:
        yield from lines.feed(chunk)
    yield from lines.last()


async def alines_of(chunks: AsyncIterable[bytes]) -> AsyncGenerator[str, None]:
    lines = Lines()
    async for chunk in chunks:
        for line in lines.feed(chunk):
            yield line
    for line in lines.last():
        yield line
