"""The operator as a process that can be told to SIGKILL itself at a step of its controller.

    python -m tests.e2e.kubernetes.armed_operator NAMESPACE OPTIONS ARM_FILE

Before each step it looks for the file: `before get 1` in it arms the step. What the executor does
to single pods can be armed, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.backends.kubernetes.options import ClusterOptions
from atoll.controller.loop import Controller
from atoll.operator.store import KubernetesStore
from tests.support.serve import Crashing


class Armed(Crashing):
    def __init__(self, inner: Any, file: Path) -> None:
        super().__init__(inner)
        self._file = file

    def __getattr__(self, name: str) -> Any:
        if self._armed is None and self._file.exists():
            when, call, nth = self._file.read_text().split()
            self.arm(call, when, int(nth))
        return super().__getattr__(name)


async def main(namespace: str, options: dict[str, Any], file: Path) -> None:
    cluster = Cluster.connect()
    store = KubernetesStore(cluster, namespace)
    executor = KubernetesBackend(
        cluster, ClusterOptions(namespace=namespace, **options), is_owner=True
    )
    # A step within a followup.
    steps = Armed(SimpleNamespace(patch_pods=executor._writer.patch_pods), file)

    async def patch_pods(*args: Any, **options: Any) -> None:
        await steps.patch_pods(*args, **options)

    executor._writer.patch_pods = patch_pods  # type: ignore[method-assign]
    armed = Armed(executor, file)
    await Controller(Armed(store, file), {"kubernetes": armed}).run()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])))
