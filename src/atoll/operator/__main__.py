"""`python -m atoll.operator run | manifests`: what the operator's image starts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time

import yaml  # type: ignore[import-untyped]

from atoll.core.errors import AtollError
from atoll.kubernetes.client import Cluster
from atoll.kubernetes.manifests import HOME, read_options, render_manifests
from atoll.kubernetes.tokens import KubernetesTokens
from atoll.operator.run import run_operator
from atoll.server.auth import hashed, new_token


def main() -> None:
    """Raises AtollError where something is wrong that only the caller can mend."""
    parser = argparse.ArgumentParser(prog="atoll operator")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="act on trainings until stopped")
    run.add_argument("--namespace", help="the one namespace to serve (default: all)")
    run.add_argument("--home", help="where its lease is (default: its own namespace)")
    run.add_argument(
        "--options", default="{}", metavar="JSON", help='of the executor: \'{"image": "…"}\''
    )
    run.add_argument("--identity", help="its name in the lease (default: host and a number)")
    run.add_argument("--lease-duration", type=float, default=15.0, metavar="SECONDS")
    run.add_argument("--host", default="0.0.0.0")
    run.add_argument("--port", type=int, help="serve the HTTP API there (default: do not)")
    token = commands.add_parser("token", help="make a token for the HTTP API, said once")
    token.add_argument("--namespace", required=True, help="the namespace it is good for")
    token.add_argument("--home", help="the operator's namespace")
    token.add_argument("--label", default="")
    show = commands.add_parser("manifests", help="print what to apply")
    show.add_argument("--image", required=True, help="the operator's image")
    show.add_argument("--home", default=HOME)
    show.add_argument("--namespace")
    show.add_argument("--replicas", type=int, default=2)
    show.add_argument("--options", default="", metavar="JSON", help="of the executor")
    given = parser.parse_args()
    if given.command == "manifests":
        made = render_manifests(
            image=given.image,
            home=given.home,
            namespace=given.namespace,
            replicas=given.replicas,
            options=given.options,
        )
        sys.stdout.write(yaml.safe_dump_all(made, sort_keys=False))
        return
    if given.command == "token":
        sys.stdout.write(asyncio.run(_token(given)) + "\n")
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    asyncio.run(_run(given))


async def _run(given: argparse.Namespace) -> None:
    task = asyncio.ensure_future(
        run_operator(
            namespace=given.namespace,
            home=given.home,
            identity=given.identity,
            lease_duration_s=given.lease_duration,
            host=given.host,
            port=given.port,
            **read_options(given.options),
        )
    )
    # A polite end gives the lease back; ranks go on.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _token(given: argparse.Namespace) -> str:
    cluster = Cluster.connect()
    home = given.home or os.environ.get("POD_NAMESPACE") or cluster.namespace
    made = new_token()
    try:
        tokens = KubernetesTokens(cluster, home)
        await tokens.add(hashed(made), given.namespace, given.label, time.time())
    finally:
        await cluster.close()
    return made


if __name__ == "__main__":
    try:
        main()
    except AtollError as error:
        sys.exit(f"atoll operator: {error}")
