"""Every operation of the SDK once, with no I/O: generators of effects.

Both drivers in `drive.py` run them, so sync and async cannot differ. Waits are here too: read,
test, then wait for the server to push a change; every state is tested, the last one too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import inf
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from atoll.core.errors import (
    BelowMinimumWorld,
    NotFound,
    Temporary,
    UDTerminalState,
    WorldSizeOutOfBounds,
)
from atoll.core.metrics import Metrics
from atoll.core.model import Model, decode, encode
from atoll.core.phase import Phase
from atoll.core.problem import Problem, error_of
from atoll.core.spec import TrainingSpec
from atoll.core.status import Event, RankExit, Training, TrainingList, Usage, WorldStatus
from atoll.sdk.effects import Flow, NextChange, Pause, Reply, Send

T = TypeVar("T")
Clock = Callable[[], float]

PATIENCE_S = 5.0  # how long one request is retried over a server that is not there
READ_S = 10.0
LAST_READ_S = 2.0  # for the read after a deadline
ALL = "/v1/trainings"


class Who(NamedTuple):
    """A training of one name may be deleted and another made: the uid tells them apart."""

    name: str
    uid: str

    @property
    def path(self) -> str:
        return f"{ALL}/{self.name}"


class EventPage(Model, frozen=True):
    items: list[Event]


def send(
    effect: Send, *, patience_s: float = PATIENCE_S, clock: Clock = time.monotonic
) -> Flow[bytes]:
    """The body of a 2xx answer; other answers are raised. What is temporary is retried."""
    until = clock() + patience_s
    for delay in _backoff():
        try:
            return accepted((yield effect))
        except Temporary:
            left = until - clock()
            if left <= 0:
                raise
            yield Pause(min(delay, left))
    raise AssertionError


def accepted(reply: Reply) -> bytes:
    if 200 <= reply.status < 300:
        return reply.body
    try:
        problem = decode(reply.body, Problem)
    except ValueError:
        text = reply.body[:200].decode(errors="replace")
        problem = Problem(title="HTTP error", status=reply.status, detail=text)
    error = error_of(problem)
    if reply.status >= 500 or reply.status == 429:
        raise Temporary(str(error))
    raise error


def _backoff() -> Iterator[float]:
    delay = 0.05
    while True:
        yield delay
        delay = min(delay * 2, 1.0)


def create(spec: TrainingSpec, key: str, *, clock: Clock = time.monotonic) -> Flow[Training]:
    """Stored once, however often the request has to be repeated."""
    effect = Send("POST", ALL, body=encode(spec), headers={"Idempotency-Key": key})
    return decode((yield from send(effect, clock=clock)), Training)


def get(
    name: str, *, patience_s: float = PATIENCE_S, clock: Clock = time.monotonic
) -> Flow[Training]:
    # A line that has gone silent must not hold a wait much longer than it was to last.
    effect = Send("GET", f"{ALL}/{name}", timeout=min(max(patience_s, LAST_READ_S), READ_S))
    return decode((yield from send(effect, patience_s=patience_s, clock=clock)), Training)


def read(
    who: Who, *, patience_s: float = PATIENCE_S, clock: Clock = time.monotonic
) -> Flow[Training]:
    training = yield from get(who.name, patience_s=patience_s, clock=clock)
    if training.uid != who.uid:
        raise NotFound("training", who.name)
    return training


def list_all(phase: str | None = None, prefix: str | None = None) -> Flow[list[Training]]:
    """Every page."""
    found: list[Training] = []
    query = {"limit": 500, "phase": phase, "prefix": prefix}
    while True:
        page = decode((yield from send(Send("GET", ALL, query))), TrainingList)
        found += page.items
        if page.continue_ is None:
            return found
        query = {**query, "continue": page.continue_}


def scale(last: Training, target: int) -> Flow[Training]:
    """Asked for, if the training is not over; a training known to be over is not even read."""
    size = last.spec.world_size
    if isinstance(target, bool) or not isinstance(target, int) or target < 1:
        raise WorldSizeOutOfBounds(target, size.min, size.max)
    who = Who(last.name, last.uid)
    if not last.status.phase.is_terminal:
        last = yield from read(who)
    if last.status.phase.is_terminal:
        raise UDTerminalState(last.status.phase.value, target)
    if not size.min <= target <= size.max:
        raise WorldSizeOutOfBounds(target, size.min, size.max)
    body = encode({"target": target})
    return decode((yield from send(Send("POST", f"{who.path}/scale", body=body))), Training)


def cancel(who: Who) -> Flow[Training]:
    yield from read(who)  # never cancel another training of the same name
    return decode((yield from send(Send("POST", f"{who.path}/cancel"))), Training)


def delete(who: Who, timeout: float, *, clock: Clock = time.monotonic) -> Flow[None]:
    """Asked for; then, for `timeout`, until the record is gone. Already gone is success."""
    deadline = clock() + timeout
    try:
        training = yield from read(who, clock=clock)
        yield from send(Send("DELETE", who.path), clock=clock)
        while (left := deadline - clock()) > 0:
            training = yield from _next(who, training, left, clock=clock)
    except NotFound:
        return


def events(who: Who, since: float | None) -> Flow[list[Event]]:
    effect = Send("GET", f"{who.path}/events", {"since": since})
    return decode((yield from send(effect)), EventPage).items


def metrics(who: Who) -> Flow[Metrics]:
    return decode((yield from send(Send("GET", f"{who.path}/metrics"))), Metrics)


def usage(who: Who) -> Flow[Usage]:
    return decode((yield from send(Send("GET", f"{who.path}/usage"))), Usage)


# What a state means to a wait: an answer, None for "not yet", or an error raised.
Settle = Callable[[Training], T | None]
OnRead = Callable[[Training], object]


def ignore(training: Training) -> None:
    """For those who do not care to see every state."""


def wait(
    who: Who,
    settle: Settle[T],
    *,
    timeout: float | None,
    needed: Callable[[Training], int],
    at_entry: OnRead = ignore,
    on_read: OnRead = ignore,
    clock: Clock = time.monotonic,
) -> Flow[T]:
    """Until `settle` answers. `timeout=0` reads once; a last read follows the deadline.

    `at_entry` sees the state the wait began with, unless the server could not be asked then;
    `on_read` sees every state.
    """
    deadline = inf if timeout is None else clock() + timeout
    try:
        training = yield from read(who, patience_s=0, clock=clock)
        on_read(training)
        at_entry(training)
    except Temporary:
        if deadline - clock() <= 0:
            raise
        training = yield from read(who, patience_s=deadline - clock(), clock=clock)
    while True:
        on_read(training)
        answer = settle(training)
        if answer is not None:
            return answer
        left = deadline - clock()
        if left <= 0:
            ready = training.status.world.ready
            raise BelowMinimumWorld(
                _late(training, needed(training), timeout or 0.0),
                ready=ready,
                required_min=needed(training),
                timeout=timeout,
                rank_exits=training.status.rank_exits,
            )
        training = yield from _next(who, training, left, settle, clock=clock)


def _next(
    who: Who,
    training: Training,
    left: float,
    settle: Settle[T] = ignore,
    *,
    clock: Clock = time.monotonic,
) -> Flow[Training]:
    """The next state there is to know: pushed, or read when nothing can be pushed.

    Once time is up it is read a last time; where even that fails, the old state is all there is.
    """
    deadline = clock() + left
    for delay in _backoff():
        change = yield NextChange(who.path, training.resource_version, deadline - clock())
        if change is not None:
            if change.training.uid != who.uid:
                raise NotFound("training", who.name)
            if change.is_removed and settle(change.training) is None:
                raise NotFound("training", who.name)
            return change.training  # type: ignore[no-any-return]
        patience_s = max(0.0, deadline - clock())
        try:
            found = yield from read(who, patience_s=patience_s, clock=clock)
        except Temporary:
            return training
        if found.resource_version != training.resource_version or clock() >= deadline:
            return found
        # Connected, but not for long: a server that drops every watch is not asked in a rush.
        yield Pause(min(delay, max(0.0, deadline - clock())))
    raise AssertionError


def wait_until_min_world(
    who: Who,
    timeout: float | None,
    *,
    on_read: OnRead = ignore,
    clock: Clock = time.monotonic,
) -> Flow[WorldStatus]:
    def settle(training: Training) -> WorldStatus | None:
        _raise_if_lost(training, training.spec.world_size.min)
        world = world_of(training)
        return world if _is_won(training) or world.ready >= world.min else None

    return (
        yield from wait(who, settle, timeout=timeout, needed=_min, on_read=on_read, clock=clock)
    )


def wait_until_target_world(
    who: Who,
    timeout: float | None,
    *,
    on_read: OnRead = ignore,
    clock: Clock = time.monotonic,
) -> Flow[WorldStatus]:
    def settle(training: Training) -> WorldStatus | None:
        _raise_if_lost(training, training.spec.world_size.target)
        world = world_of(training)
        is_fresh = training.status.observed_generation >= training.generation
        return world if _is_won(training) or (is_fresh and world.ready >= world.target) else None

    return (
        yield from wait(who, settle, timeout=timeout, needed=_target, on_read=on_read, clock=clock)
    )


def wait_until_complete(
    who: Who,
    timeout: float | None,
    *,
    on_read: OnRead = ignore,
    clock: Clock = time.monotonic,
) -> Flow[WorldStatus]:
    def refuse_if_over(training: Training) -> None:
        if training.status.phase.is_terminal:
            phase = training.status.phase.value
            raise UDTerminalState(phase, message=f"the training is already {phase}")

    return (
        yield from wait(
            who,
            _ended,
            timeout=timeout,
            needed=_target,
            at_entry=refuse_if_over,
            on_read=on_read,
            clock=clock,
        )
    )


def result(
    who: Who,
    timeout: float | None,
    *,
    on_read: OnRead = ignore,
    clock: Clock = time.monotonic,
) -> Flow[WorldStatus]:
    return (
        yield from wait(who, _ended, timeout=timeout, needed=_target, on_read=on_read, clock=clock)
    )


def _ended(training: Training) -> WorldStatus | None:
    _raise_if_lost(training, training.spec.world_size.target)
    return world_of(training) if _is_won(training) else None


def ended(training: Training) -> WorldStatus:
    """The result of a training known to be over."""
    answer = _ended(training)
    assert answer is not None
    return answer


def _min(training: Training) -> int:
    return training.spec.world_size.min


def _target(training: Training) -> int:
    return training.spec.world_size.target


def _is_won(training: Training) -> bool:
    return training.status.phase is Phase.SUCCEEDED


def _raise_if_lost(training: Training, required: int) -> None:
    status = training.status
    if status.phase not in (Phase.FAILED, Phase.CANCELLED):
        return
    raise BelowMinimumWorld(
        verdict(training),
        ready=status.world.ready,
        required_min=required,
        rank_exits=[rank_exit for rank_exit in status.rank_exits if rank_exit.is_failure],
    )


def verdict(training: Training) -> str:
    """Why it failed, the cause first, then each bad rank."""
    status = training.status
    bad = [rank_exit for rank_exit in status.rank_exits if rank_exit.is_failure]
    cause = status.root_cause
    if cause is not None:
        bad.sort(key=lambda rank_exit: rank_exit.rank != cause.rank)
    told = "; ".join(map(_exit_text, bad)) or status.message or status.reason
    text = f"training {training.name!r} {status.phase.value}" + (f": {told}" if told else "")
    if cause is not None and cause.log_tail:
        tail = "\n".join(f"  {line}" for line in cause.log_tail[-10:])
        text += f"\nlast lines of rank {cause.rank}:\n{tail}"
    return text


def _exit_text(bad: RankExit) -> str:
    code = "unknown" if bad.exit_code is None else bad.exit_code
    return f"rank {bad.rank}: exit_code={code} reason={bad.termination_reason}"


def _late(training: Training, needed: int, timeout: float) -> str:
    status = training.status
    waits = [f"rank {r.rank}: {r.message}" for r in status.ranks if r.phase == "Pending"][:3]
    text = f"training {training.name!r}: {status.world.ready} of {needed} ranks"
    text += f" ready after {timeout:g} s (phase {status.phase.value or 'not seen yet'})"
    return text + "".join(f"; {line}" for line in waits if not line.endswith(": "))


def world_of(training: Training) -> WorldStatus:
    """What was seen, against what is wanted now: a scale shows at once in `target`."""
    size = training.spec.world_size
    ready = training.status.world.ready
    return replace(
        training.status.world,
        target=size.target,
        min=size.min,
        max=size.max,
        below_minimum=ready < size.min,
    )
