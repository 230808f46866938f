"""One request: how it is sent, when it is retried, and how its answer or error is read."""

from __future__ import annotations

import time
from collections.abc import Callable

from atoll.core.errors import Permanent, Temporary, ValidationError
from atoll.core.model import decode
from atoll.core.problem import Problem, error_of
from atoll.core.retry import Retry
from atoll.sdk.effects import Flow, Pause, Reply, Send, T
from atoll.sdk.release import explained

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
    `patience_s`, or as long as is usual, unless the server says that it will take longer."""
    limit_s = PATIENCE_S if patience_s is None else patience_s
    retry = new_retry(limit_s, clock)
    while True:
        try:
            reply = yield effect
        except Temporary as error:
            trouble, asked_s = error, 0.0
            if isinstance(error, NoControlPlane) and patience_s is None and limit_s != ABSENT_S:
                limit_s = ABSENT_S
                retry = new_retry(limit_s, clock)
        else:
            try:
                return accepted(reply)
            except Temporary as error:
                trouble, asked_s = error, error.retry_after_s
        pause_s = retry.pause_s(asked_s)
        if pause_s is None or asked_s > limit_s:
            raise trouble
        yield Pause(pause_s)


def accepted(reply: Reply) -> bytes:
    if 200 <= reply.status < 300:
        return reply.body
    try:
        problem = decode(reply.body, Problem)
    except ValueError:
        text = " ".join(reply.body[:80].decode(errors="replace").split())
        problem = Problem(title="HTTP error", status=reply.status, detail=f"{FOREIGN}: {text!r}")
    error = error_of(explained(problem, reply.release))
    if reply.status >= 500 or reply.status == 429:
        raise Temporary(str(error), problem.retry_after_s or 0.0)
    raise error


def answered(body: bytes, kind: type[T]) -> T:
    """The body as a `kind`. Raises Permanent, as a bad answer is no fault of the caller's input."""
    try:
        return decode(body, kind)
    except ValidationError as error:
        text = " ".join(body[:80].decode(errors="replace").split())
        raise Permanent(f"{FOREIGN}: {text!r} ({error.field}: {error.expected})") from error


def new_retry(patience_s: float, clock: Clock) -> Retry:
    return Retry(0.05, 1.0, patience_s=patience_s, clock=clock)
