"""The handle of one training: each method runs a flow, once blocking and once `_async`."""

from __future__ import annotations

import contextlib
import importlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from msgspec.structs import replace

from atoll.core import html
from atoll.core.checks import check_as, check_env, check_int, check_timeout
from atoll.core.errors import AtollError, NotFound, ValidationError
from atoll.core.metrics import MetricSeriesList
from atoll.core.rank_access import (
    EXEC_TIMEOUT_S,
    ExecRequest,
    ExecResult,
    KillRequest,
    KillResult,
    StackList,
)
from atoll.core.rounds import RoundItem, RoundList, RoundSummary
from atoll.core.settings import Settings, name_label
from atoll.core.spec import LineCount, RankNumber, TrainingSpec, WorldSize
from atoll.core.status import (
    AttemptStatus,
    BenchResult,
    BenchStatus,
    Condition,
    Event,
    LogLine,
    RankExit,
    RankStatus,
    Training,
    TrainingStats,
    WorldStatus,
)
from atoll.core.weights import Channel
from atoll.sdk import flows
from atoll.sdk.effects import Flow, T
from atoll.sdk.flows import TrainingRef
from atoll.sdk.options import world_of
from atoll.sdk.wire import LogPosition, aread_log, read_log

if TYPE_CHECKING:
    from atoll.sdk.client import Client


DELETE_S = 60.0  # ranks have 10 s to stop by default; a loaded machine takes longer
# Properties that are read one after the other share a snapshot: they agree and cost one request.
SNAPSHOT_S = 0.1


