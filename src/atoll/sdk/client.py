"""The client of one control plane, and the drivers that run its flows."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from atoll.core.checks import check_name
from atoll.core.errors import BelowMinimumWorld
from atoll.core.executors import ExecutorStatus
from atoll.core.html import HtmlList, trainings_html
from atoll.core.spec import TrainingSpec
from atoll.core.status import Training
from atoll.sdk import flows
from atoll.sdk.config import stated_training
from atoll.sdk.effects import Flow, T
from atoll.sdk.endpoint import Endpoint, chosen
from atoll.sdk.options import DeployOptions, wait_of
from atoll.sdk.training import DistributedTraining
from atoll.sdk.wire import AsyncPerformer, Performer, Wire

if TYPE_CHECKING:
    from atoll.sdk.sweep import Sweep, SweepRun

Trainings = list[DistributedTraining]
Executors = list[ExecutorStatus]


class Client:
    """Trainings on one control plane.

    Without `url` and `ATOLL_URL` it is the user's own local one, started on first use. Threads may
    share a client. `Client.local()` is a private control plane that ends with its block.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self._open(chosen(url, token))

    @classmethod
    def local(cls) -> Client:
        """A private control plane for tests and notebooks; `close()` ends it and its ranks.

        `with Client.local() as client: …`
        """
        from atoll.sdk.embedded import Private

        client = cls.__new__(cls)
        client._open(Private())
        return client

    def _open(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.wire = Wire(endpoint)

    def deploy_distributed(
        self, name: str, **options: Unpack[DeployOptions]
    ) -> DistributedTraining:
        """Store a training and return its handle at once; `wait=` also waits, up to `timeout`.

        Options: see `atoll.sdk.options.DeployOptions`. Raises ValidationError before anything is
        sent. If the wait fails, the training still exists: `client.get(name)` finds it.
        """
        (spec, pack), (wait, timeout) = stated_training(name, options), wait_of(options)
        stored = self.run(flows.deploy(spec, self._shared(spec), uuid.uuid4().hex, pack))
        training = DistributedTraining(self, stored)
        try:
            if wait == "min":
                training.wait_until_min_world(timeout)
            if wait == "target":
                training.wait_until_target_world(timeout)
        except BelowMinimumWorld as error:
            error.add_note(_note(name))
            raise
        return training

    async def deploy_distributed_async(
        self, name: str, **options: Unpack[DeployOptions]
    ) -> DistributedTraining:
        (spec, pack), (wait, timeout) = stated_training(name, options), wait_of(options)
        stored = await self.arun(flows.deploy(spec, self._shared(spec), uuid.uuid4().hex, pack))
        training = DistributedTraining(self, stored)
        try:
            if wait == "min":
                await training.wait_until_min_world_async(timeout)
            if wait == "target":
                await training.wait_until_target_world_async(timeout)
        except BelowMinimumWorld as error:
            error.add_note(_note(name))
            raise
        return training

    def map(
        self,
        function: Callable[..., Any],
        settings: Iterable[Mapping[str, Any]],
        *,
        concurrency: int | None = None,
        name: str | None = None,
        allow_pickle: bool = False,
        **options: Unpack[DeployOptions],
    ) -> Sweep:
        """Calls `function(**setting)` for each of the settings, each as a training of its own, at
        most `concurrency` of them at once (as many as there are CPUs). Returns when all are over.

        Rows have `result`, `error` and `training`; `print` shows a table. The same call made again,
        after Ctrl-C say, goes on: what has succeeded or runs is not run again, what failed is.
        With other code of the function or another `name` all are new. With `allow_pickle` results
        travel as pickles, which can run any code here. `options` are those of
        `deploy_distributed`.
        """
        sweeping = self._sweeping(function, settings, concurrency, name, options, allow_pickle)
        try:
            return self.run(sweeping.run())
        except KeyboardInterrupt:
            sweeping.tell_interrupted()
            raise

    async def map_async(
        self,
        function: Callable[..., Any],
        settings: Iterable[Mapping[str, Any]],
        *,
        concurrency: int | None = None,
        name: str | None = None,
        allow_pickle: bool = False,
        **options: Unpack[DeployOptions],
    ) -> Sweep:
        sweeping = self._sweeping(function, settings, concurrency, name, options, allow_pickle)
        return await self.arun(sweeping.run())

    def _sweeping(
        self,
        function: Callable[..., Any],
        settings: Iterable[Mapping[str, Any]],
        concurrency: int | None,
        name: str | None,
        options: DeployOptions,
        allow_pickle: bool,
    ) -> SweepRun:
        from atoll.agent.result import PICKLE, RESULTS_VARIABLE
        from atoll.sdk.sweep import SweepRun, jobs_of  # imported here: it loads slowly

        if allow_pickle:
            options = {**options, "env": {**(options.get("env") or {}), RESULTS_VARIABLE: PICKLE}}
        jobs = jobs_of(function, settings, name)
        for job in jobs[:1]:  # what is wrong with the options or the function is told before
            stated_training(job.name, {**options, "source": partial(function, **job.arguments)})
        return SweepRun(
            self, self._shared, function, jobs, concurrency, options, allow_pickle=allow_pickle
        )

    def get(self, name: str) -> DistributedTraining:
        """The handle of an existing training. Raises NotFound."""
        check_name("name", name)
        return DistributedTraining(self, self.run(flows.get(name)))

    async def get_async(self, name: str) -> DistributedTraining:
        check_name("name", name)
        return DistributedTraining(self, await self.arun(flows.get(name)))

    def list(self, phase: str | None = None, prefix: str | None = None) -> Trainings:
        """Trainings sorted by name; `phase`, and `prefix` of the name, narrow the list."""
        records = self.run(flows.list_all(phase, prefix))
        return self._handles(records)

    async def list_async(self, phase: str | None = None, prefix: str | None = None) -> Trainings:
        records = await self.arun(flows.list_all(phase, prefix))
        return self._handles(records)

    def _handles(self, records: Iterable[Training]) -> Trainings:
        handles = (DistributedTraining(self, training) for training in records)
        return HtmlList(handles, trainings_html)

    def executors(self) -> Executors:
        """Executors that trainings can run on, and whether each is reachable now."""
        return self.run(flows.executors()).items

    async def executors_async(self) -> Executors:
        return (await self.arun(flows.executors())).items

    def close(self) -> None:
        """Closes the connections; a private control plane ends, with its trainings."""
        self.wire.close()
        self.endpoint.close()

    async def close_async(self) -> None:
        import asyncio

        await asyncio.to_thread(self.close)

    def run(self, flow: Flow[T]) -> T:
        """Runs a flow to its end and returns its result; for the handles and the command line."""
        return drive(flow, self.wire)

    async def arun(self, flow: Flow[T]) -> T:
        return await adrive(flow, self.wire)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close_async()

    def _shared(self, spec: TrainingSpec) -> dict[str, Any]:
        """Fields that a local rank shares with its caller: the directory and the search paths."""
        return self.endpoint.shared(spec) if spec.executor in (None, "local") else {}


def _note(name: str) -> str:
    return f"the training still exists: client.get({name!r}) finds it, and its delete() removes it"


def drive(flow: Flow[T], wire: Wire) -> T:
    perform = Performer(wire)
    try:
        effect = next(flow)
        while True:
            try:
                answer = perform(effect)
            except Exception as error:
                effect = flow.throw(error)
            else:
                effect = flow.send(answer)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        perform.close()


async def adrive(flow: Flow[T], wire: Wire) -> T:
    perform = AsyncPerformer(wire)
    try:
        effect = next(flow)
        while True:
            try:
                answer = await perform(effect)
            except Exception as error:
                effect = flow.throw(error)
            else:
                effect = flow.send(answer)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        await perform.close()
