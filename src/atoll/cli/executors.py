"""`atoll executors`: where trainings can run."""

from __future__ import annotations

import os
from pathlib import Path

import click

from atoll.cli.options import json_option
from atoll.core.errors import ValidationError

HEADER = ("NAME", "KIND", "REACHABLE", "WHY NOT")


def _use(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Everything in this process, and a control plane that it starts, reads this file."""
    if path is not None:
        os.environ["ATOLL_CONFIG"] = str(path.absolute())
    return path


config_option = click.option(
    "--config",
    type=Path,
    callback=_use,
    expose_value=False,
    is_eager=True,
    help="atoll.toml to use, in place of ATOLL_CONFIG, of ./atoll.toml with its [defaults], and of "
    "the user's own.",
)


def _limit(ctx: click.Context, param: click.Parameter, slots: int | None) -> int | None:
    """A control plane that this process starts has so many. Raises ValidationError if one runs
    that has others."""
    if slots is None:
        return None
    from atoll.backends.local.state import state_dir
    from atoll.sdk.embedded import SLOTS, announced

    if os.environ.get("ATOLL_URL"):
        raise ValidationError("--slots", slots, "expected none: ATOLL_URL names a control plane")
    endpoint = announced(state_dir())
    if endpoint is not None and endpoint.get("slots") != slots:
        has = endpoint.get("slots") or "no limit"
        expected = f"the control plane runs with {has}: 'atoll stop' ends it, and ranks go on"
        raise ValidationError("--slots", slots, expected)
    os.environ[SLOTS] = str(slots)
    return slots


slots_option = click.option(
    "--slots",
    type=click.IntRange(1, 10_000),
    callback=_limit,
    expose_value=False,
    help="Largest number of ranks at once on this machine, of a control plane that is started.",
    show_default="as in atoll.toml, else no limit",
)


@click.command()
@config_option
@json_option
def executors(is_json: bool) -> None:
    """List where trainings can run, and what answers.

    The default has a star. The list is that of the running control plane, with atoll.toml as it
    was when that control plane was started.
    """
    from atoll.cli.show import print_json, says, table
    from atoll.sdk import flows
    from atoll.sdk.client import Client

    listed = Client().run(flows.executors())
    if is_json:
        print_json(listed)
        return
    rows = [
        (
            f"{each.name}*" if each.is_default else each.name,
            each.kind,
            "yes" if each.is_reachable else "no",
            each.message or "-",
        )
        for each in listed.items
    ]
    print(table(HEADER, rows))
    if listed.message:
        says(listed.message)
