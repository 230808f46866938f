"""What a flow asks its driver for. A flow is a generator: it yields these and is sent answers."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Send(NamedTuple):
    """One request. Answered with a Reply; a lost connection is thrown as Temporary."""

    method: str
    path: str
    query: Mapping[str, Any] = {}
    body: bytes | None = None
    headers: Mapping[str, str] = {}
    timeout: float | None = None  # for the answer; the driver's own if there is none


class Reply(NamedTuple):
    status: int
    body: bytes
    release: str | None = None  # of the control plane, if it says so


class NextChange(NamedTuple):
    """The next change after that version. Answered with a Change, or None when there is no more.

    None says nothing about why: time is up, or the connection broke. The flow reads again.
    """

    path: str
    after: int
    timeout: float


class Pause(NamedTuple):
    seconds: float


Effect = Send | NextChange | Pause
Flow = Generator[Effect, Any, T]
