"""`operator` and `k8s`: the same controller on a Kubernetes cluster."""

from __future__ import annotations

import sys

import click

from atoll.cli.options import json_option
from atoll.core.errors import Permanent

namespace_option = click.option("--namespace", help="The one namespace to serve; all of them.")
options_option = click.option(
    "--options", default="", help='Of the executor, as JSON: \'{"image": "…"}\'.'
)


@click.command()
@namespace_option
@click.option("--home", help="Where its lease is; its own namespace if not given.")
@click.option("--identity", help="Its name in the lease; made from the host's if not given.")
@click.option("--lease-s", type=click.FloatRange(min=1), default=15.0, help="Of the lease; 15.")
@click.option("--host", default="0.0.0.0", help="Address to serve the HTTP API on.")
@click.option("--port", type=click.IntRange(0, 65_535), help="Of the HTTP API; none if not given.")
@options_option
def operator(
    namespace: str | None,
    home: str | None,
    identity: str | None,
    lease_s: float,
    host: str,
    port: int | None,
    options: str,
) -> None:
    """Act on the trainings of a cluster until stopped. Ranks go on when it stops."""
    arguments = [
        "run",
        "--options",
        options or "{}",
        "--host",
        host,
        "--lease-duration",
        str(lease_s),
    ]
    given = {"--namespace": namespace, "--home": home, "--identity": identity, "--port": port}
    for flag, value in given.items():
        arguments += [] if value is None else [flag, str(value)]
    try:
        from atoll.operator.__main__ import main
    except ImportError as error:
        raise _needs_extra(error) from error
    sys.argv[1:] = arguments
    main()


@click.group()
def k8s() -> None:
    """What a Kubernetes cluster needs to run trainings."""


@k8s.command()
@click.option("--image", required=True, help="The operator's image.")
@click.option("--home", default="atoll-system", help="Namespace of the operator.")
@namespace_option
@click.option("--replicas", type=click.IntRange(min=1), default=2, help="Operators; 2.")
@options_option
@json_option
def manifests(
    image: str, home: str, namespace: str | None, replicas: int, options: str, is_json: bool
) -> None:
    """Print what to apply: `atoll k8s manifests --image IMAGE | kubectl apply -f -`."""
    try:
        import yaml  # type: ignore[import-untyped]

        from atoll.kubernetes.manifests import render_manifests
    except ImportError as error:
        raise _needs_extra(error) from error
    from atoll.cli.show import print_json

    made = render_manifests(
        image=image, home=home, namespace=namespace, replicas=replicas, options=options
    )
    if is_json:
        print_json({"apiVersion": "v1", "kind": "List", "items": made})
    else:
        print(yaml.safe_dump_all(made, sort_keys=False), end="")


def _needs_extra(error: ImportError) -> Permanent:
    return Permanent(f"this needs 'pip install atoll[kubernetes]': {error}")
