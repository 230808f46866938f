"""Bodies of requests: bounded in size and number, and decoded outside of the event loop.

Only code that is sent with a training may be large. It is one string, so a body with more
punctuation than any spec has is refused while it arrives, before it costs memory or time.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import TypeVar

from starlette.requests import Request

from atoll.core.errors import TooLarge
from atoll.core.model import decode
from atoll.core.spec import MAX_SPEC_BYTES, TrainingSpec, check_spec_size

T = TypeVar("T")

MAX_BODY_BYTES = 64 * 2**20  # code of 48 MiB in base64
LARGE_BYTES = MAX_SPEC_BYTES
DIRECT_BYTES = 2**16  # decoding them takes less time than starting a thread
MAX_LARGE = 4  # in memory at once, and one of each namespace: 256 MiB

_MARKS = (b'"', b",", b":", b"[", b"{")
_TOKEN = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"\s*(:?)|[\[\]{}]')


class Bodies:
    """Limits the large bodies that are in memory at once."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MAX_LARGE)
        self._locks: dict[str, asyncio.Lock] = {}
        self._waiting: Counter[str] = Counter()

    async def read(
        self, request: Request, namespace: str, limit: int, turn: AsyncExitStack
    ) -> bytes:
        """Reads the body. Raises TooLarge as soon as it is, before all of it has arrived.

        A large one waits until it may be in memory; that ends with the stack `turn`.
        """
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > limit:
            raise TooLarge("body", f"{declared} bytes", _expected(limit))
        chunks: list[bytes] = []
        size = marks = 0
        async with aclosing(request.stream()) as stream:
            async for chunk in stream:
                if size <= LARGE_BYTES < size + len(chunk):
                    await turn.enter_async_context(self._turn(namespace))
                size += len(chunk)
                chunks.append(chunk)
                if size > limit:
                    raise TooLarge("body", f"more than {limit} bytes", _expected(limit))
                marks += sum(map(chunk.count, _MARKS))
                if marks > MAX_SPEC_BYTES:
                    field = await asyncio.to_thread(_last_field, b"".join(chunks))
                    raise TooLarge(
                        field or "body",
                        f"more than {MAX_SPEC_BYTES} bytes",
                        f"expected a spec of at most {MAX_SPEC_BYTES} bytes (1 MiB) without its "
                        f"source, got {declared or 'more'}",
                    )
        return b"".join(chunks)

    @contextlib.asynccontextmanager
    async def _turn(self, namespace: str) -> AsyncIterator[None]:
        lock = self._locks.setdefault(namespace, asyncio.Lock())
        self._waiting[namespace] += 1
        try:
            async with lock, self._slots:
                yield
        finally:
            self._waiting[namespace] -= 1
            if not self._waiting[namespace]:
                del self._locks[namespace], self._waiting[namespace]


async def decode_body(data: bytes, kind: type[T]) -> T:
    """Decodes the body, a large one in a thread. Raises ValidationError and TooLarge."""
    if len(data) <= DIRECT_BYTES:
        return decode(data, kind)
    return await asyncio.to_thread(_decode_large, data, kind)


def _decode_large(data: bytes, kind: type[T]) -> T:
    value = decode(data, kind)
    if isinstance(value, TrainingSpec):
        check_spec_size(value)
    return value


def _expected(limit: int) -> str:
    return f"expected a body of at most {limit} bytes ({limit / 2**20:g} MiB)"


def _last_field(prefix: bytes) -> str:
    """The top-level field at the end of this prefix of a body."""
    depth, field = 0, b""
    for token in _TOKEN.finditer(prefix):
        if token[0] in (b"[", b"{"):
            depth += 1
        elif token[0] in (b"]", b"}"):
            depth -= 1
        elif depth == 1 and token[2]:
            field = token[1]
    return field[:63].decode(errors="replace")
