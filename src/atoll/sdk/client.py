"""The client of one control plane, and the drivers that run its flows."""

from __future__ import annotations

import uuid
from types import TracebackType
from typing import Any, Unpack

from atoll.core.checks import check_name
from atoll.core.errors import BelowMinimumWorld
from atoll.core.executors import ExecutorStatus
from atoll.core.spec import TrainingSpec
from atoll.sdk import flows
from atoll.sdk.config import stated_spec
from atoll.sdk.effects import Flow, T
from atoll.sdk.endpoint import Endpoint, chosen
from atoll.sdk.options import DeployOptions, wait_of
from atoll.sdk.training import DistributedTraining
from atoll.sdk.wire import AsyncPerformer, Performer, Wire

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
        spec, (wait, timeout) = stated_spec(name, options), wait_of(options)
        stored = self.run(flows.deploy(spec, self._shared(spec), uuid.uuid4().hex))
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
        spec, (wait, timeout) = stated_spec(name, options), wait_of(options)
        stored = await self.arun(flows.deploy(spec, self._shared(spec), uuid.uuid4().hex))
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
        return [DistributedTraining(self, training) for training in records]

    async def list_async(self, phase: str | None = None, prefix: str | None = None) -> Trainings:
        records = await self.arun(flows.list_all(phase, prefix))
        return [DistributedTraining(self, training) for training in records]

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
