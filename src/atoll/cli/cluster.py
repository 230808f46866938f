"""`operator` and `k8s`: the same controller on a Kubernetes cluster."""

from __future__ import annotations

import click

from atoll.operator.__main__ import manifests
from atoll.operator.__main__ import run as operator

__all__ = ["k8s", "operator"]


@click.group(commands={"manifests": manifests})
def k8s() -> None:
    """What a Kubernetes cluster needs to run trainings."""
