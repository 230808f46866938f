"""Effects: what a flow asks its driver to do, and the one request: sent, retried and read.

A flow is a generator that yields effects; the driver performs each and sends back the answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeVar

import atoll
from atoll.core.clock import Retry
from atoll.core.errors import Permanent, Temporary, ValidationError
from atoll.core.model import decode
from atoll.core.problem import Problem, error_of

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
    path: tuple[str, ...] = ()  # folders from which ranks import modules


Effect = Send | NextChange | Pause | Pack
Flow = Generator[Effect, Any, T]


Clock = Callable[[], float]

FOREIGN = "this is not the answer of an atoll control plane; check its address"
PATIENCE_S = 5.0  # how long one request is retried while the server is not reachable
# The same where somebody else has to start the server: an upgrade takes minutes, and a rank that
# gives up loses more than one that waits.
ABSENT_S = 300.0


class NoControlPlane(Temporary):
    """None runs, and this process must not start one."""


def send(
    effect: Send, *, patience_s: float | None = None, clock: Clock = time.monotonic
) -> Flow[bytes]:
    """The body of a 2xx answer; other answers are raised. Temporary errors are retried for
    `patience_s`, or as long as is usual, unless the server asks for a longer pause."""
    limit_s = PATIENCE_S if patience_s is None else patience_s
    retry = new_retry(limit_s, clock)
    while True:
        try:
            reply = yield effect
        except Temporary as error:
            trouble, server_pause_s = error, 0.0
            if isinstance(error, NoControlPlane) and patience_s is None and limit_s != ABSENT_S:
                limit_s = ABSENT_S
                retry = new_retry(limit_s, clock)
        else:
            try:
                return check_reply(reply)
            except Temporary as error:
                trouble, server_pause_s = error, error.retry_after_s
        pause_s = retry.pause_s(server_pause_s)
        if pause_s is None or server_pause_s > limit_s:
            raise trouble
        yield Pause(pause_s)


def check_reply(reply: Reply) -> bytes:
    if 200 <= reply.status < 300:
        return reply.body
    try:
        problem = decode(reply.body, Problem)
    except ValueError:
        text = " ".join(reply.body[:80].decode(errors="replace").split())
        problem = Problem(title="HTTP error", status=reply.status, detail=f"{FOREIGN}: {text!r}")
    error = error_of(problem)
    if reply.status >= 500 or reply.status == 429:
        raise Temporary(str(error), problem.retry_after_s or 0.0)
    raise error


def decode_answer(body: bytes, kind: type[T]) -> T:
    """The body as a `kind`. Raises Permanent, as a bad answer is no fault of the caller's input."""
    try:
        return decode(body, kind)
    except ValidationError as error:
        text = " ".join(body[:80].decode(errors="replace").split())
        raise Permanent(f"{FOREIGN}: {text!r} ({error.field}: {error.expected})") from error


def new_retry(patience_s: float, clock: Clock) -> Retry:
    return Retry(0.05, 1.0, patience_s=patience_s, clock=clock)


class OtherRelease(UserWarning):
    """The control plane in use has another release than this client."""


def describe_difference(release: str | None) -> str:
    """A sentence on how the release of the control plane differs; empty if it does not."""
    ours = atoll.__version__
    return "" if release == ours else f"the control plane is atoll {release}, this is atoll {ours}"
