"""Flows: every operation of the SDK once, as a generator of effects, without I/O.

The blocking and the async driver in `client.py` run the same flows, so they cannot differ. A wait
reads the training, tests it, then waits until the server pushes a change; it tests every state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar

from msgspec.structs import replace

from atoll.core.describe import describe_failure, describe_ranks, waiting_lines
from atoll.core.errors import (
    AtollError,
    BelowMinimumWorld,
    NotFound,
    ResultError,
    Temporary,
    UDTerminalState,
    ValidationError,
    WorldSizeOutOfBounds,
)
from atoll.core.executors import ExecutorList, Limits, executor_problem
from atoll.core.metrics import LatestMetricList, MetricSeriesList
from atoll.core.model import Model, encode
from atoll.core.phase import ConditionType, Phase
from atoll.core.ports import optional_fields
from atoll.core.rank_access import (
    ExecRequest,
    ExecResult,
    ExecTarget,
    KillRequest,
    KillResult,
    StackList,
    StackRequest,
)
from atoll.core.ranks import AttemptList, exception_of
from atoll.core.rounds import RoundItem, RoundList, TrainingWithRounds
from atoll.core.settings import Setting, setting_text
from atoll.core.spec import TrainingSpec, check_spec_size
from atoll.core.status import (
    UNSUPPORTED_FIELDS,
    AttemptStatus,
    Event,
    Training,
    TrainingList,
    TrainingStats,
    WorldStatus,
)
from atoll.core.text import limited_spans
from atoll.core.weights import ChannelList
from atoll.sdk.effects import (
    Clock,
    Flow,
    NextChange,
    Pack,
    Pause,
    Send,
    check_reply,
    decode_answer,
    new_retry,
    send,
)

T = TypeVar("T")

READ_S = 10.0  # one answer of a busy control plane; a lost one is asked for again
STACKS_S = 120.0  # for the stacks of a thousand ranks, eight at a time
WATCH_S = 86_400.0  # the longest single watch: threads and the server refuse larger timeouts
FOREVER_S = 1e12  # what a clock can still add without an overflow
LAST_READ_S = 2.0  # for the read after a deadline: a wait ends that much late at the most
ALL = "/v1/trainings"


class TrainingRef(NamedTuple):
    """One training. A name may be used again after a delete; the uid is unique."""

    name: str
    uid: str

    @property
    def path(self) -> str:
        return f"{ALL}/{self.name}"


class EventPage(Model, frozen=True):
    items: list[Event]


ROUNDS_A_PAGE = 2_000  # as the server allows; about 1 MB

# What a state means to a wait: its result, or None for "not yet" and for a failure.
Until = Callable[[Training], T | None]
OnRead = Callable[[Training], object]


def ignore(training: Training) -> None:
    """The callback that does nothing."""


def create(
    spec: TrainingSpec,
    key: str,
    *,
    headers: Mapping[str, str] | None = None,
    clock: Clock = time.monotonic,
) -> Flow[Training]:
    """The stored training. It is stored once, however often the request is repeated."""
    check_spec_size(spec)
    effect = Send(
        "POST", ALL, body=encode(spec), headers={"Idempotency-Key": key, **(headers or {})}
    )
    return decode_answer((yield from send(effect, clock=clock)), Training)


def deploy(
    spec: TrainingSpec, shared: Mapping[str, Any], key: str, pack: Pack | None = None
) -> Flow[Training]:
    """Store the training, and log which of its fields the executor does not support."""
    stored = yield from _stored(spec, shared, key, pack)
    if optional_fields(spec):
        try:
            stored_events = yield from events(TrainingRef(stored.name, stored.uid), None)
        except AtollError:  # it is stored all the same
            return stored
        for event in stored_events:
            if event.reason == UNSUPPORTED_FIELDS:
                import logging  # imported here: it loads slowly

                logging.getLogger(__name__).warning("atoll: %s: %s", stored.name, event.message)
    return stored


def _stored(
    spec: TrainingSpec, shared: Mapping[str, Any], key: str, pack: Pack | None = None
) -> Flow[Training]:
    """The stored training; with `shared`, the fields of a rank that runs on the caller's machine,
    or with the code that `pack` names if ranks run elsewhere.

    A control plane at a local address may run ranks elsewhere: the address may be a port that
    is forwarded to a cluster. So `local` is tried first; the server refuses it if it has no
    such executor or if another is the default.
    """
    if shared:
        headers = {} if spec.executor else {"Atoll-If-Default": "local"}
        local = replace(spec, executor="local", **shared)
        try:
            return (yield from create(local, key, headers=headers))
        except ValidationError as error:
            if spec.executor is not None or error.field != "executor":
                raise
    code = None if pack is None else (yield pack)
    if code is None:
        return (yield from create(spec, key))
    try:
        return (yield from create(replace(spec, code=code, working_dir=None), key))
    except ValidationError as error:
        if error.field != "code":
            raise
        import logging  # imported here: it loads slowly

        logging.getLogger(__name__).warning("no code is sent: %s", error.expected)
    return (yield from create(spec, key))


def get(name: str) -> Flow[Training]:
    return decode_answer(
        (yield from send(Send("GET", f"{ALL}/{name}", timeout=READ_S))), TrainingWithRounds
    )


def read(
    ref: TrainingRef,
    *,
    patience_s: float | None = None,
    answer_s: float = READ_S,
    clock: Clock = time.monotonic,
) -> Flow[Training]:
    """The training as it is now. `answer_s` limits one answer, `patience_s` all attempts."""
    effect = Send("GET", ref.path, timeout=answer_s)
    answer = yield from send(effect, patience_s=patience_s, clock=clock)
    training = decode_answer(answer, TrainingWithRounds)
    if training.uid != ref.uid:
        raise NotFound("training", ref.name)
    return training


def executors() -> Flow[ExecutorList]:
    effect = Send("GET", "/v1/executors", timeout=READ_S)
    return decode_answer((yield from send(effect)), ExecutorList)


def set_limits(executor: str, limits: Limits) -> Flow[ExecutorList]:
    effect = Send("PATCH", f"/v1/executors/{executor}", body=encode(limits))
    return decode_answer((yield from send(effect)), ExecutorList)


Conditions = Mapping[str, Setting] | Sequence[str] | str | None


def conditions_of(conditions: Conditions) -> list[str] | None:
    """`{"lr": 0.1}` as `["lr=0.1"]`; a list of conditions such as `lr>=0.1` stays as it is."""
    if isinstance(conditions, Mapping):
        return [f"{name}={setting_text(value)}" for name, value in conditions.items()]
    return [conditions] if isinstance(conditions, str) else list(conditions or ()) or None


def list_all(
    phase: str | None = None,
    prefix: str | None = None,
    *,
    labels: Conditions = None,
    settings: Conditions = None,
    metrics: Conditions = None,
    sort: str | None = None,
) -> Flow[list[Training]]:
    """The trainings of all pages."""
    trainings: list[Training] = []
    query: dict[str, Any] = {
        "limit": 500,
        "phase": phase,
        "prefix": prefix,
        "label": conditions_of(labels),
        "setting": conditions_of(settings),
        "metric": conditions_of(metrics),
        "sort": sort,
    }
    while True:
        page = decode_answer((yield from send(Send("GET", ALL, query))), TrainingList)
        trainings += page.items
        if page.continue_ is None:
            return trainings
        query = {**query, "continue": page.continue_}


def scale(last: Training, target: int) -> Flow[Training]:
    """Asks for `target` ranks. Raises UDTerminalState, without a request if `last` is over."""
    size = last.spec.world_size
    if isinstance(target, bool) or not isinstance(target, int) or target < 1:
        raise WorldSizeOutOfBounds(target, size.min, size.max)
    ref = TrainingRef(last.name, last.uid)
    if not last.status.phase.is_terminal:
        last = yield from read(ref)
    if last.status.phase.is_terminal:
        raise UDTerminalState(last.status.phase.value, target)
    if not size.min <= target <= size.max:
        raise WorldSizeOutOfBounds(target, size.min, size.max)
    body = encode({"target": target})
    return decode_answer((yield from send(Send("POST", f"{ref.path}/scale", body=body))), Training)


def rerun(last: Training, changes: Mapping[str, Any], key: str) -> Flow[Training]:
    """Asks for a copy of the training; `changes` are the fields of the request that are set."""
    ref = TrainingRef(last.name, last.uid)
    yield from read(ref)  # never run another training of the same name
    body = encode({name: value for name, value in changes.items() if value is not None})
    effect = Send("POST", f"{ref.path}/rerun", body=body, headers={"Idempotency-Key": key})
    return decode_answer((yield from send(effect)), Training)


def cancel(ref: TrainingRef) -> Flow[Training | None]:
    """Asks to cancel. Returns None if the training no longer exists."""
    try:
        yield from read(ref)  # never cancel another training of the same name
        return decode_answer((yield from send(Send("POST", f"{ref.path}/cancel"))), Training)
    except NotFound:
        return None


def delete(
    ref: TrainingRef, timeout: float, *, on_read: OnRead = ignore, clock: Clock = time.monotonic
) -> Flow[None]:
    """Delete the training and wait up to `timeout` for its removal. A missing one is success."""
    deadline = clock() + min(timeout, FOREVER_S)
    try:
        training = yield from read(ref, clock=clock)
        yield from send(Send("DELETE", ref.path), clock=clock)
        while (left_s := deadline - clock()) > 0:
            training = yield from _next(ref, training, left_s, clock=clock)
            on_read(training)
            if kind := executor_problem(training):
                why = (
                    "is not configured"
                    if kind == ConditionType.EXECUTOR_MISSING
                    else "cannot be reached"
                )
                raise Temporary(
                    f"{ref.name!r} is not removed yet: its executor {training.executor!r} {why}, "
                    "and only that executor can stop its ranks; the training is removed once it "
                    "is back"
                )
    except NotFound:
        return
    if timeout > 0:
        alive = [r.rank for r in training.status.ranks if r.is_alive]
        ranks = f": still being stopped: {describe_ranks(alive)}" if alive else ""
        raise Temporary(
            f"{ref.name!r} is not removed after {timeout:g} s{ranks}; the removal continues"
        )


def events(ref: TrainingRef, since: float | None) -> Flow[list[Event]]:
    effect = Send("GET", f"{ref.path}/events", {"since": since, "uid": ref.uid})
    return decode_answer((yield from send(effect)), EventPage).items


def attempts(ref: TrainingRef, rank: int | None) -> Flow[list[AttemptStatus]]:
    effect = Send("GET", f"{ref.path}/attempts", {"rank": rank, "uid": ref.uid})
    return decode_answer((yield from send(effect)), AttemptList).items


class ResultAnswer(Model, frozen=True):
    """The result of a rank as the server sends it; `error` says why there is none."""

    encoding: str
    value: Any = None
    payload: str | None = None
    error: str | None = None


def result(ref: TrainingRef, rank: int, *, allow_pickle: bool = False) -> Flow[Any]:
    """What the rank returned or set last; None if that is nothing. Raises ResultError with the
    reason if it cannot be read, and for a pickle that is not allowed."""
    effect = Send("GET", f"{ref.path}/result", {"rank": rank, "uid": ref.uid})
    try:
        answer = decode_answer((yield from send(effect)), ResultAnswer)
    except NotFound as error:
        if error.kind == "training":
            raise
        return None
    if answer.error is not None:
        raise ResultError(answer.error)
    if answer.payload is None:
        return answer.value
    import base64

    from atoll.agent.result import Result
    from atoll.code.results import decode_value

    payload = base64.b64decode(answer.payload)
    return decode_value(Result(answer.encoding, payload), allow_pickle=allow_pickle)


def metrics(ref: TrainingRef, names: Sequence[str], rank: int | None) -> Flow[MetricSeriesList]:
    """What the ranks reported under these names, or under all."""
    query = {"name": list(names) or None, "rank": rank, "uid": ref.uid}
    return decode_answer(
        (yield from send(Send("GET", f"{ref.path}/metrics", query))), MetricSeriesList
    )


def newest_metrics(
    names: Sequence[str], trainings: Sequence[str] = (), *, ranks: bool = False
) -> Flow[LatestMetricList]:
    """What these trainings, or all, reported last."""
    query = {"name": list(names), "training": list(trainings) or None, "ranks": ranks or None}
    return decode_answer((yield from send(Send("GET", "/v1/metrics", query))), LatestMetricList)


def rounds(ref: TrainingRef, first: int, last: int | None, *, has_costs: bool) -> Flow[RoundList]:
    """All of them, page by page from the newest."""
    pages: list[RoundList] = []
    while True:
        query = {
            "from": first,
            "to": last,
            "limit": ROUNDS_A_PAGE,
            "costs": "true" if has_costs else None,
            "run": pages[0].summary.run if pages and pages[0].summary else None,
            "uid": ref.uid,
        }
        page = decode_answer((yield from send(Send("GET", f"{ref.path}/rounds", query))), RoundList)
        pages.append(page)
        oldest = page.items[0].round if page.items else 0
        if len(page.items) < ROUNDS_A_PAGE or oldest <= first:
            break
        # A page may end within a round of several fragments: read that round again.
        last = oldest
    items: dict[tuple[int, int], RoundItem] = {}
    for page in pages:  # an older one knows what was before its newest round
        items |= {(item.round, item.fragment): item for item in page.items}
    return replace(pages[0], items=[items[key] for key in sorted(items)])


def weights(ref: TrainingRef) -> Flow[ChannelList]:
    effect = Send("GET", f"{ref.path}/weights", {"uid": ref.uid})
    return decode_answer((yield from send(effect)), ChannelList)


class UiCode(Model, frozen=True):
    """What signs a browser in once."""

    code: str
    host: str


class EndedSessions(Model, frozen=True):
    sessions: int


def ui_code() -> Flow[UiCode]:
    return decode_answer((yield from send(Send("POST", "/ui/codes"))), UiCode)


def end_sessions() -> Flow[EndedSessions]:
    return decode_answer((yield from send(Send("DELETE", "/ui/sessions"))), EndedSessions)


def exec_target(ref: TrainingRef, rank: int) -> Flow[ExecTarget]:
    effect = Send("GET", f"{ref.path}/exec", {"rank": rank, "uid": ref.uid})
    return decode_answer((yield from send(effect)), ExecTarget)


def exec(ref: TrainingRef, request: ExecRequest) -> Flow[ExecResult]:
    """Sent once: a command must not run twice because an answer was lost."""
    limit_s = request.timeout_s + READ_S
    effect = Send("POST", f"{ref.path}/exec", {"uid": ref.uid}, encode(request), timeout=limit_s)
    return decode_answer(check_reply((yield effect)), ExecResult)


def kill(ref: TrainingRef, request: KillRequest) -> Flow[KillResult]:
    """Sent once, as `exec` is."""
    effect = Send("POST", f"{ref.path}/kill", {"uid": ref.uid}, encode(request))
    return decode_answer(check_reply((yield effect)), KillResult)


def take_stacks(ref: TrainingRef, ranks: Sequence[int]) -> Flow[StackList]:
    body = encode(StackRequest(ranks=list(ranks)))
    effect = Send("POST", f"{ref.path}/stacks", {"uid": ref.uid}, body, timeout=STACKS_S)
    return decode_answer(check_reply((yield effect)), StackList)


def stored_stacks(ref: TrainingRef, rank: int | None) -> Flow[StackList]:
    effect = Send("GET", f"{ref.path}/stacks", {"rank": rank, "uid": ref.uid})
    return decode_answer((yield from send(effect)), StackList)


def stats(ref: TrainingRef) -> Flow[TrainingStats]:
    effect = Send("GET", f"{ref.path}/stats", {"uid": ref.uid})
    return decode_answer((yield from send(effect)), TrainingStats)


def wait(
    ref: TrainingRef,
    timeout: float | None,
    *,
    until: Until[T],
    needed: Callable[[Training], int],
    at_entry: OnRead = ignore,
    on_read: OnRead = ignore,
    clock: Clock = time.monotonic,
) -> Flow[T]:
    """The result of `until`, once it has one; an error if the training fails before that.

    `timeout=0` reads once. `at_entry` sees the first state, unless the server cannot be reached
    then; `on_read` sees every state. A last read follows the deadline.
    """

    def until_or_raise(training: Training) -> T | None:
        answer = until(training)
        if answer is None:
            _raise_if_failed(training, needed(training), timeout)
        return answer

    deadline = inf if timeout is None else clock() + min(timeout, FOREVER_S)
    try:
        training = yield from read(ref, patience_s=0, clock=clock)
        on_read(training)
        at_entry(training)
    except Temporary:
        if deadline - clock() <= 0:
            raise
        training = yield from read(ref, patience_s=deadline - clock(), clock=clock)
    while True:
        on_read(training)
        answer = until_or_raise(training)
        if answer is not None:
            return answer
        left_s = deadline - clock()
        if left_s <= 0:
            ready = training.status.world.ready
            raise BelowMinimumWorld(
                _describe_timeout(training, timeout or 0.0),
                ready=ready,
                required_min=needed(training),
                timeout=timeout,
                rank_exits=training.status.rank_exits,
            )
        training = yield from _next(ref, training, left_s, until_or_raise, clock=clock)


def _next(
    ref: TrainingRef,
    training: Training,
    left_s: float,
    until: Until[T] = ignore,
    *,
    clock: Clock = time.monotonic,
) -> Flow[Training]:
    """The next state of the training: pushed by the server, or read if the watch breaks.

    Once time is up it is read a last time; if that fails too, the old state is returned.
    """
    deadline = clock() + left_s
    retry = new_retry(left_s, clock)
    while True:
        watch_s = inf if deadline == inf else min(deadline - clock(), WATCH_S)
        change = yield NextChange(ref.path, training.resource_version, watch_s)
        if change is not None:
            if change.training.uid != ref.uid:
                raise NotFound("training", ref.name)
            if change.is_removed and until(change.training) is None:
                raise NotFound("training", ref.name)
            return change.training  # type: ignore[no-any-return]
        patience_s = max(0.0, deadline - clock())
        # A silent connection must not hold a wait much longer than its timeout.
        answer_s = min(max(patience_s, LAST_READ_S), READ_S)
        try:
            newest = yield from read(ref, patience_s=patience_s, answer_s=answer_s, clock=clock)
        except Temporary:
            return training
        if newest.resource_version != training.resource_version or clock() >= deadline:
            return newest
        # The watch broke at once: pause before the next, as the server may drop every one.
        yield Pause(retry.pause_s() or 0.0)


def _describe_timeout(training: Training, timeout: float) -> str:
    status, size = training.status, training.spec.world_size
    ready = f"{status.world.ready} of {size.target} ranks ready"
    text = f"training {training.display_name!r}: "
    if _has_target(training) is not None:
        text += f"not over after {timeout:g} s, {ready}"
    else:
        phase = status.phase.value or "not observed yet"
        text += f"{ready} after {timeout:g} s (min {size.min}, phase {phase})"
    if training.has_surplus:
        surplus = [r.rank for r in status.ranks if r.rank >= size.target]
        text += f"; above the target and still alive: {limited_spans(surplus)}"
    return "; ".join([text, *waiting_lines(status.ranks)])


def _has_min(training: Training) -> WorldStatus | None:
    world = training.world
    is_there = world.ready >= world.min and not _is_ending(training)
    return world if _has_succeeded(training) or is_there else None


def _has_target(training: Training) -> WorldStatus | None:
    world = training.world
    is_fresh = training.status.observed_generation >= training.generation
    is_there = is_fresh and world.ready >= world.target and not training.has_surplus
    return world if _has_succeeded(training) or (is_there and not _is_ending(training)) else None


def _success(training: Training) -> WorldStatus | None:
    return training.world if _has_succeeded(training) else None


def _refuse_if_over(training: Training) -> None:
    if training.status.phase.is_terminal:
        phase = training.status.phase.value
        raise UDTerminalState(phase, message=f"the training is already {phase}")


def check_success(training: Training, timeout: float | None) -> WorldStatus:
    """The final world of a training that is over, for a caller who would have waited `timeout`.

    Raises BelowMinimumWorld if it did not succeed.
    """
    _raise_if_failed(training, _min(training), timeout)
    return training.world


def _min(training: Training) -> int:
    return training.spec.world_size.min


def _target(training: Training) -> int:
    return training.spec.world_size.target


def _is_ending(training: Training) -> bool:
    """Whether it is over or will be: ranks that a cancel is about to stop are no world to use."""
    return training.status.phase.is_terminal or training.is_cancelling


def _has_succeeded(training: Training) -> bool:
    return training.status.phase is Phase.SUCCEEDED


def _raise_if_failed(training: Training, required: int, timeout: float | None) -> None:
    status = training.status
    if status.phase not in (Phase.FAILED, Phase.CANCELLED):
        return
    # The traceback is shown once: with the exception that is the cause.
    own = exception_of(training) if status.phase is Phase.FAILED else None
    raise BelowMinimumWorld(
        describe_failure(training, has_tail=own is None),
        ready=status.world.ready,
        required_min=required,
        timeout=timeout,
        rank_exits=[rank_exit for rank_exit in status.rank_exits if rank_exit.is_failure],
    ) from own


wait_until_min_world = partial(wait, until=_has_min, needed=_min)
wait_until_target_world = partial(wait, until=_has_target, needed=_target)
wait_until_complete = partial(wait, until=_success, needed=_min, at_entry=_refuse_if_over)
wait_until_end = partial(wait, until=_success, needed=_min)
# By the names that `deploy_distributed(wait=…)` and `atoll wait --for` have for them.
WAITS: dict[str, Any] = {
    "min": wait_until_min_world,
    "target": wait_until_target_world,
    "complete": wait_until_end,
}