class DistributedTraining:
    """A training on the control plane: its state, and the operations on it.

    Properties come from one snapshot of the training, at most 0.1 s old: several in a row cost one
    request and agree with each other. `refresh()` reads a new one, and so does every method that
    asks the server; `last` is the newest, without a request. A training that is over is not read
    again. As a context manager the handle deletes the training on leaving.
    """

    def __init__(self, client: Client, training: Training) -> None:
        self._client = client
        self._ref = TrainingRef(training.name, training.uid)
        self._is_deleted = False
        self._keep(training)

    def __repr__(self) -> str:
        world = self.last.world
        phase = self.last.status.phase.value or "new"
        return f"<DistributedTraining {self.name!r} {phase} {world.ready}/{world.target}>"

    def _repr_html_(self) -> str:
        return html.training_html(self.last)

    def show(self, *, wait: bool = False) -> None:
        """Show the training in a notebook and update the view until the training ends.

        Returns at once, or at the end with `wait`. Outside of notebooks it prints one line, or
        with `wait` a line for each change. If the training fails, `result()` raises; this does not.
        """
        from atoll.sdk import notebook

        notebook.show(self, wait=wait)

    async def show_async(self, *, wait: bool = False) -> None:
        import asyncio

        from atoll.sdk import notebook

        await asyncio.to_thread(notebook.show, self, wait=wait)

    @property
    def name(self) -> str:
        """Its name, as you gave it."""
        return self.last.display_name

    @property
    def labels(self) -> dict[str, str]:
        return self.last.spec.labels

    @property
    def settings(self) -> Settings:
        """What you vary: flags of the command, `settings=` and `atoll.report_settings`."""
        return self._now().settings

    @property
    def uid(self) -> str:
        return self._ref.uid

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
        return html.HtmlList(self._now().status.ranks, html.ranks_html)

    @property
    def rank_exits(self) -> list[RankExit]:
        """One for each rank that ever ran, once the training is over; `[]` before."""
        return html.HtmlList(self._now().status.rank_exits, html.exits_html)

    @property
    def root_cause(self) -> RankExit | None:
        """The exit that made the training fail, with the last lines of that rank's log."""
        return self._now().status.root_cause

    @property
    def conditions(self) -> list[Condition]:
        return list(self._now().status.conditions)

    @property
    def bench(self) -> BenchResult | None:
        return self._now().status.bench.result

    @property
    def bench_diagnostics(self) -> BenchStatus:
        """The state of the bench; `message` has the reason if there is no result."""
        training = self._now()
        bench = training.status.bench
        if training.spec.bench.mode == "off":
            return BenchStatus(phase="Skipped", message="bench is off for this training")
        if bench.result is None and not bench.message:
            return replace(bench, message="not measured yet: the ranks are not all running")
        return bench

    @property
    def warnings(self) -> list[str]:
        """What is wrong with how it trains: the same batches in two replicas, a rank that is absent
        from rounds, and so on. Read it after the end, too: ranks report at their end."""
        with contextlib.suppress(NotFound):
            self.refresh()
        return list(self.last.status.warnings)

    def refresh(self) -> Training:
        """Read the training from the server, for all properties, and return it."""
        return self._keep(self._run(flows.read(self._ref)))

    async def refresh_async(self) -> Training:
        return self._keep(await self._arun(flows.read(self._ref)))

    def scale(self, target: int) -> WorldStatus:
        """Ask for `target` ranks and return at once; `wait_until_target_world` blocks.

        Raises WorldSizeOutOfBounds, and UDTerminalState if the training is over; no scale
        request is sent then.
        """
        return self._keep(self._run(flows.scale(self.last, target))).world

    async def scale_async(self, target: int) -> WorldStatus:
        return self._keep(await self._arun(flows.scale(self.last, target))).world

    def wait_until_min_world(self, timeout: float | None = 600) -> WorldStatus:
        """Wait until `ready >= min`. Raises BelowMinimumWorld at once if the training failed."""
        return self._run(self._wait(flows.wait_until_min_world, timeout))

    async def wait_until_min_world_async(self, timeout: float | None = 600) -> WorldStatus:
        return await self._arun(self._wait(flows.wait_until_min_world, timeout))

    def wait_until_target_world(self, timeout: float | None = 600) -> WorldStatus:
        """Wait until the controller has observed the newest target and all its ranks are ready."""
        return self._run(self._wait(flows.wait_until_target_world, timeout))

    async def wait_until_target_world_async(self, timeout: float | None = 600) -> WorldStatus:
        return await self._arun(self._wait(flows.wait_until_target_world, timeout))

    def wait_until_complete(self, timeout: float | None = 1800) -> WorldStatus:
        """Wait for the training to succeed and return its final world.

        Raises BelowMinimumWorld if it fails or `timeout` passes, and UDTerminalState if it was
        over before the call. `result` has the same answer before, during and after the end.
        """
        return self._run(self._wait(flows.wait_until_complete, timeout))

    async def wait_until_complete_async(self, timeout: float | None = 1800) -> WorldStatus:
        return await self._arun(self._wait(flows.wait_until_complete, timeout))

    def result(self, timeout: float | None = None, *, allow_pickle: bool = False) -> Any:
        """Wait for the end and return what the function returned on rank 0, or what its program
        set last with `atoll.set_result`; None if it set nothing.

        It is the same before, during and after the end, like the result of a future. Raises
        BelowMinimumWorld if the training does not succeed, and ResultError if the result could not
        be sent or read. Pickles are opened only with `allow_pickle`: they can run any code here.
        """
        return self._run(self._result(timeout, allow_pickle))

    async def result_async(
        self, timeout: float | None = None, *, allow_pickle: bool = False
    ) -> Any:
        return await self._arun(self._result(timeout, allow_pickle))

    def results(self, timeout: float | None = None, *, allow_pickle: bool = False) -> list[Any]:
        """Wait for the end and return the results of all ranks, in their order; see `result`."""
        return self._run(self._results(timeout, allow_pickle))

    async def results_async(
        self, timeout: float | None = None, *, allow_pickle: bool = False
    ) -> list[Any]:
        return await self._arun(self._results(timeout, allow_pickle))

    def metrics(
        self,
        names: str | Sequence[str] | None = None,
        since: float | datetime | None = None,
        *,
        rank: int | None = None,
    ) -> MetricTable:
        """What the ranks reported with `atoll.report`, as columns: all metrics, or these names.

        `since` (a time, or seconds since the epoch) leaves out what is older.
        """
        return MetricTable(self._run(self._metrics(names, rank)), _seconds(since))

    async def metrics_async(
        self,
        names: str | Sequence[str] | None = None,
        since: float | datetime | None = None,
        *,
        rank: int | None = None,
    ) -> MetricTable:
        return MetricTable(await self._arun(self._metrics(names, rank)), _seconds(since))

    def rounds(self, first: int = 0, last: int | None = None, *, costs: bool = False) -> RoundTable:
        """The outer rounds of a DiLoCo training, as columns: all, or those from `first` to `last`.

        `costs` adds what each replica reported about each round.
        """
        return RoundTable(self._run(self._rounds(first, last, costs)), has_costs=costs)

    async def rounds_async(
        self, first: int = 0, last: int | None = None, *, costs: bool = False
    ) -> RoundTable:
        return RoundTable(await self._arun(self._rounds(first, last, costs)), has_costs=costs)

    def weights(self) -> list[Channel]:
        """The channels of weights that the ranks publish or follow (`atoll.weights`).

        Each has its newest `versions`, newest first, and its `followers` in all trainings, with how
        many versions each is `behind` and for how long (`lag_s`). `[]` without weights.
        """
        return self._run(flows.weights(self._ref)).items

    async def weights_async(self) -> list[Channel]:
        return (await self._arun(flows.weights(self._ref))).items

    def rerun(
        self,
        name: str | None = None,
        *,
        world_size: int | WorldSize | None = None,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] | None = None,
    ) -> DistributedTraining:
        """Start a copy as a new training and return its handle. Its default name is `NAME-r2`.

        The server copies spec and code; `env` overrides single variables. Raises Conflict if the
        code no longer exists or the name is in use.
        """
        flow = self._rerun(name, world_size, env, args)
        return DistributedTraining(self._client, self._run(flow))

    async def rerun_async(
        self,
        name: str | None = None,
        *,
        world_size: int | WorldSize | None = None,
        env: Mapping[str, str] | None = None,
        args: Sequence[str] | None = None,
    ) -> DistributedTraining:
        flow = self._rerun(name, world_size, env, args)
        return DistributedTraining(self._client, await self._arun(flow))

    def cancel(self) -> None:
        """Stop the ranks and keep the record. Does nothing if the training is over."""
        training = self._run(flows.cancel(self._ref))
        self._keep(training or self.last)

    async def cancel_async(self) -> None:
        training = await self._arun(flows.cancel(self._ref))
        self._keep(training or self.last)

    def delete(self, timeout: float = DELETE_S) -> None:
        """Delete the training with its ranks and logs, and wait until they are removed.

        Raises Temporary after `timeout`; the removal continues. `timeout=0` does not wait.
        """
        check_timeout(timeout)
        self._is_deleted = True
        self._run(flows.delete(self._ref, timeout, on_read=self._keep))

    async def delete_async(self, timeout: float = DELETE_S) -> None:
        check_timeout(timeout)
        self._is_deleted = True
        await self._arun(flows.delete(self._ref, timeout, on_read=self._keep))

    @overload
    def logs(
        self,
        rank: int | None = ...,
        tail: int | None = ...,
        follow: Literal[False] = ...,
        *,
        since: float | datetime | None = ...,
        search: str | None = ...,
        ignore_case: bool = ...,
    ) -> list[LogLine]: ...
    @overload
    def logs(
        self,
        rank: int | None = ...,
        tail: int | None = ...,
        *,
        follow: Literal[True],
        since: float | datetime | None = ...,
        search: str | None = ...,
        ignore_case: bool = ...,
    ) -> Iterator[LogLine]: ...
    def logs(
        self,
        rank: int | None = None,
        tail: int | None = None,
        follow: bool = False,
        *,
        since: float | datetime | None = None,
        search: str | None = None,
        ignore_case: bool = False,
    ) -> list[LogLine] | Iterator[LogLine]:
        """Log lines with rank and time; `tail` counts per rank. `follow` also yields new lines.

        Lines of several ranks are in the order of time. The server filters by `since` (a time, or
        seconds since the epoch; it leaves out lines without a time) and by `search`.
        """
        position = self._position(rank, tail, follow, since, search, ignore_case)
        lines = read_log(self._client.wire, position)
        return self._renew_after(lines) if follow else html.HtmlList(lines, html.lines_html)

    @overload
    async def logs_async(
        self,
        rank: int | None = ...,
        tail: int | None = ...,
        follow: Literal[False] = ...,
        *,
        since: float | datetime | None = ...,
        search: str | None = ...,
        ignore_case: bool = ...,
    ) -> list[LogLine]: ...
    @overload
    async def logs_async(
        self,
        rank: int | None = ...,
        tail: int | None = ...,
        *,
        follow: Literal[True],
        since: float | datetime | None = ...,
        search: str | None = ...,
        ignore_case: bool = ...,
    ) -> AsyncIterator[LogLine]: ...
    async def logs_async(
        self,
        rank: int | None = None,
        tail: int | None = None,
        follow: bool = False,
        *,
        since: float | datetime | None = None,
        search: str | None = None,
        ignore_case: bool = False,
    ) -> list[LogLine] | AsyncIterator[LogLine]:
        position = self._position(rank, tail, follow, since, search, ignore_case)
        lines = aread_log(self._client.wire, position)
        if follow:
            return self._renew_after_async(lines)
        return html.HtmlList([line async for line in lines], html.lines_html)

    def stream_logs(self, ranks: Sequence[int] | None = None) -> Iterator[LogLine]:
        """Yield every line of these ranks from the start, until the training ends."""
        position = self._position_of(ranks)
        return self._renew_after(read_log(self._client.wire, position))

    def stream_logs_async(self, ranks: Sequence[int] | None = None) -> AsyncIterator[LogLine]:
        position = self._position_of(ranks)
        return self._renew_after_async(aread_log(self._client.wire, position))

    def events(self, since: float | datetime | None = None) -> list[Event]:
        """Events, newest first. `since` (a time, or seconds) leaves out older ones."""
        return self._run(flows.events(self._ref, _seconds(since)))

    async def events_async(self, since: float | datetime | None = None) -> list[Event]:
        return await self._arun(flows.events(self._ref, _seconds(since)))

    def attempts(self, rank: int | None = None) -> list[AttemptStatus]:
        """Each start of a rank's process and how it ended, in order of rank: the newest attempt and
        the 20 before it; with `rank`, of that rank only."""
        return self._run(self._attempts(rank))

    async def attempts_async(self, rank: int | None = None) -> list[AttemptStatus]:
        return await self._arun(self._attempts(rank))

    def exec(
        self,
        command: Sequence[str],
        rank: int = 0,
        *,
        stdin: str | bytes = b"",
        timeout: float = EXEC_TIMEOUT_S,
    ) -> ExecResult:
        """Run a command in the environment and directory of a rank, and wait for its end.

        Raises Conflict if the rank does not run, and on executors that cannot enter their ranks.
        """
        return self._run(flows.exec(self._ref, _exec_request(command, rank, stdin, timeout)))

    async def exec_async(
        self,
        command: Sequence[str],
        rank: int = 0,
        *,
        stdin: str | bytes = b"",
        timeout: float = EXEC_TIMEOUT_S,
    ) -> ExecResult:
        request = _exec_request(command, rank, stdin, timeout)
        return await self._arun(flows.exec(self._ref, request))

    def kill(self, rank: int, signal: str = "SIGKILL") -> KillResult:
        """Send a signal, by name or number, to the process of a rank.

        Raises Conflict if the rank does not run, and on executors that cannot reach their ranks.
        """
        return self._run(flows.kill(self._ref, KillRequest(rank=rank, signal=str(signal))))

    async def kill_async(self, rank: int, signal: str = "SIGKILL") -> KillResult:
        return await self._arun(flows.kill(self._ref, KillRequest(rank=rank, signal=str(signal))))

    def stacks(self, rank: int | None = None, *, stored: bool = False) -> StackList:
        """The stacks of all threads of the ranks and the processes they started. `folded` has equal
        stacks in one line.

        With `stored`, and after the end, those that atoll took by itself: of ranks that stalled,
        that it had to kill, or whose round timed out. Raises Conflict if no rank runs.
        """
        return self._run(self._stacks(rank, stored))

    async def stacks_async(self, rank: int | None = None, *, stored: bool = False) -> StackList:
        return await self._arun(self._stacks(rank, stored))

    def _stacks(self, rank: int | None, stored: bool) -> Flow[StackList]:
        if rank is not None:
            check_as("rank", rank, RankNumber)
        training = yield from flows.read(self._ref)
        if stored or self._keep(training).status.phase.is_terminal:
            return (yield from flows.stored_stacks(self._ref, rank))
        return (yield from flows.take_stacks(self._ref, [] if rank is None else [rank]))

    def stats(self) -> TrainingStats:
        """Counters of the training: ranks by phase, restarts, resizes, and the rank-seconds and
        GPU-seconds used so far, which stop growing when the ranks stop."""
        return self._run(flows.stats(self._ref))

    async def stats_async(self) -> TrainingStats:
        return await self._arun(flows.stats(self._ref))

    def __enter__(self) -> DistributedTraining:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _keep_error(error):
            self.delete()

    async def __aenter__(self) -> DistributedTraining:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with _keep_error(error):
            await self.delete_async()

    def _run(self, flow: Flow[T]) -> T:
        return self._client.run(flow)

    async def _arun(self, flow: Flow[T]) -> T:
        return await self._client.arun(flow)

    def _now(self) -> Training:
        """The snapshot of all properties; a new one if it is old and the training is not over."""
        if self.last.status.phase.is_terminal or time.monotonic() - self._read_at < SNAPSHOT_S:
            return self.last
        try:
            return self.refresh()
        except NotFound:
            if self._is_deleted:
                return self.last
            raise

    # A log that is followed to its end shows that the training has changed since the snapshot.
    def _renew_after(self, lines: Iterator[LogLine]) -> Iterator[LogLine]:
        yield from lines
        self._read_at = -math.inf

    async def _renew_after_async(self, lines: AsyncIterator[LogLine]) -> AsyncIterator[LogLine]:
        async for line in lines:
            yield line
        self._read_at = -math.inf

    def _keep(self, training: Training) -> Training:
        self.last, self._read_at = training, time.monotonic()
        return training

    def _wait(self, flow: Any, timeout: float | None) -> Flow[WorldStatus]:
        if timeout is not None:
            check_timeout(timeout)
        return flow(self._ref, timeout, on_read=self._keep)  # type: ignore[no-any-return]

    def _result(self, timeout: float | None, allow_pickle: bool) -> Flow[Any]:
        yield from self._wait_until_end(timeout)
        return (yield from flows.result(self._ref, 0, allow_pickle=allow_pickle))

    def _results(self, timeout: float | None, allow_pickle: bool) -> Flow[list[Any]]:
        yield from self._wait_until_end(timeout)
        results = []
        for rank in range(self.last.spec.world_size.target):
            results.append((yield from flows.result(self._ref, rank, allow_pickle=allow_pickle)))
        return results

    def _wait_until_end(self, timeout: float | None) -> Flow[WorldStatus]:
        wait = self._wait(flows.wait_until_end, timeout)
        if self.last.status.phase.is_terminal:
            return flows.check_success(self.last, timeout)
        return (yield from wait)

    def _rerun(
        self,
        name: str | None,
        world_size: int | WorldSize | None,
        env: Mapping[str, str] | None,
        args: Sequence[str] | None,
    ) -> Flow[Training]:
        if name is not None:
            name_label("name", name)
        if isinstance(args, str):
            raise ValidationError("args", args, "expected a list of arguments")
        variables = dict(env or {})
        check_env("env", variables)
        size = world_of(world_size)
        if not isinstance(size, WorldSize | None):
            raise ValidationError("world_size", size, "expected a number or WorldSize(…)")
        changes = {
            "name": name,
            "worldSize": size,
            "env": variables or None,
            "args": None if args is None else [str(argument) for argument in args],
        }
        return flows.rerun(self.last, changes, uuid.uuid4().hex)

    def _attempts(self, rank: int | None) -> Flow[list[AttemptStatus]]:
        check_rank(self.last, rank)
        return flows.attempts(self._ref, rank)

    def _metrics(
        self, names: str | Sequence[str] | None, rank: int | None
    ) -> Flow[MetricSeriesList]:
        check_as("rank", rank, RankNumber | None)
        listed = [names] if isinstance(names, str) else list(names or ())
        return flows.metrics(self._ref, listed, rank)

    def _rounds(self, first: int, last: int | None, costs: bool) -> Flow[RoundList]:
        check_int("first", first, 0, 10**9)
        if last is not None:
            check_int("last", last, 0, 10**9)
        return flows.rounds(self._ref, first, last, has_costs=costs)

    def _position(
        self,
        rank: int | None,
        tail: int | None,
        follow: bool,
        since: float | datetime | None,
        search: str | None,
        ignore_case: bool,
    ) -> LogPosition:
        check_rank(self.last, rank)
        check_as("tail", tail, LineCount | None)
        if search is not None and (not isinstance(search, str) or not search or "\n" in search):
            raise ValidationError("search", search, "expected a text of one line")
        filters: dict[str, Any] = {} if since is None else {"since": _seconds(since)}
        if search is not None:
            filters |= {"search": search, "ignoreCase": ignore_case or None}
        return LogPosition(self._ref, None if rank is None else [rank], tail, follow, filters)

    def _position_of(self, ranks: Sequence[int] | None) -> LogPosition:
        for rank in ranks or ():
            check_rank(self.last, rank)
        return LogPosition(self._ref, ranks, None, True)


