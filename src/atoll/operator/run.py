"""`atoll operator`: the controller on custom resources and Indexed Jobs.

Several operators may run; only the holder of the Lease acts. It may be killed at any instant: all
state is in the cluster, and the next holder continues from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import uuid
from typing import Any

from atoll.controller.loop import Controller
from atoll.controller.sweep import keep_swept
from atoll.core.clock import Time
from atoll.core.errors import AtollError, BackendError, Denied, NotFound
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.executor import KubernetesBackend
from atoll.kubernetes.lease import Lease
from atoll.kubernetes.store import KubernetesStore
from atoll.kubernetes.tokens import KubernetesTokens
from atoll.server.app import create_app
from atoll.server.executors import Setup
from atoll.server.gauges import Gauges
from atoll.server.serving import GuardedServer, listen
from atoll.server.streams import Streams

log = logging.getLogger(__name__)

# Jobs stay until the controller has read the exits; it enforces the deadline.
DEFAULTS = {
    "is_controlled": True,
    "is_start_gated": True,
    "ttl_seconds_after_finished": None,
    "deadline_margin_s": 60,
}
RETRY_S = 2.0


async def run_operator(
    *,
    namespace: str | None = None,
    home: str | None = None,
    identity: str | None = None,
    cluster: Cluster | None = None,
    lease_duration_s: float = 15.0,
    host: str = "0.0.0.0",
    port: int | None = None,
    **options: Any,
) -> None:
    """Runs until cancelled. `namespace` is the one to serve (None: all), `home` the operator's own.

    With `port`, the HTTP API is served there. `options` are those of KubernetesExecutor.
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
    )
    image = options.get("agent_image") or await _own_image(cluster, home)
    options = {**DEFAULTS, **options, "namespace": namespace, "agent_image": image}
    gauges = Gauges()
    try:
        async with asyncio.TaskGroup() as tasks:
            if listening is not None:
                store = KubernetesStore(api_cluster, namespace)
                tokens = KubernetesTokens(api_cluster, home)
                tasks.create_task(
                    serve_api(
                        api_cluster, store, tokens, options, listening=listening, gauges=gauges
                    )
                )
            while True:
                await lease.lead(lambda: _lead(cluster, namespace, options, gauges))
    finally:
        await cluster.close()
        await api_cluster.close()


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
    cluster: Cluster, namespace: str | None, options: dict[str, Any], gauges: Gauges
) -> None:
    """Runs a controller, and another one whenever the API server fails or refuses."""
    while True:
        store = KubernetesStore(cluster, namespace)
        executor = KubernetesBackend(**options, cluster=cluster, is_owner=True)
        try:
            async with asyncio.TaskGroup() as tasks:
                controller = Controller(
                    store,
                    {executor.name: executor},
                    clock=lambda: Time(cluster.time()),
                    on_pass=lambda done: gauges.reconciled(done.seconds),
                )
                tasks.create_task(controller.run())
                tasks.create_task(keep_swept(store, executor))
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


async def serve_api(
    cluster: Cluster,
    store: KubernetesStore,
    tokens: KubernetesTokens,
    options: dict[str, Any],
    listening: socket.socket,
    gauges: Gauges,
) -> None:
    """Serves until cancelled. Open watches end first, so that clients turn to another replica."""
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
        is_metrics_open=False,
    )
    server = _Server(app)
    task = asyncio.create_task(server.serve([listening]))
    try:
        await asyncio.shield(task)
    finally:
        streams.close()
        server.should_exit = True
        await task
