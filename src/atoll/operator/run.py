"""`atoll operator`: the same controller, on custom resources and Indexed Jobs.

Several may run; the holder of the Lease acts. It may be killed at any instant: what it had done is
in the cluster, and the next one goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import uuid
from typing import Any

from atoll.controller.loop import Controller
from atoll.core.errors import AtollError, Temporary
from atoll.executors.kubernetes import JobExecutor
from atoll.operator.lease import Lease
from atoll.operator.serve import serve_api
from atoll.remote.kubernetes import Cluster
from atoll.store.kubernetes import KubernetesStore

log = logging.getLogger(__name__)

SWEEP_S = 300.0
# Exits are held for the controller, and the Job until it has taken them; it keeps the deadline.
DEFAULTS = {
    "is_exit_held": True,
    "is_start_gated": True,
    "ttl_seconds_after_finished": None,
    "deadline_margin_s": 60,
}
RETRY_S = 1.0


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
    """Until cancelled. `namespace` is the one served, all of them if None; `home` is its own.

    With `port`, the HTTP API is served there. `options` are those of KubernetesExecutor.
    """
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
    options = {**DEFAULTS, **options, "namespace": namespace}
    try:
        async with asyncio.TaskGroup() as tasks:
            if port is not None:
                store = KubernetesStore(cluster, namespace, home=home)
                tasks.create_task(serve_api(cluster, store, options, host=host, port=port))
            while True:
                await lease.lead(lambda: _lead(cluster, namespace, options))
    finally:
        await cluster.close()


async def _lead(cluster: Cluster, namespace: str | None, options: dict[str, Any]) -> None:
    """One controller after another: one that meets an API server that is away starts afresh."""
    while True:
        store = KubernetesStore(cluster, namespace)
        executor = JobExecutor(**options, cluster=cluster, is_owner=True)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(Controller(store, {executor.name: executor}).run())
                tasks.create_task(_sweep(store, executor))
        except* Temporary as group:
            log.warning("%s; starting again", group.exceptions[0])
        finally:
            await store.close()
        await asyncio.sleep(RETRY_S)


async def _sweep(store: KubernetesStore, executor: JobExecutor) -> None:
    """Pods of trainings that were removed by force would otherwise wait for us for ever."""

    async def known() -> set[str]:
        return {training.uid for training in await store.list()}

    while True:
        try:
            await executor.sweep(known)
        except AtollError as error:
            log.warning("sweeping: %s", error)
        await asyncio.sleep(SWEEP_S)
