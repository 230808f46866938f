"""The rendezvous of a local training: what its executor asks for, and what it observes.

The supervisor leases the port, runs the etcd and writes both to a file. With
`ATOLL_ETCD_ENDPOINT` set for the control plane, trainings use that etcd instead of their own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from atoll.backends.launch import ETCD_BACKEND, NO_BACKEND, needs_etcd, unset_variables
from atoll.backends.local.rendezvous_file import find_etcd, read_rendezvous
from atoll.core.errors import Permanent
from atoll.core.mesh import READY_DIR, MeshState, split_endpoint
from atoll.core.status import MeshStatus, Training
from atoll.mesh.etcd import EtcdKeys

CONFIGURED = "ATOLL_ETCD_ENDPOINT"


def wanted_rendezvous(training: Training, host: str, before: dict[str, Any]) -> dict[str, Any]:
    """The rendezvous part of the gang document. A part that is there already, `before`, is kept.

    Raises Permanent when an etcd is needed and there is none.
    """
    if before:
        return before
    spec = training.spec
    part: dict[str, Any] = {"backend": spec.rendezvous.backend, "etcd": "", "endpoint": ""}
    part["keys"] = [f"{READY_DIR}/{host}"]  # one host, so all of its ranks reach each other
    part["unset"] = list(unset_variables(spec, {**spec.nccl_env, **spec.env}))
    if not needs_etcd(spec.rendezvous.backend, has_mesh=spec.mesh):
        return part
    if endpoint := os.environ.get(CONFIGURED):
        if split_endpoint(endpoint) is None:
            raise Permanent(f"{CONFIGURED}={endpoint!r}: expected host:port")
        return {**part, "endpoint": endpoint}
    return {**part, "etcd": find_etcd()}


def observed_endpoint(training: Training, directory: Path) -> str:
    rendezvous = read_rendezvous(directory)
    if training.spec.rendezvous.backend == NO_BACKEND:
        return ""
    if training.spec.rendezvous.backend == ETCD_BACKEND:
        return str(rendezvous.get("etcd", ""))
    return f"127.0.0.1:{rendezvous['ports'][0]}" if rendezvous.get("ports") else ""


def observed_mesh(training: Training, directory: Path) -> MeshStatus | None:
    """The mesh is ready as soon as its keys are in etcd: all ranks share this host."""
    spec = training.spec
    if not needs_etcd(spec.rendezvous.backend, has_mesh=spec.mesh):
        return None
    rendezvous = read_rendezvous(directory)
    has_keys = bool(rendezvous.get("etcd")) and not rendezvous.get("error")
    return MeshStatus(
        state=MeshState.READY if has_keys else MeshState.PENDING,
        foreign_writes=int(rendezvous.get("foreignWrites", 0)),
    )


async def withdraw(wanted: dict[str, Any]) -> None:
    """Deletes the gate's keys from an etcd that outlives the training."""
    if not wanted.get("endpoint"):
        return
    async with EtcdKeys(wanted["endpoint"]) as keys:
        for key in wanted["keys"]:
            await keys.delete(key)
