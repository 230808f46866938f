"""`python -m atoll.operator run | token | manifests`: what the operator's image starts.

`atoll k8s operator` and `atoll k8s manifests` are the same commands. Only their bodies import the
packages of `atoll[kubernetes]`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from atoll.core.checks import check_name
from atoll.core.errors import AtollError, Permanent, to_install
from atoll.core.model import encode

if TYPE_CHECKING:
    from atoll.core.ports import Token
    from atoll.operator.tokens import KubernetesTokens

namespace_option = click.option(
    "--namespace", help="Namespace whose trainings to serve.", show_default="all namespaces"
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
            text = f"this needs {error.name}: {to_install('kubernetes')}"
            raise Permanent(text) from error

    return run


@click.command()
@namespace_option
@click.option("--home", help="Namespace of the lease.", show_default="the operator's own namespace")
@click.option(
    "--identity",
    help="Name of this operator in the lease.",
    show_default="generated from the host name",
)
@click.option(
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
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for metrics and webhook messages: a volume that outlives the operator.",
    show_default="a temporary one",
)
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with [[webhooks]] and [[rounds.stores]], as in atoll.toml.",
)
@click.option(
    "--reports-uri",
    help="Address at which pods reach this API, or an object store, for metrics of ranks.",
    show_default="ranks report nothing",
)
@options_option
@needs_extra
def run(options: str, lease_s: float, reports_uri: str | None, **settings: Any) -> None:
    """Run the controller of a Kubernetes cluster.

    Runs until it is stopped. Ranks keep running.
    """
    import asyncio

    from atoll.operator.manifests import read_options
    from atoll.server.http.server import configure_log

    settings |= {"lease_duration_s": lease_s, "reports_uri": reports_uri}
    settings |= read_options(options or "{}")
    configure_log(logging.INFO)
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
    """Create a token for the HTTP API of the operator and print it. It cannot be shown again.

    `atoll token` with --home also lists and revokes them.
    """
    import asyncio

    secret, _ = asyncio.run(new_operator_token(home, namespace, label))
    sys.stdout.write(secret + "\n")


async def new_operator_token(home: str | None, namespace: str, label: str) -> tuple[str, Token]:
    """The token and its record. Raises ValidationError if the namespace does not exist."""
    from atoll.server.http.auth import hash_token, new_token

    check_name("namespace", namespace)
    secret = new_token()
    async with operator_tokens(home) as tokens:
        await tokens.check_namespace(namespace)
        return secret, await tokens.add(hash_token(secret), namespace, label, time.time())


@contextlib.asynccontextmanager
async def operator_tokens(home: str | None) -> AsyncIterator[KubernetesTokens]:
    """The tokens of the operator in that namespace: its own in a pod, else the current one."""
    from atoll.backends.kubernetes.client import Cluster
    from atoll.operator.tokens import KubernetesTokens

    cluster = Cluster.connect()
    try:
        yield KubernetesTokens(
            cluster, home or os.environ.get("POD_NAMESPACE") or cluster.namespace
        )
    finally:
        await cluster.close()


@click.command()
@click.option("--image", required=True, help="Container image of the operator.")
@click.option(
    "--home", default="atoll-system", help="Namespace of the operator.", show_default=True
)
@namespace_option
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    default=1,
    help="Number of operators to run; one of them leads, the others stand by and are not ready.",
    show_default=True,
)
@click.option(
    "--volume",
    metavar="CLAIM",
    help="PersistentVolumeClaim for metrics and webhook messages.",
    show_default="an emptyDir, which is deleted with the pod",
)
@click.option(
    "--config",
    metavar="SECRET",
    help="Secret whose key atoll.toml has [[webhooks]] and [[rounds.stores]].",
)
@options_option
@click.option("--json", "is_json", is_flag=True, help="Print JSON instead of YAML.")
@needs_extra
def manifests(is_json: bool, **settings: Any) -> None:
    """Print the manifests that a cluster needs.

    To install them: `atoll k8s manifests --image IMAGE | kubectl apply -f -`.
    """
    import yaml  # type: ignore[import-untyped]

    from atoll.operator.manifests import render_manifests

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
        sys.exit(f"atoll k8s operator: {error}" + (f": {error.hint}" if error.hint else ""))