def check_rank(training: Training, rank: int | None, field: str = "rank") -> None:
    """Raises ValidationError for a rank that the training cannot have."""
    check_as(field, rank, RankNumber | None)
    highest = training.spec.world_size.max - 1
    if rank is not None and rank > highest:
        ranks = "rank 0 only" if highest == 0 else f"ranks 0 to {highest}"
        raise ValidationError(field, rank, f"{training.display_name} has {ranks}")


def _exec_request(
    command: Sequence[str], rank: int, stdin: str | bytes, timeout: float
) -> ExecRequest:
    if isinstance(command, str):
        raise ValidationError("command", command, 'expected a list, such as ["nvidia-smi", "-L"]')
    data = stdin.encode() if isinstance(stdin, str) else stdin
    return ExecRequest(command=list(command), rank=rank, stdin=data, timeout_s=timeout)


def _seconds(since: float | datetime | None) -> float | None:
    return since.timestamp() if isinstance(since, datetime) else since


@contextlib.contextmanager
def _keep_error(error: BaseException | None) -> Iterator[None]:
    """Raise a failed clean-up, or add it as a note to the error that is being raised."""
    try:
        yield
    except AtollError as failure:
        if error is None:
            raise
        error.add_note(f"and deleting the training failed: {failure}")


METRIC_COLUMNS = (
    "name", "rank", "process", "attempt", "step", "at", "value", "min", "max", "count"
)  # fmt: skip
ROUND_COLUMNS = tuple(name for name in RoundItem.__struct_fields__ if name != "costs")


