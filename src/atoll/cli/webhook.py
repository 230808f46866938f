"""`atoll webhook`: which events are posted where."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING

import click

from atoll.cli.options import json_option

if TYPE_CHECKING:
    from atoll.core.webhooks import Webhook

HEADER = ("ID", "URL", "EVENTS", "DELIVERED", "WAITING", "DROPPED", "LAST")


@click.group()
def webhook() -> None:
    """Post events of trainings to an address, signed, and again until it accepts them."""


@webhook.command()
@click.argument("url")
@click.option(
    "--event",
    "-e",
    "events",
    multiple=True,
    help="Reason of an event, such as Failed; warnings: all warnings; *: all. May be repeated.",
    show_default="Succeeded, Failed, Cancelled, RankStalled, WorldShrunkBelowMin",
)
@click.option(
    "--secret-file",
    type=click.File("r"),
    help="File with the secret that signs: whsec_ and base64; - reads it from standard input.",
    show_default="a new one, printed once",
)
@json_option
def add(url: str, events: tuple[str, ...], secret_file: IO[str] | None, is_json: bool) -> None:
    """Add a webhook, and print its id and the secret that signs its messages."""
    from atoll.cli.show import print_json
    from atoll.sdk.client import Client

    secret = None if secret_file is None else secret_file.read().strip()
    made = Client().add_webhook(url, events, secret=secret)
    if is_json:
        print_json(made)
        return
    print(made.id)
    if secret is None:
        print(f"secret: {made.secret}")
        print("atoll: the secret is not shown again", file=sys.stderr)


@webhook.command(name="list")
@json_option
def list_(is_json: bool) -> None:
    """List the webhooks of the namespace, and how their deliveries go."""
    from atoll.cli.show import print_json
    from atoll.sdk.client import Client

    webhooks = Client().webhooks()
    print_json(webhooks) if is_json else print(_table(webhooks))


@webhook.command()
@click.argument("ids", nargs=-1, required=True)
@json_option
def rm(ids: tuple[str, ...], is_json: bool) -> None:
    """Remove webhooks, with what waits to be delivered to them."""
    from atoll.cli.show import print_json
    from atoll.sdk.client import Client

    client = Client()
    for id in ids:
        client.remove_webhook(id)
        if not is_json:
            print(f"{id}: removed")
    if is_json:
        print_json({"removed": list(ids)})


@webhook.command()
@click.argument("id")
@json_option
def test(id: str, is_json: bool) -> None:
    """Post a test message now, and print how it was answered.

    Exit code: 0 accepted, 1 not.
    """
    from atoll.cli.show import print_json
    from atoll.core.escapes import visible
    from atoll.sdk.client import Client

    done = Client().test_webhook(id)
    if is_json:
        print_json(done)
    elif done.is_accepted:
        print(f"{id}: accepted, {done.status} after {done.seconds:.2f} s")
    else:
        print(f"{id}: not accepted: {visible(done.error)}", file=sys.stderr)
    raise SystemExit(0 if done.is_accepted else 1)


def _table(webhooks: Sequence[Webhook]) -> str:
    from atoll.cli.show import clock, table

    def last(one: Webhook) -> str:
        at = "-" if one.last_at is None else clock(one.last_at)
        return f"{at} {one.last_error}".strip()

    rows = [
        (
            one.id,
            one.url,
            ",".join(one.events) or "default",
            str(one.delivered),
            str(one.waiting),
            str(one.dropped),
            last(one),
        )
        for one in webhooks
    ]
    return table(HEADER, rows)
