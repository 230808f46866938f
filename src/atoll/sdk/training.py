"""The handle of one training: each method runs a flow, once blocking and once `_async`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from msgspec.structs import replace

from atoll.core.checks import check_as, check_timeout
from atoll.core.errors import AtollError, NotFound
from atoll.core.metrics import Metrics
from atoll.core.spec import LineCount, RankNumber, TrainingSpec
from atoll.core.status import (
    BenchResult,
    BenchStatus,
    Condition,
    Event,
    LogLine,
    RankExit,
    RankStatus,
    Training,
    Usage,
    WorldStatus,
)
from atoll.sdk import flows, logs
from atoll.sdk.effects import Flow, T
from atoll.sdk.flows import Who
from atoll.sdk.logs import Position

if TYPE_CHECKING:
    from atoll.sdk.client import Client

DELETE_S = 60.0


class DistributedTraining:
    """A training on the control plane: its state, and the operations on it.

    Properties read from the server until the training is over; `last` is what was read last.
    As a context manager it deletes the training on leaving.
    """

    def __init__(self, client: Client, training: Training) -> None:
        self._client = client
        self._who = Who(training.name, training.uid)
        self._is_deleted = False
        self.last = training

    def __repr__(self) -> str:
        world = self.last.world
        phase = self.last.status.phase.value or "new"
        return f"<DistributedTraining {self.name!r} {phase} {world.ready}/{world.target}>"

    @property
    def name(self) -> str:
        return self._who.name

    @property
    def uid(self) -> str:
        return self._who.uid

    @property
    def spec(self) -> TrainingSpec:
        return self._now().spec

    @property
    def phase(self) -> str:
        return self._now().status.phase.value

    @property
    def is_terminal(self) -> bool:
        return self._now().status.phase.is_terminal

    @property
    def world(self) -> WorldStatus:
        return self._now().world

    @property
    def ranks(self) -> list[RankStatus]:
        return list(self._now().status.ranks)

    @property
    def rank_exits(self) -> list[RankExit]:
        """One for each rank that ever ran, once the training is over; `[]` before."""
        return list(self._now().status.rank_exits)

    @property
    def root_cause(self) -> RankExit | None:
        """The exit that brought the training down, with the last lines of that rank's log."""
        return self._now().status.root_cause

    @property
    def conditions(self) -> list[Condition]:
        return list(self._now().status.conditions)

    @property
    def bench(self) -> BenchResult | None:
        return self._now().status.bench.result

    @property
    def bench_diagnostics(self) -> BenchStatus:
        """How the bench went; `message` says why there is no result."""
        training = self._now()
        bench = training.status.bench
        if training.spec.bench.mode == "off":
            return BenchStatus(phase="Skipped", message="bench is off for this training")
        if bench.result is None and not bench.message:
            return replace(bench, message="not measured yet: the ranks are not all running")
        return bench

    @property
    def usage(self) -> Usage:
        """Rank-seconds and GPU-seconds so far; they stand still once the ranks have stopped."""
        return self._run(flows.usage(self._who))

    def refresh(self) -> Training:
        """Reads the training from the server and returns all of it."""
        return self._keep(self._run(flows.read(self._who)))

    async def refresh_async(self) -> Training:
        return self._keep(await self._arun(flows.read(self._who)))

    def scale(self, target: int) -> WorldStatus:
        """Ask for `target` ranks and return at once; `wait_until_target_world` blocks.

        Raises WorldSizeOutOfBounds, and UDTerminalState if the training is over; no scale
        request is sent then.
        """
        return self._keep(self._run(flows.scale(self.last, target))).world

    async def scale_async(self, target: int) -> WorldStatus:
        return self._keep(await self._arun(flows.scale(self.last, target))).world

    def wait_until_min_world(self, timeout: float | None = 600) -> WorldStatus:
        """Returns when `ready >= min`. Raises BelowMinimumWorld at once if the training failed."""
        return self._run(self._watched(flows.wait_until_min_world, timeout))

    async def wait_until_min_world_async(self, timeout: float | None = 600) -> WorldStatus:
        return await self._arun(self._watched(flows.wait_until_min_world, timeout))

    def wait_until_target_world(self, timeout: float | None = 600) -> WorldStatus:
        """Returns when the controller has seen the newest target and its ranks are ready."""
        return self._run(self._watched(flows.wait_until_target_world, timeout))

    async def wait_until_target_world_async(self, timeout: float | None = 600) -> WorldStatus:
        return await self._arun(self._watched(flows.wait_until_target_world, timeout))

    def wait_until_complete(self, timeout: float | None = 1800) -> WorldStatus:
        """Returns on success, raises BelowMinimumWorld on failure; see `result` for either.

        Raises UDTerminalState if the training was over before the call.
        """
        return self._run(self._watched(flows.wait_until_complete, timeout))

    async def wait_until_complete_async(self, timeout: float | None = 1800) -> WorldStatus:
        return await self._arun(self._watched(flows.wait_until_complete, timeout))

    def result(self, timeout: float | None = None) -> WorldStatus:
        """Like a future: the same answer or error before, during and after the end."""
        if self.last.status.phase.is_terminal:
            return flows.ended(self.last)
        return self._run(self._watched(flows.result, timeout))

    async def result_async(self, timeout: float | None = None) -> WorldStatus:
        if self.last.status.phase.is_terminal:
            return flows.ended(self.last)
        return await self._arun(self._watched(flows.result, timeout))

    def value(self, rank: int = 0, *, allow_pickle: bool = False) -> Any:
        """What the function returned on that rank, or what its program last gave with
        `atoll.give_result`.

        Raises NotFound if there is none. A pickle is opened only with `allow_pickle`, as it can
        run any code here; ValueError tells of one.
        """
        return _decoded(self._run(self._value(rank)), allow_pickle=allow_pickle)

    async def value_async(self, rank: int = 0, *, allow_pickle: bool = False) -> Any:
        return _decoded(await self._arun(self._value(rank)), allow_pickle=allow_pickle)

    def cancel(self) -> None:
        """Asks to stop the ranks and keeps the record. Does nothing if the training is over."""
        training = self._run(flows.cancel(self._who))
        self._keep(training or self.last)

    async def cancel_async(self) -> None:
        training = await self._arun(flows.cancel(self._who))
        self._keep(training or self.last)

    def delete(self, timeout: float = DELETE_S) -> None:
        """Removes the training, its ranks and logs. Returns when it is gone; raises Temporary if it
        is not after `timeout`: it goes on being removed. With `timeout=0` it only asks."""
        check_timeout(timeout)
        self._is_deleted = True
        self._run(flows.delete(self._who, timeout, on_read=self._keep))

    async def delete_async(self, timeout: float = DELETE_S) -> None:
        check_timeout(timeout)
        self._is_deleted = True
        await self._arun(flows.delete(self._who, timeout, on_read=self._keep))

    @overload
    def logs(
        self, rank: int | None = ..., tail: int | None = ..., follow: Literal[False] = ...
    ) -> list[LogLine]: ...
    @overload
    def logs(
        self, rank: int | None = ..., tail: int | None = ..., *, follow: Literal[True]
    ) -> Iterator[LogLine]: ...
    def logs(
        self, rank: int | None = None, tail: int | None = None, follow: bool = False
    ) -> list[LogLine] | Iterator[LogLine]:
        """Log lines with their rank; `tail` is per rank. `follow` yields them as they come."""
        lines = logs.lines(self._client.wire, self._position(rank, tail, follow))
        return lines if follow else list(lines)

    @overload
    async def logs_async(
        self, rank: int | None = ..., tail: int | None = ..., follow: Literal[False] = ...
    ) -> list[LogLine]: ...
    @overload
    async def logs_async(
        self, rank: int | None = ..., tail: int | None = ..., *, follow: Literal[True]
    ) -> AsyncIterator[LogLine]: ...
    async def logs_async(
        self, rank: int | None = None, tail: int | None = None, follow: bool = False
    ) -> list[LogLine] | AsyncIterator[LogLine]:
        lines = logs.alines(self._client.wire, self._position(rank, tail, follow))
        return lines if follow else [line async for line in lines]

    def stream_logs(self, ranks: Sequence[int] | None = None) -> Iterator[LogLine]:
        """Every line of these ranks, old ones first, until the training ends."""
        return logs.lines(self._client.wire, Position(self._who, ranks, None, True))

    def stream_logs_async(self, ranks: Sequence[int] | None = None) -> AsyncIterator[LogLine]:
        return logs.alines(self._client.wire, Position(self._who, ranks, None, True))

    def events(self, since: float | datetime | None = None) -> list[Event]:
        """Newest first; with `since` (a time, or seconds since the epoch) only those after it."""
        return self._run(flows.events(self._who, _seconds(since)))

    async def events_async(self, since: float | datetime | None = None) -> list[Event]:
        return await self._arun(flows.events(self._who, _seconds(since)))

    def metrics(self) -> Metrics:
        return self._run(flows.metrics(self._who))

    async def metrics_async(self) -> Metrics:
        return await self._arun(flows.metrics(self._who))

    def __enter__(self) -> DistributedTraining:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _unmasked(error):
            self.delete()

    async def __aenter__(self) -> DistributedTraining:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _unmasked(error):
            await self.delete_async()

    def _run(self, flow: Flow[T]) -> T:
        return self._client.run(flow)

    async def _arun(self, flow: Flow[T]) -> T:
        return await self._client.arun(flow)

    def _now(self) -> Training:
        """The newest state; the last one read if the training is over or this handle deleted it."""
        if self.last.status.phase.is_terminal:
            return self.last
        try:
            return self.refresh()
        except NotFound:
            if self._is_deleted:
                return self.last
            raise

    def _keep(self, training: Training) -> Training:
        self.last = training
        return training

    def _watched(self, flow: Any, timeout: float | None) -> Flow[WorldStatus]:
        if timeout is not None:
            check_timeout(timeout)
        return flow(self._who, timeout, on_read=self._keep)  # type: ignore[no-any-return]

    def _value(self, rank: int) -> Flow[flows.ValueAnswer]:
        check_as("rank", rank, RankNumber)
        return flows.value(self._who, rank)

    def _position(self, rank: int | None, tail: int | None, follow: bool) -> Position:
        check_as("rank", rank, RankNumber | None)
        check_as("tail", tail, LineCount | None)
        return Position(self._who, None if rank is None else [rank], tail, follow)


def _decoded(answer: flows.ValueAnswer, *, allow_pickle: bool) -> Any:
    if answer.payload is None:
        return answer.value
    import base64

    from atoll.rank.result import Result, decode_value

    payload = base64.b64decode(answer.payload)
    return decode_value(Result(answer.encoding, payload), allow_pickle=allow_pickle)


def _seconds(since: float | datetime | None) -> float | None:
    return since.timestamp() if isinstance(since, datetime) else since


@contextlib.contextmanager
def _unmasked(error: BaseException | None) -> Iterator[None]:
    """Raises a failed clean-up, or adds it as a note to the error that is already raised."""
    try:
        yield
    except AtollError as failure:
        if error is None:
            raise
        error.add_note(f"and deleting the training failed: {failure}")