class ColumnTable(dict[str, list[Any]]):
    """Columns of equal length, by name."""

    def to_pandas(self) -> Any:
        """A pandas DataFrame. Needs pandas."""
        return importlib.import_module("pandas").DataFrame(dict(self))

    def to_polars(self) -> Any:
        """A polars DataFrame. Needs polars."""
        return importlib.import_module("polars").DataFrame(dict(self), strict=False)


class MetricTable(ColumnTable):
    """What ranks reported: `table["value"]` is a list, with one row for each bucket of points.

    `value` is the mean of the `count` points in a bucket. The control plane dropped `skipped`
    metrics, and lost `missed` batches of them on the way.
    """

    def __init__(self, answer: MetricSeriesList, since: float | None = None) -> None:
        super().__init__({name: [] for name in METRIC_COLUMNS})
        self.skipped = answer.skipped
        self.missed = answer.missed
        for one in answer.items:
            start = 0 if since is None else sum(at < since for at in one.at)
            length = len(one.at) - start
            self["name"] += [one.name] * length
            self["rank"] += [one.rank] * length
            self["process"] += [one.process] * length
            self["attempt"] += one.attempt[start:]
            self["step"] += one.step[start:]
            self["at"] += one.at[start:]
            self["value"] += map(float, one.mean[start:])
            self["min"] += map(float, one.min[start:])
            self["max"] += map(float, one.max[start:])
            counts = zip(one.count[start:], one.bad[start:], strict=True)
            self["count"] += [finite + bad for finite, bad in counts]

    def __repr__(self) -> str:
        names = ", ".join(sorted(set(self["name"]))) or "nothing"
        return f"<MetricTable of {names}: {len(self['at'])} rows>"


class RoundTable(ColumnTable):
    """Outer rounds: `table["members"]` is a list of lists, with one row for each round of each
    fragment, in order.

    `why` says where the rounds come from, `summary` how far the run is (None before the first),
    and `dropped` how many of the oldest rounds are no longer stored.
    """

    def __init__(self, answer: RoundList, *, has_costs: bool = False) -> None:
        names = (*ROUND_COLUMNS, "costs") if has_costs else ROUND_COLUMNS
        super().__init__({name: [getattr(i, name) for i in answer.items] for name in names})
        self.why: str = answer.why
        self.summary: RoundSummary | None = answer.summary
        self.dropped: int = answer.dropped

    def __repr__(self) -> str:
        text = "no round yet" if self.summary is None else self.summary.message
        return f"<RoundTable: {text}>"
