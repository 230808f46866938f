"""`atoll k8s operator`: the controller on custom resources and Indexed Jobs.

Several operators may run; only the holder of the Lease acts and answers. It may be killed at any
instant: trainings are in the cluster, and the next holder continues from there. Metrics and
messages to webhooks are in `--data`: the next holder has them if that is the same volume.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import secrets
import socket
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.backends.kubernetes.names import REPORT_KEY
from atoll.backends.kubernetes.options import ClusterOptions
from atoll.controller.informer import INFORMER, Informer
from atoll.core.clock import Now
from atoll.core.config import Config, parse
from atoll.core.errors import (
    AtollError,
    Conflict,
    NotFound,
    Permanent,
    Temporary,
    ValidationError,
)
from atoll.core.webhooks import Webhook
from atoll.metrics.store import MetricStore
from atoll.operator.front import LeaderFront
from atoll.operator.lease import Lease
from atoll.operator.store import KubernetesStore
from atoll.operator.tokens import KubernetesTokens
from atoll.operator.webhooks import WebhookEvents
from atoll.server.app import create_app
from atoll.server.background import CONTROLLER, BackgroundTasks, Work, assemble
from atoll.server.deliver import load_webhooks
from atoll.server.gauges import Gauges
from atoll.server.handlers.admission import Setup
from atoll.server.http.server import GuardedServer, listen
from atoll.server.http.streams import Streams
from atoll.server.ui.sessions import Sessions

log = logging.getLogger(__name__)

KIND = "kubernetes"
RETRY_S = 2.0  # an API server that restarts is back in some seconds


@dataclass
class Operator:
    """What an operator is made of, whether it leads or not."""

    cluster: Cluster
    api_cluster: Cluster  # its watches of clients never hold up the lease
    home: str
    namespace: str | None
    options: ClusterOptions
    folder: Path
    config: Config = field(default_factory=Config)
    webhooks: Sequence[Webhook] = ()
    front: LeaderFront | None = None  # None: there is no HTTP API

    def __post_init__(self) -> None:
        self.store = KubernetesStore(self.cluster, self.namespace)
        self.informer = Informer(self.store)
        self.gauges = Gauges(self.informer)

    async def lead(self) -> None:
        """What the holder of the lease does, until it is cancelled. Its files are open only now: an
        operator that leads next may have the same volume."""
        background = BackgroundTasks()
        with (
            contextlib.closing(MetricStore(self.folder / "series.db")) as metrics,
            contextlib.closing(
                WebhookEvents(
                    self.cluster, self.namespace, self.folder / "outbox.db", self.webhooks
                )
            ) as events,
        ):
            async with contextlib.AsyncExitStack() as serving:
                informing = background.running(INFORMER, self.informer.run)
                await serving.enter_async_context(informing)
                if self.front is not None:
                    api = self._serving(self.front, metrics, background)
                    await serving.enter_async_context(api)
                # Another controller whenever the API server fails or refuses.
                await background.keep_running(
                    CONTROLLER, lambda: self._control(metrics, events, background)
                )

    @contextlib.asynccontextmanager
    async def _serving(
        self, front: LeaderFront, metrics: MetricStore, background: BackgroundTasks
    ) -> AsyncIterator[None]:
        """The HTTP API answers."""
        cluster, key = self.api_cluster, self.options.report_key
        store = KubernetesStore(cluster, self.namespace)
        tokens = KubernetesTokens(cluster, self.home)
        executor = KubernetesBackend(cluster, self.options)
        streams = Streams()
        app = create_app(
            store=store,
            tokens=tokens,
            executors={executor.name: executor},
            streams=streams,
            setup=Setup(new_token=f"atoll token create --home {self.home} --namespace NAMESPACE"),
            informer=self.informer,
            gauges=self.gauges,
            clock=lambda: Now.at(cluster.time()),
            metrics=metrics,
            report_key=bytes.fromhex(key),
            background=background,
            sessions=Sessions(key),
            is_metrics_open=False,
        )
        try:
            async with front.serving(app, streams):
                yield
        finally:
            await executor.stop()
            await store.close()

    async def _control(
        self, metrics: MetricStore, events: WebhookEvents, background: BackgroundTasks
    ) -> None:
        """Runs a controller, and what goes on beside it; none of that ends the controller."""
        cluster = self.cluster
        executor = KubernetesBackend(cluster, self.options, is_owner=True)
        tasks = assemble(
            store=self.store,
            executors={executor.name: executor},
            kinds={executor.name: KIND},
            informer=self.informer,
            clock=lambda: Now.at(cluster.time()),
            metrics=metrics,
            gauges=self.gauges,
            outbox=events.outbox,
            round_stores=self.config.round_stores,
            own_namespace="",  # nobody here is the operator's own user
        )
        control = tasks.pop(CONTROLLER)
        tasks["events for webhooks"] = events.run
        try:
            await events.begin()
            async with asyncio.TaskGroup() as group:
                group.create_task(_run(control))
                for name, work in tasks.items():
                    group.create_task(background.keep_running(name, work))
        finally:
            await executor.stop()
            await self.store.close()


async def _run(work: Work) -> None:
    await work()


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
    config: Path | None = None,
    **options: Any,
) -> None:
    """Runs until cancelled. `namespace` is the one to serve (None: all), `home` the operator's own.

    With `port`, the HTTP API is served there. `data` is where metrics and messages to webhooks are
    kept, `config` a file with webhooks and stores of rounds. `options` are those of
    KubernetesExecutor.
    """
    settings = read_config(config)
    webhooks = load_webhooks(settings.webhooks, settings.path)
    # First, so that a port that is taken is said before anything has begun.
    listening = None if port is None else listen(host, port)
    # Each client that watches needs a connection of its own, and their number is not known.
    api_cluster = cluster or Cluster.connect(most_connections=None)
    cluster = cluster or Cluster.connect()
    home = home or os.environ.get("POD_NAMESPACE") or cluster.namespace
    lease = Lease(
        cluster,
        home,
        identity or f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}",
        duration_s=lease_duration_s,
        # Three renewals may fail before the lease is given up, after two thirds of its duration.
        renew_s=lease_duration_s / 5,
        retry_s=lease_duration_s / 8,
    )
    image = options.get("agent_image") or await _own_image(cluster, home)
    options |= {"namespace": namespace, "agent_image": image}
    key = b"" if listening is None else await _report_key(cluster, home)
    if key:
        options["report_key"] = key.hex()
    elif str(options.get("reports_uri") or "").startswith("http"):
        options["reports_uri"] = None  # no API takes these reports
    try:
        with _folder(data) as folder:
            operator = Operator(
                *(cluster, api_cluster, home, namespace, ClusterOptions(**options)),
                *(folder, settings, webhooks),
            )
            async with asyncio.TaskGroup() as tasks:
                if listening is not None:
                    operator.front = LeaderFront()
                    tasks.create_task(serve_api(operator.front, listening))
                while True:
                    await lease.lead(operator.lead)
    finally:
        await cluster.close()
        await api_cluster.close()


def read_config(path: Path | None) -> Config:
    """Raises ValidationError for what is wrong in it, or is of no use to an operator."""
    if path is None:
        return Config()
    try:
        config = parse(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ValidationError("--config", str(path), f"cannot read this file: {reason}") from error
    expected = "expected [[webhooks]] and [[rounds.stores]] alone: an operator reads nothing else"
    if config.executors != Config().executors:
        raise ValidationError(f"{path}: executors", list(config.executors), expected)
    if config.defaults:
        raise ValidationError(f"{path}: defaults", list(config.defaults), expected)
    return config


@contextlib.contextmanager
def _folder(data: Path | None) -> Iterator[Path]:
    """The folder for files of this process; without one of the caller's it is removed at the end.

    Raises Permanent if nothing can be written there.
    """
    try:
        created = tempfile.TemporaryDirectory(prefix="atoll-operator-") if data is None else None
        folder = Path(created.name) if created is not None else data or Path()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / "space").write_bytes(b" ")
    except OSError as error:
        where = data or tempfile.gettempdir()
        text = f"cannot write to {where}: {error.strerror}; choose another --data"
        raise Permanent(text) from error
    try:
        yield folder
    finally:
        if created is not None:
            created.cleanup()


async def _report_key(cluster: Cluster, home: str) -> bytes:
    while True:
        try:
            return await _shared_key(cluster, home)
        except Temporary as error:
            log.warning("the key of ranks' tokens cannot be read: %s; trying again", error)
            await asyncio.sleep(RETRY_S)
        except AtollError as error:
            log.warning("ranks cannot report: %s; apply the manifests of this release", error)
            return b""


async def _shared_key(cluster: Cluster, home: str) -> bytes:
    """The key with which all operators of a cluster sign and check the tokens of ranks, made on
    first use. Raises Denied without the rights, and BackendError."""
    while True:
        try:
            secret = await cluster.get("secrets", home, REPORT_KEY)
            return base64.b64decode(secret["data"]["key"])
        except NotFound:
            pass
        created: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": REPORT_KEY},
            "data": {"key": base64.b64encode(secrets.token_bytes(32)).decode()},
        }
        with contextlib.suppress(Conflict):  # another operator was faster
            await cluster.create("secrets", home, created)


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


class _Server(GuardedServer):
    def capture_signals(self) -> Any:
        """Signals are the operator's to handle, not the server's."""
        return contextlib.nullcontext()


async def serve_api(front: LeaderFront, listening: socket.socket) -> None:
    """Serves until cancelled."""
    server = _Server(front)
    task = asyncio.create_task(server.serve([listening]))
    try:
        await asyncio.shield(task)
    finally:
        server.should_exit = True
        await task
