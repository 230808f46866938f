"""The same HTTP API as everywhere, in the cluster: any replica serves, the leader acts."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import uvicorn

from atoll.kubernetes.client import Cluster
from atoll.kubernetes.executor import JobExecutor
from atoll.kubernetes.store import KubernetesStore
from atoll.server.app import create_app
from atoll.server.streams import Streams


class _Server(uvicorn.Server):
    def capture_signals(self) -> Any:
        """The operator ends as a whole; the server does not decide that."""
        return contextlib.nullcontext()


async def serve_api(
    cluster: Cluster, store: KubernetesStore, options: dict[str, Any], *, host: str, port: int
) -> None:
    """Until cancelled. Open watches end first, so that clients turn to another replica."""
    executor = JobExecutor(cluster=cluster, **options)
    streams = Streams()
    app = create_app(store=store, executors={executor.name: executor}, streams=streams)
    server = _Server(
        uvicorn.Config(
            app,
            host=host,
            port=port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=3,
        )
    )
    task = asyncio.create_task(server.serve())
    try:
        await asyncio.shield(task)
    finally:
        streams.close()
        server.should_exit = True
        await task
