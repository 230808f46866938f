"""`python -m atoll.operator run | token | manifests`: what the operator's image starts.

`atoll operator` and `atoll k8s` are the same commands. Only their bodies import the packages of
`atoll[kubernetes]`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import click

from atoll.core.errors import AtollError, Permanent
from atoll.core.model import encode

namespace_option = click.option(
    "--namespace", help="Namespace whose trainings are served.", show_default="all namespaces"
)
options_option = click.option(
    "--options", default="", help='Options of the executor as JSON: \'{"image": "…"}\'.'
)


def needs_extra(body: Callable[..., None]) -> Callable[..., None]:
    """The command raises Permanent, with one line, if a package of the extra is missing."""

    @functools.wraps(body)
    def run(**options: Any) -> None:
        try:
            body(**options)
        except ImportError as error:
            text = f"this needs 'pip install atoll[kubernetes]': {error}"
            raise Permanent(text) from error

    return run


@click.command()
@namespace_option
@click.option(
    "--home", help="Namespace whose lease is used.", show_default="the operator's own namespace"
)
@click.option(
    "--identity",
    help="Name of this operator in the lease.",
    show_default="generated from the host name",
)
@click.option(
    "--lease-s",
    "--lease-duration",
    "lease_s",
    type=click.FloatRange(min=1),
    default=15.0,
    help="Seconds that the lease lasts without being renewed.",
    show_default=True,
)
@click.option(
    "--host", default="0.0.0.0", help="Address to serve the HTTP API on.", show_default=True
)
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    help="Port to serve the HTTP API on.",
    show_default="no HTTP API",
)
@options_option
@needs_extra
def run(options: str, lease_s: float, **settings: Any) -> None:
    """Run the controller of a Kubernetes cluster.

    Runs until it is stopped. Ranks keep running.
    """
    import asyncio

    from atoll.kubernetes.manifests import read_options
    from atoll.server.lograte import quiet_log

    settings |= {"lease_duration_s": lease_s, **read_options(options or "{}")}
    quiet_log(logging.INFO)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    asyncio.run(_run(settings))


async def _run(settings: dict[str, Any]) -> None:
    import asyncio

    from atoll.operator.run import run_operator

    task = asyncio.ensure_future(run_operator(**settings))
    # SIGTERM gives the lease back; ranks keep running.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


@click.command()
@click.option("--namespace", required=True, help="Namespace that the token gives access to.")
@click.option("--home", help="Namespace of the operator.", show_default="the current namespace")
@click.option("--label", default="", help="Note on whose token it is.")
@needs_extra
def token(namespace: str, home: str | None, label: str) -> None:
    """Create a token for the HTTP API of the operator and print it. It cannot be shown again."""
    import asyncio

    sys.stdout.write(asyncio.run(_token(namespace, home, label)) + "\n")


async def _token(namespace: str, home: str | None, label: str) -> str:
    from atoll.kubernetes.client import Cluster
    from atoll.kubernetes.tokens import KubernetesTokens
    from atoll.server.auth import hashed, new_token

    cluster = Cluster.connect()
    home = home or os.environ.get("POD_NAMESPACE") or cluster.namespace
    secret = new_token()
    try:
        await KubernetesTokens(cluster, home).add(hashed(secret), namespace, label, time.time())
    finally:
        await cluster.close()
    return secret


@click.command()
@click.option("--image", required=True, help="Container image of the operator.")
@click.option(
    "--home", default="atoll-system", help="Namespace of the operator.", show_default=True
)
@namespace_option
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    default=2,
    help="Number of operators to run; one of them is active.",
    show_default=True,
)
@options_option
@click.option("--json", "is_json", is_flag=True, help="Print JSON instead of YAML.")
@needs_extra
def manifests(is_json: bool, **settings: Any) -> None:
    """Print the manifests that a cluster needs.

    To install them: `atoll k8s manifests --image IMAGE | kubectl apply -f -`.
    """
    import yaml  # type: ignore[import-untyped]

    from atoll.kubernetes.manifests import render_manifests

    items = render_manifests(**settings)
    if is_json:
        document = {"apiVersion": "v1", "kind": "List", "items": items}
        sys.stdout.write(encode(document).decode() + "\n")
    else:
        sys.stdout.write(yaml.safe_dump_all(items, sort_keys=False))


app = click.Group(commands={"run": run, "token": token, "manifests": manifests})

if __name__ == "__main__":
    try:
        app(prog_name="python -m atoll.operator")
    except AtollError as error:
        sys.exit(f"atoll operator: {error}")
