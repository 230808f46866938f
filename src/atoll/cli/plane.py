"""`serve` and `token`: the control plane of this machine, and who may talk to it."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from atoll.cli.executors import config_option
from atoll.cli.options import json_option
from atoll.core.checks import check_name
from atoll.core.errors import NotFound, Permanent, ValidationError

if TYPE_CHECKING:
    from atoll.core.ports import Tokens

TOKENS = ("ID", "NAMESPACE", "LABEL", "MADE")

state_dir_option = click.option(
    "--state-dir", type=Path, help="Where state is kept; ATOLL_STATE_DIR if not given."
)


@click.command()
@click.option("--port", type=click.IntRange(0, 65_535), default=7878, help="0 takes a free one.")
@click.option("--host", default="127.0.0.1", help="Address to listen on; 127.0.0.1.")
@state_dir_option
@click.option("--slots", type=click.IntRange(min=1), help="Most ranks at once on this machine.")
@config_option
@click.option("--owned", "is_owned", is_flag=True, hidden=True)  # by whom its input comes from
@json_option
def serve(
    port: int,
    host: str,
    state_dir: Path | None,
    slots: int | None,
    is_owned: bool,
    is_json: bool,
) -> None:
    """Run a control plane until stopped. Ranks go on when it stops.

    Prints one line of JSON once it answers: its url and process id.
    """
    from atoll import run as main
    from atoll.sdk import embedded

    where = (state_dir or embedded.state_dir()).absolute()
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise Permanent(f"cannot keep state in {where}: {error.strerror}") from error
    if not is_json:
        print(f"atoll: state in {where}; Ctrl-C stops", file=sys.stderr, flush=True)
    main.serve(host=host, port=port, where=where, slots=slots, is_owned=is_owned)


@click.group()
def token() -> None:
    """Make, list and remove tokens of this machine's control plane."""


@token.command()
@click.option("--namespace", default="default", help="What the token may see; default.")
@click.option("--label", default="", help="Whose it is, for the list.")
@state_dir_option
@json_option
def create(namespace: str, label: str, state_dir: Path | None, is_json: bool) -> None:
    """Make a token and print it. It is kept as a hash: this is the only time it is shown."""
    import asyncio

    from atoll.cli.show import full, print_json
    from atoll.server.auth import hashed, new_token

    check_name("namespace", namespace)
    made = new_token()
    kept = asyncio.run(_tokens(state_dir).add(hashed(made), namespace, label, time.time()))
    print_json({"token": made, **full(kept)}) if is_json else print(made)


@token.command("list")
@state_dir_option
@json_option
def list_tokens(state_dir: Path | None, is_json: bool) -> None:
    """List tokens by id: what they are is not kept."""
    import asyncio

    from atoll.cli import show

    found = asyncio.run(_tokens(state_dir).all())
    if is_json:
        show.print_json(found)
        return
    rows = [(t.id, t.namespace, t.label or "-", show.clock(t.created_at)) for t in found]
    print(show.table(TOKENS, rows))


@token.command("rm")
@click.argument("id")
@state_dir_option
@json_option
def remove(id: str, state_dir: Path | None, is_json: bool) -> None:
    """Remove the token with that ID (`atoll token list`): it is refused from now on."""
    import asyncio

    from atoll.cli.show import print_json

    if not id:
        raise ValidationError("id", id, "expected an id from 'atoll token list'")
    if not asyncio.run(_tokens(state_dir).remove(id)):
        raise NotFound("token", id)
    print_json({"removed": [id]}) if is_json else print(f"{id}: removed")


def _tokens(state_dir: Path | None) -> Tokens:
    from atoll.sdk import embedded
    from atoll.store.tokens import SQLiteTokens

    if os.environ.get("ATOLL_URL") and state_dir is None and "ATOLL_STATE_DIR" not in os.environ:
        says = "ATOLL_URL names a control plane elsewhere: make tokens on its machine, "
        raise Permanent(says + "or give --state-dir if it is this one")
    return SQLiteTokens((state_dir or embedded.state_dir()) / "atoll.db")
