"""`atoll operator`: the controller on custom resources and Indexed Jobs.

Several operators may run; only the holder of the Lease acts, and answers what only it knows. It may
be killed at any instant: all state is in the cluster, and the next holder continues from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import socket
import sqlite3
import tempfile
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.controller.loop import Controller
from atoll.controller.reconcile import unknown
from atoll.controller.sweep import keep_swept
from atoll.core.clock import Time
from atoll.core.config import RoundStore
from atoll.core.errors import AtollError, BackendError, Denied, NotFound, Permanent, Temporary
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.executor import KubernetesBackend
from atoll.kubernetes.lease import Lease
from atoll.kubernetes.store import KubernetesStore
from atoll.kubernetes.tokens import KubernetesTokens
from atoll.operator.forward import LeaderAnswers
from atoll.operator.keep import COPY_KIB, SeriesCopies
from atoll.operator.secret_key import report_key
from atoll.operator.webhooks import ClusterWebhooks
from atoll.rounds.follow import RoundFollower, figures_of, whose_of
from atoll.series.collect import Collector
from atoll.series.keep import SeriesKeeper
from atoll.server.app import create_app
from atoll.server.deliver import Deliverer
from atoll.server.executors import Setup
from atoll.server.gauges import Gauges
from atoll.server.serving import GuardedServer, listen
from atoll.server.streams import Streams
from atoll.store.outbox import Outbox, outbox_in_memory

if TYPE_CHECKING:
    from starlette.types import ASGIApp

log = logging.getLogger(__name__)

KIND = "kubernetes"
# Jobs stay until the controller has read the exits; it enforces the deadline.
DEFAULTS = {
    "is_controlled": True,
    "is_start_gated": True,
    "ttl_seconds_after_finished": None,
    "deadline_margin_s": 60,
}
RETRY_S = 2.0


@dataclass
class Shown:
    """What a training shows of itself: the parts that only the leader uses."""

    series: SeriesKeeper
    copies: SeriesCopies
    webhooks: ClusterWebhooks
    deliverer: Deliverer
    round_stores: Sequence[RoundStore] = ()
    is_ready: bool = False  # what other operators left was read

    async def begin(self) -> None:
        """Before anything is done for a training: what it was told of must not be told again."""
        try:
            await self.webhooks.load()
        except Denied as error:
            log.warning("no webhooks are delivered: %s; apply the manifests of this release", error)

    def works(
        self, store: KubernetesStore, executor: KubernetesBackend
    ) -> list[Coroutine[Any, Any, None]]:
        """What goes on beside the controller. None of it ends the controller."""
        return [
            self._keep(store, executor),
            _again("webhooks", self.webhooks.run),
            _again("deliveries to webhooks", self.deliverer.run),
        ]

    async def _keep(self, store: KubernetesStore, executor: KubernetesBackend) -> None:
        while not self.is_ready:
            try:
                await self.copies.restore()
                self.is_ready = True
            except (AtollError, sqlite3.Error) as error:
                log.warning("the series of other operators cannot be read: %s", error)
                await asyncio.sleep(RETRY_S)
        executors = {executor.name: executor}
        collector = Collector(self.series, figures_of(executors))
        follower = RoundFollower(
            self.series.rounds,
            whose_of(executors, {executor.name: KIND}),
            self.round_stores,
            own_namespace="",  # nobody here is the operator's own user
        )
        async with asyncio.TaskGroup() as tasks:
            for what, work in (
                ("copies of series", self.copies.run),
                ("series", collector.run),
                ("rounds", follower.run),
            ):
                tasks.create_task(_again(what, functools.partial(work, store)))


async def _again(what: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Does the work, and again when it fails: the controller goes on meanwhile."""
    while True:
        try:
            await work()
            return
        except* (AtollError, OSError, sqlite3.Error) as group:
            log.warning("%s: %s; trying again", what, _first(group))
        except* Exception:  # whatever is shown of trainings, they are looked after
            log.exception("%s; trying again", what)
        await asyncio.sleep(RETRY_S)


