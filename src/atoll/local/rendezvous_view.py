"""The rendezvous of a local training as its executor sees it: asked for, and found.

The supervisor leases the port and runs the etcd; what it found is in a file. With
`ATOLL_ETCD_ENDPOINT` set for the control plane, trainings use that etcd instead of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from atoll.core.errors import Permanent
from atoll.core.mesh import READY_DIR, MeshState, split_endpoint
from atoll.core.status import MeshStatus, Training
from atoll.local.rendezvous_file import find_etcd, read_rendezvous
from atoll.mesh.etcd import EtcdKeys
from atoll.rank.launch import ETCD_BACKEND, needs_etcd

CONFIGURED = "ATOLL_ETCD_ENDPOINT"


def wanted_rendezvous(training: Training, host: str, before: dict[str, Any]) -> dict[str, Any]:
    """The gang document's part; `before` is what it was, and stays for as long as it runs.

    Raises Permanent when an etcd is needed and there is none.
    """
    if before:
        return before
    spec = training.spec
    part: dict[str, Any] = {"backend": spec.rendezvous.backend, "etcd": "", "endpoint": ""}
    part["keys"] = [f"{READY_DIR}/{host}"]  # one host reaches all of its own
    if not needs_etcd(spec.rendezvous.backend, has_mesh=spec.mesh):
        return part
    if given := os.environ.get(CONFIGURED):
        if split_endpoint(given) is None:
            raise Permanent(f"{CONFIGURED}={given!r}: expected host:port")
        return {**part, "endpoint": given}
    return {**part, "etcd": find_etcd()}


def seen_endpoint(training: Training, directory: Path) -> str:
    found = read_rendezvous(directory)
    if training.spec.rendezvous.backend == ETCD_BACKEND:
        return str(found.get("etcd", ""))
    return f"127.0.0.1:{found['ports'][0]}" if found.get("ports") else ""


def seen_mesh(training: Training, directory: Path) -> MeshStatus | None:
    """All ranks share this host, so its mesh is whole as soon as etcd has been told so."""
    spec = training.spec
    if not needs_etcd(spec.rendezvous.backend, has_mesh=spec.mesh):
        return None
    found = read_rendezvous(directory)
    is_told = bool(found.get("etcd")) and not found.get("error")
    return MeshStatus(state=MeshState.READY if is_told else MeshState.PENDING)


async def withdraw(wanted: dict[str, Any]) -> None:
    """The gate's keys are gone from an etcd that outlives the training."""
    if not wanted.get("endpoint"):
        return
    async with EtcdKeys(wanted["endpoint"]) as keys:
        for key in wanted["keys"]:
            await keys.delete(key)
