"""The way in: one Client, one control plane."""

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
        """A control plane of its own, for tests and notebooks: gone on `close()`, with its ranks.

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
        sent. A training whose wait fails goes on: `client.get(name)` finds it.
        """
        spec, (wait, timeout) = stated_spec(name, options), wait_of(options)
        made = self.run(flows.deploy(spec, self._shared(spec), uuid.uuid4().hex))
        training = DistributedTraining(self, made)
        try:
            if wait == "min":
                training.wait_until_min_world(timeout)
            if wait == "target":
                training.wait_until_target_world(timeout)
        except BelowMinimumWorld as error:
            error.add_note(_left(name))
            raise
        return training

    async def deploy_distributed_async(
        self, name: str, **options: Unpack[DeployOptions]
    ) -> DistributedTraining:
        spec, (wait, timeout) = stated_spec(name, options), wait_of(options)
        made = await self.arun(flows.deploy(spec, self._shared(spec), uuid.uuid4().hex))
        training = DistributedTraining(self, made)
        try:
            if wait == "min":
                await training.wait_until_min_world_async(timeout)
            if wait == "target":
                await training.wait_until_target_world_async(timeout)
        except BelowMinimumWorld as error:
            error.add_note(_left(name))
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
        """All trainings by name, or those in that phase, or whose names begin so."""
        found = self.run(flows.list_all(phase, prefix))
        return [DistributedTraining(self, training) for training in found]

    async def list_async(self, phase: str | None = None, prefix: str | None = None) -> Trainings:
        found = await self.arun(flows.list_all(phase, prefix))
        return [DistributedTraining(self, training) for training in found]

    def executors(self) -> Executors:
        """Where trainings can run, and whether each of these places answers now."""
        return self.run(flows.executors()).items

    async def executors_async(self) -> Executors:
        return (await self.arun(flows.executors())).items

    def close(self) -> None:
        """Connections closed; a private control plane ends, with its trainings."""
        self.wire.close()
        self.endpoint.close()

    async def close_async(self) -> None:
        import asyncio

        await asyncio.to_thread(self.close)

    def run(self, flow: Flow[T]) -> T:
        """For the handles and the command line: a flow, run to its end."""
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
        """What a local rank shares with its caller: the directory, and where programs are."""
        return self.endpoint.shared(spec) if spec.executor in (None, "local") else {}


def _left(name: str) -> str:
    return f"the training goes on: client.get({name!r}) finds it, and its delete() removes it"


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