async def run_operator(
    *,
    namespace: str | None = None,
    home: str | None = None,
    identity: str | None = None,
    cluster: Cluster | None = None,
    lease_duration_s: float = 15.0,
    host: str = "0.0.0.0",
    port: int | None = None,
    data: Path | None = None,
    copy_kib: int = COPY_KIB,
    round_stores: Sequence[RoundStore] = (),
    private_webhooks: Collection[str] = (),
    **options: Any,
) -> None:
    """Runs until cancelled. `namespace` is the one to serve (None: all), `home` the operator's own.

    With `port`, the HTTP API is served there. `data` is where series are kept while it leads, and
    `copy_kib` how much of each training is copied to the cluster. `private_webhooks` are namespaces
    whose webhooks may go to private addresses. `options` are those of KubernetesExecutor.
    """
    # First, so that a port that is taken is said before anything has begun.
    listening = None if port is None else listen(host, port)
    # Watches of clients have connections of their own: they never hold up the lease.
    api_cluster = cluster or Cluster.connect(most_connections=None)
    cluster = cluster or Cluster.connect()
    home = home or os.environ.get("POD_NAMESPACE") or cluster.namespace
    lease = Lease(
        cluster,
        home,
        identity or f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}",
        duration_s=lease_duration_s,
        renew_s=lease_duration_s / 5,
        retry_s=lease_duration_s / 8,
        address="" if listening is None else _address(host, listening),
    )
    image = options.get("agent_image") or await _own_image(cluster, home)
    options = {**DEFAULTS, **options, "namespace": namespace, "agent_image": image}
    key = b"" if listening is None else await _report_key(cluster, home)
    if key:
        options["report_key"] = key.hex()
    elif str(options.get("reports_uri") or "").startswith("http"):
        options["reports_uri"] = None  # nobody takes what ranks would report there
    gauges = Gauges()
    try:
        with _folder(data) as folder:
            outbox = outbox_in_memory()
            series = SeriesKeeper(folder / "series.db")
            farewell_s = lease_duration_s / 5
            shown = Shown(
                series,
                SeriesCopies(cluster, series, namespace, copy_kib * 2**10, farewell_s),
                ClusterWebhooks(cluster, home, namespace, outbox, farewell_s),
                Deliverer(outbox, trusted=private_webhooks),
                round_stores,
            )
            async with asyncio.TaskGroup() as tasks:
                if listening is not None:
                    store = KubernetesStore(api_cluster, namespace)
                    tokens = KubernetesTokens(api_cluster, home)
                    app, streams = api_of(
                        api_cluster, store, tokens, options, gauges, shown, outbox
                    )
                    answers = LeaderAnswers(
                        app, lambda: lease.leader, lambda: lease.is_held and shown.is_ready
                    )
                    tasks.create_task(serve_api(answers, streams, listening))
                while True:
                    await lease.lead(lambda: _lead(cluster, namespace, options, gauges, shown))
                    shown.is_ready = False
                    series.clear()  # it is the next leader's now
    finally:
        await cluster.close()
        await api_cluster.close()


@contextlib.contextmanager
def _folder(data: Path | None) -> Iterator[Path]:
    """The folder for files of this process; without one of the caller's it is removed at the end.

    Raises Permanent if nothing can be written there.
    """
    try:
        made = tempfile.TemporaryDirectory(prefix="atoll-operator-") if data is None else None
        folder = Path(made.name) if made is not None else data or Path()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "space").write_bytes(b" ")
    except OSError as error:
        where = data or tempfile.gettempdir()
        text = f"cannot write to {where}: {error.strerror}; choose another --data"
        raise Permanent(text) from error
    try:
        yield folder
    finally:
        if made is not None:
            made.cleanup()


