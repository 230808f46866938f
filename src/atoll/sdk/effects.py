"""Effects: what a flow asks its driver to do.

A flow is a generator that yields effects; the driver performs each and sends back the answer.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class Send(NamedTuple):
    """One request. The answer is a Reply; a lost connection is thrown as Temporary."""

    method: str
    path: str
    query: Mapping[str, Any] = {}
    body: bytes | None = None
    headers: Mapping[str, str] = {}
    timeout: float | None = None  # seconds to wait for the answer; None for the driver's default


class Reply(NamedTuple):
    status: int
    body: bytes
    release: str | None = None  # of the control plane, if the answer names it


class NextChange(NamedTuple):
    """The next change after a version. The answer is a Change, or None when there is no more.

    None means that time is up or that the connection broke; the flow then reads again.
    """

    path: str
    after: int
    timeout: float


class Pause(NamedTuple):
    seconds: float


class Pack(NamedTuple):
    """The code below a directory of the caller. The answer is a Code; None if there is none."""

    root: str
    path: tuple[str, ...] = ()  # folders in which ranks look for modules


Effect = Send | NextChange | Pause | Pack
Flow = Generator[Effect, Any, T]
