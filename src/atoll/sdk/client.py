"""The client of one control plane, and the drivers that run its flows."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Never, Unpack

from atoll.core.errors import BelowMinimumWorld, Conflict, NotFound
from atoll.core.executors import ExecutorStatus, Limits
from atoll.core.html import HtmlList, trainings_html
from atoll.core.settings import Setting, name_label
from atoll.core.spec import ProviderFilter, TrainingSpec, WorldSize
from atoll.core.status import Training
from atoll.sdk import flows
from atoll.sdk.config import resolve_training
from atoll.sdk.effects import Flow, T
from atoll.sdk.endpoint import Endpoint, choose_endpoint
from atoll.sdk.options import DeployOptions, Wait, wait_of
from atoll.sdk.training import DELETE_S, DistributedTraining
from atoll.sdk.wire import AsyncPerformer, Performer, Wire

if TYPE_CHECKING:
    from atoll.sdk.sweep import MapRun, Sweep

Trainings = list[DistributedTraining]
Executors = list[ExecutorStatus]


class Client:
    """Trainings on one control plane.

    Without `url` and `ATOLL_URL` it is the user's own local one, started on first use. Threads may
    share a client. `Client.local()` is a private control plane that ends with its block.
    """

    def __init__(self, url: str | None = None, token: str | None = None) -> None:
        self._open(choose_endpoint(url, token))

    @classmethod
    def local(cls) -> Client:
        """A private control plane for tests and notebooks; `close()` ends it and its ranks.

        `with Client.local() as client: …`
        """
        from atoll.sdk.endpoint import PrivatePlane

        client = cls.__new__(cls)
        client._open(PrivatePlane())
        return client

    def _open(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.wire = Wire(endpoint)

    def deploy_distributed(
        self,
        name: str,
        *,
        command: Sequence[str] | None = None,
        source: str | Path | Callable[..., Any] | None = None,
        args: Sequence[str] | None = None,
        image: str | None = None,
        env: Mapping[str, str] | None = None,
        working_dir: str | Path | None = None,
        code: bool | None = None,
        cpu: str | int | float | None = None,
        memory: str | None = None,
        gpu_count: int | None = None,
        gpu_models: Sequence[str] | None = None,
        min_gpu_memory_gb: int | None = None,
        world_size: WorldSize | int | None = None,
        provider_filter: ProviderFilter | None = None,
        topology_spread: str | None = None,
        nccl_env: Mapping[str, str] | None = None,
        bench: str | None = None,
        bench_placement: str | None = None,
        bench_require_gbps: float | None = None,
        rendezvous_backend: str | None = None,
        rendezvous_uri: str | None = None,
        run_id: str | None = None,
        pip_packages: Sequence[str] | None = None,
        max_restarts: int | None = None,
        start_grace_s: float | str | None = None,
        stop_grace_s: float | str | None = None,
        deadline_s: float | str | None = None,
        ttl_seconds: int | str | None = None,
        stall_s: float | str | None = None,
        stall_restart: bool | None = None,
        executor: str | None = None,
        mesh: bool | None = None,
        replace: bool | None = None,
        labels: Mapping[str, str] | None = None,
        settings: Mapping[str, Setting] | None = None,
        wait: Wait | None = None,
        timeout: float | None = None,
        **unknown: Never,
    ) -> DistributedTraining:
        """Store a training and return its handle.

        It returns as soon as the training is stored, unless `wait` is set. Options that are None
        come from `[defaults]` of atoll.toml, else from the control plane. Durations take seconds,
        "30s", "5m" or "2h". Raises ValidationError before anything is sent; if the wait fails, the
        training still exists: `get(name)` finds it.

        Args:
            name: unique in the namespace, such as "train-lr0.1"; where a DNS label is needed,
                other characters become '-'.
            command: the program of a rank and its arguments.
            source: instead of `command`: the path of a script, or a function.
            args: further arguments, as text.
            image: container image of the ranks.
            env: environment variables of the ranks.
            working_dir: directory in which the ranks start.
            code: False sends no code to ranks that run elsewhere: the image has it.
            cpu: CPUs of each rank, such as 2 or "500m".
            memory: memory of each rank, such as "4Gi".
            gpu_count: GPUs of each rank.
            gpu_models: GPU models that a rank may use, such as ["H100"].
            min_gpu_memory_gb: memory that each GPU must have.
            world_size: `WorldSize(min, target, max)`, or a number for all three; 1.
            provider_filter: providers that ranks may or must not use.
            topology_spread: "pack", "provider-aware", "region-aware" or "none".
            nccl_env: NCCL variables of the ranks.
            bench: "on-start" measures the link between two hosts; "off".
            bench_placement: "strict" measures hosts of ranks only; "preferred" others too.
            bench_require_gbps: lowest bandwidth with which the training may start.
            rendezvous_backend: "c10d", "static", "etcd-v2", or "none": ranks do not meet.
            rendezvous_uri: object store that the ranks share.
            run_id: DiLoCo run in that store to begin or to resume.
            pip_packages: packages to install for the ranks.
            max_restarts: number of times a failed rank is restarted; 0.
            start_grace_s: how long to wait for all ranks before `min` of them start.
            stop_grace_s: time between asking a rank to stop and killing it.
            deadline_s: how long the training may run.
            ttl_seconds: how long to keep the record after the end.
            stall_s: report a rank as stalled after so long without output, metrics or CPU use.
            stall_restart: restart stalled ranks, within `max_restarts`.
            executor: where ranks run, by a name that `executors()` lists.
            mesh: start the ranks only when their hosts reach each other.
            replace: stop and remove a training of this name first, as when you run a notebook
                cell again.
            labels: names and texts to find the training by; those with one "group" are one row.
            settings: what was varied, such as {"lr": 0.1}; lists show and sort by it.
            wait: also wait for "min" or "target" ranks.
            timeout: how long `wait` waits in seconds; 600.
        """
        options = {
            option: value
            for option, value in locals().items()
            if option in DeployOptions.__annotations__
        }
        return self.run(self._deploy(name, options | unknown))

    # Its signature, for help() and editors, is that of the method above.
    async def deploy_distributed_async(
        self, name: str, **options: Unpack[DeployOptions]
    ) -> DistributedTraining:
        """As `deploy_distributed`, in a coroutine."""
        return await self.arun(self._deploy(name, options))

    deploy_distributed_async.__wrapped__ = deploy_distributed  # type: ignore[attr-defined]

    def _deploy(self, name: str, options: Mapping[str, Any]) -> Flow[DistributedTraining]:
        (spec, pack), (goal, limit_s) = resolve_training(name, options), wait_of(options)
        key = uuid.uuid4().hex
        does_replace = bool(options.get("replace"))
        if does_replace:
            yield from self._remove(spec.name)
        while True:
            try:
                stored = yield from flows.deploy(spec, self._local_fields(spec), key, pack)
                break
            except Conflict:
                # One that was stored since then is replaced, too.
                if not does_replace or not (yield from self._remove(spec.name)):
                    raise
        training = DistributedTraining(self, stored)
        try:
            if goal is not None:
                yield from training._wait(flows.WAITS[goal], limit_s)
        except BelowMinimumWorld as error:
            error.add_note(
                f"the training still exists: client.get({name!r}) finds it, and its delete() "
                "removes it"
            )
            raise
        return training

    def _remove(self, name: str) -> Flow[bool]:
        """Whether there was one of this name."""
        try:
            training = yield from flows.get(name)
        except NotFound:
            return False
        yield from flows.delete(flows.TrainingRef(name, training.uid), DELETE_S)
        return True

    def map(
        self,
        function: Callable[..., Any],
        settings: Iterable[Mapping[str, Any]],
        /,
        *,
        concurrency: int | None = None,
        name: str | None = None,
        allow_pickle: bool = False,
        **options: Unpack[DeployOptions],
    ) -> Sweep:
        """Call `function(**setting)` for each of the settings, each as a training of its own, at
        most `concurrency` of them at once (default: the number of CPUs). Returns when all ended.

        Rows have `result`, `error` and `training`; `print` shows a table. The same call again, for
        example after Ctrl-C, continues: it keeps what succeeded or still runs, and runs again what
        failed. The arguments are the settings of the trainings, and all have one label `group`:
        `atoll ps --group` lists them. If the code of the function or `name` changes, all start
        again. With `allow_pickle`, results travel as pickles, which can run any code here.
        `options` are those of `deploy_distributed`.
        """
        sweeping = self._sweeping(function, settings, concurrency, name, options, allow_pickle)
        try:
            return self.run(sweeping.rows())
        except KeyboardInterrupt:
            sweeping.print_interrupted()
            raise

    async def map_async(
        self,
        function: Callable[..., Any],
        settings: Iterable[Mapping[str, Any]],
        /,
        *,
        concurrency: int | None = None,
        name: str | None = None,
        allow_pickle: bool = False,
        **options: Unpack[DeployOptions],
    ) -> Sweep:
        sweeping = self._sweeping(function, settings, concurrency, name, options, allow_pickle)
        return await self.arun(sweeping.rows())

    def _sweeping(
        self,
        function: Callable[..., Any],
        settings: Iterable[Mapping[str, Any]],
        concurrency: int | None,
        name: str | None,
        options: DeployOptions,
        allow_pickle: bool,
    ) -> MapRun:
        from atoll.agent.result import PICKLE, RESULTS_VARIABLE
        from atoll.sdk.sweep import MapRun, jobs_of, label_of  # imported here: it loads slowly

        if allow_pickle:
            options = {**options, "env": {**(options.get("env") or {}), RESULTS_VARIABLE: PICKLE}}
        jobs = jobs_of(function, settings, name)
        sweeping = MapRun(
            self,
            function,
            jobs,
            name or label_of(function),
            concurrency,
            options,
            allow_pickle=allow_pickle,
        )
        sweeping.check()
        return sweeping

    def get(self, name: str) -> DistributedTraining:
        """Return the handle of an existing training. Raises NotFound."""
        return DistributedTraining(self, self.run(flows.get(name_label("name", name))))

    async def get_async(self, name: str) -> DistributedTraining:
        return DistributedTraining(self, await self.arun(flows.get(name_label("name", name))))

    def list(
        self,
        phase: str | None = None,
        prefix: str | None = None,
        *,
        labels: flows.Conditions = None,
        settings: flows.Conditions = None,
        metrics: flows.Conditions = None,
        sort: str | None = None,
    ) -> Trainings:
        """List trainings, by default sorted by name. The options other than `sort` filter them.

        `labels`, `settings` and `metrics` are a dict of values, or conditions such as
        `["lr>=0.1", "width"]`; of a metric `loss<2` tests the newest value, `min:loss<2` and
        `max:loss<2` the lowest and the highest. `sort` is "age", "name", "phase", "ran", "ready",
        "label:team", "setting:lr", or a metric: "loss", "min:loss". A leading "-" reverses it.
        """
        return self._handles(
            self.run(
                flows.list_all(
                    phase, prefix, labels=labels, settings=settings, metrics=metrics, sort=sort
                )
            )
        )

    async def list_async(
        self,
        phase: str | None = None,
        prefix: str | None = None,
        *,
        labels: flows.Conditions = None,
        settings: flows.Conditions = None,
        metrics: flows.Conditions = None,
        sort: str | None = None,
    ) -> Trainings:
        return self._handles(
            await self.arun(
                flows.list_all(
                    phase, prefix, labels=labels, settings=settings, metrics=metrics, sort=sort
                )
            )
        )

    def _handles(self, records: Iterable[Training]) -> Trainings:
        handles = (DistributedTraining(self, training) for training in records)
        return HtmlList(handles, trainings_html)

    def executors(self) -> Executors:
        """List the executors, and whether each is reachable now."""
        return self.run(flows.executors()).items

    async def executors_async(self) -> Executors:
        return (await self.arun(flows.executors())).items

    def set_limits(
        self,
        *,
        slots: int | None = None,
        cpu: str | None = None,
        memory: str | None = None,
        executor: str = "local",
    ) -> Executors:
        """Set what all ranks on this machine together may ask for; None leaves a limit as it is.

        The limits survive a restart of the control plane. Running ranks keep running.
        """
        limits = Limits(slots=slots, cpu=cpu, memory=memory)
        return self.run(flows.set_limits(name_label("executor", executor), limits)).items

    async def set_limits_async(
        self,
        *,
        slots: int | None = None,
        cpu: str | None = None,
        memory: str | None = None,
        executor: str = "local",
    ) -> Executors:
        limits = Limits(slots=slots, cpu=cpu, memory=memory)
        return (await self.arun(flows.set_limits(name_label("executor", executor), limits))).items

    def close(self) -> None:
        """Close the connections. A private control plane ends with its trainings."""
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

    def _local_fields(self, spec: TrainingSpec) -> dict[str, Any]:
        """Fields that a local rank shares with its caller: the directory and the search paths."""
        return self.endpoint.local_fields(spec) if spec.executor in (None, "local") else {}


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
