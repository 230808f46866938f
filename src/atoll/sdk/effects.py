"""Effects: what a flow asks its driver to do, and the one request: sent, retried and read.

A flow is a generator that yields effects; the driver performs each and sends back the answer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

import atoll
from atoll.core.errors import Permanent, Temporary, ValidationError
from atoll.core.model import UNKNOWN_FIELD, decode
from atoll.core.problem import Problem, error_of
from atoll.core.retry import Retry

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
    error = error_of(explain_problem(problem, reply.release))
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


HEADER = "Atoll-Release"  # of every answer
SILENT = "0.1"  # the release of a control plane that does not name one


class OtherRelease(UserWarning):
    """The control plane in use has another release than this client."""


def describe_difference(release: str | None) -> str:
    """A sentence on how the release of the control plane differs; empty if it does not."""
    theirs, ours = release or SILENT, atoll.__version__
    return "" if theirs == ours else f"the control plane is atoll {theirs}, this is atoll {ours}"


def is_older(release: str | None) -> bool:
    return _numbers(release or SILENT) < _numbers(atoll.__version__)


def explain_problem(problem: Problem, release: str | None) -> Problem:
    """The problem; an unknown field or path is explained by the difference of releases, if any."""
    is_foreign_path = problem.type == "about:blank" and problem.status in (404, 405)
    text = describe_difference(release)
    if not text or not (is_foreign_path or problem.expected == UNKNOWN_FIELD):
        return problem
    text += "; restart it with this one" if is_older(release) else "; install that one here"
    expected = None if problem.expected is None else f"{problem.expected} ({text})"
    return replace(problem, detail=f"{problem.detail} ({text})", expected=expected)


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]
