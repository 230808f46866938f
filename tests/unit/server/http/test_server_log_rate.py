"""Equal messages are written seldom, and counted."""

from __future__ import annotations

import logging

from atoll.server.http.server import MAX_EQUAL, MAX_TRACED, RateLimitFilter


def record(text: str, *, is_traced: bool = False) -> logging.LogRecord:
    trouble = OSError("no files")
    traced = (OSError, trouble, None) if is_traced else None
    return logging.LogRecord("asyncio", logging.ERROR, "", 1, "accept: %s", (text,), traced)


def test_a_message_that_repeats_is_dropped_and_then_counted() -> None:
    now = [0.0]
    seldom = RateLimitFilter(lambda: now[0])
    assert sum(seldom.filter(record("a")) for _ in range(80_000)) == MAX_EQUAL
    other = logging.LogRecord("asyncio", logging.ERROR, "", 1, "something else", (), None)
    assert seldom.filter(other)
    now[0] = 20.0
    late = record("b")
    assert seldom.filter(late)
    assert late.getMessage() == f"accept: b ({80_000 - MAX_EQUAL} more like this before)"


def test_tracebacks_are_rarer() -> None:
    seldom = RateLimitFilter(lambda: 0.0)
    assert sum(seldom.filter(record("a", is_traced=True)) for _ in range(1000)) == MAX_TRACED


def test_what_is_remembered_is_bounded() -> None:
    seldom = RateLimitFilter(lambda: 0.0)
    for number in range(5000):
        seldom.filter(logging.LogRecord("a", logging.ERROR, "", 1, f"text {number}", (), None))
    assert len(seldom._counts) <= 1000
