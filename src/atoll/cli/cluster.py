"""`operator` and `k8s`: the controller on a Kubernetes cluster, and its manifests."""

from __future__ import annotations

import click

from atoll.operator.__main__ import manifests
from atoll.operator.__main__ import run as operator

__all__ = ["k8s", "operator"]


@click.group(commands={"manifests": manifests})
def k8s() -> None:
    """Prepare a Kubernetes cluster to run trainings."""