def _address(host: str, listening: socket.socket) -> str:
    """Where other operators reach this one; empty if that is unknown."""
    port = listening.getsockname()[1]
    where = os.environ.get("POD_IP") or ("" if host in ("0.0.0.0", "::") else host)
    if not where:
        return ""
    return f"[{where}]:{port}" if ":" in where else f"{where}:{port}"


async def _report_key(cluster: Cluster, home: str) -> bytes:
    while True:
        try:
            return await report_key(cluster, home)
        except Temporary as error:
            log.warning("the key of ranks' tokens cannot be read: %s; trying again", error)
            await asyncio.sleep(RETRY_S)
        except AtollError as error:
            log.warning("ranks cannot report: %s; apply the manifests of this release", error)
            return b""


async def _own_image(cluster: Cluster, home: str) -> str | None:
    """The image of the pod this process runs in, which has Python and atoll; None outside a pod."""
    name = os.environ.get("POD_NAME")
    if not name:
        return None
    try:
        pod = await cluster.get("pods", home, name)
    except AtollError as error:
        log.warning(
            "the operator's image is unknown, so trainings with mesh or bench are refused: %s",
            error,
        )
        return None
    return str(pod["spec"]["containers"][0]["image"])


async def _lead(
    cluster: Cluster,
    namespace: str | None,
    options: dict[str, Any],
    gauges: Gauges,
    shown: Shown | None = None,
) -> None:
    """Runs a controller, and another one whenever the API server fails or refuses."""
    while True:
        store = KubernetesStore(cluster, namespace)
        executor = KubernetesBackend(**options, cluster=cluster, is_owner=True)
        try:
            if shown is not None:
                await shown.begin()
            async with asyncio.TaskGroup() as tasks:
                controller = Controller(
                    store,
                    {executor.name: executor},
                    clock=lambda: Time(cluster.time()),
                    on_pass=lambda done: gauges.reconciled(done.seconds),
                    quiet_s=unknown if shown is None else shown.series.stillness.quiet_s,
                )
                tasks.create_task(controller.run())
                tasks.create_task(keep_swept(store, executor))
                for work in () if shown is None else shown.works(store, executor):
                    tasks.create_task(work)
        except* (BackendError, Denied, NotFound) as group:
            log.warning("the controller stopped and starts again: %s", _first(group))
        finally:
            await executor.stop()
            await store.close()
        await asyncio.sleep(RETRY_S)


def _first(error: BaseException) -> BaseException:
    """The first error of a group; the others say the same (a missing right, a missing CRD)."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


class _Server(GuardedServer):
    def capture_signals(self) -> Any:
        """Signals are the operator's to handle, not the server's."""
        return contextlib.nullcontext()


def api_of(
    cluster: Cluster,
    store: KubernetesStore,
    tokens: KubernetesTokens,
    options: dict[str, Any],
    gauges: Gauges,
    shown: Shown,
    outbox: Outbox,
) -> tuple[ASGIApp, Streams]:
    """The HTTP API of this operator, and what its open streams hang on."""
    executor = KubernetesBackend(cluster=cluster, **options)
    streams = Streams()
    app = create_app(
        store=store,
        tokens=tokens,
        executors={executor.name: executor},
        streams=streams,
        setup=Setup(new_token=f"atoll token create --home {tokens.home} --namespace NAMESPACE"),
        gauges=gauges,
        clock=lambda: Time(cluster.time()),
        series=shown.series,
        outbox=outbox,
        deliverer=shown.deliverer,
        keep_webhooks=shown.webhooks.save,
        report_key=bytes.fromhex(options.get("report_key", "")),
        is_metrics_open=False,
    )
    return app, streams


async def serve_api(app: LeaderAnswers, streams: Streams, listening: socket.socket) -> None:
    """Serves until cancelled. Open watches end first, so that clients turn to another replica."""
    server = _Server(app)
    task = asyncio.create_task(server.serve([listening]))
    try:
        await asyncio.shield(task)
    finally:
        streams.close()
        server.should_exit = True
        await task
        await app.close()
