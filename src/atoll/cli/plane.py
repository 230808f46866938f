"""`serve` and `token`: the control plane of this machine, and the tokens it accepts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from atoll.cli.executors import config_option
from atoll.cli.options import json_option
from atoll.core.checks import check_name
from atoll.core.errors import NotFound, Permanent, ValidationError
from atoll.operator.__main__ import needs_extra, new_operator_token, operator_tokens

if TYPE_CHECKING:
    from atoll.core.ports import Tokens

T = TypeVar("T")

TOKENS = ("ID", "NAMESPACE", "LABEL", "CREATED")

state_dir_option = click.option(
    "--state-dir",
    type=Path,
    help="Directory in which the control plane keeps its state.",
    show_default="ATOLL_STATE_DIR, or the user's own",
)


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=7878,
    help="Port to listen on; 0 picks a free one.",
    show_default=True,
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.", show_default=True)
@state_dir_option
@click.option(
    "--slots",
    type=click.IntRange(min=1),
    help="Largest number of ranks to run on this machine at the same time.",
    show_default="as in atoll.toml, else no limit",
)
@click.option(
    "--shared-namespaces",
    "has_shared_namespaces",
    is_flag=True,
    help="Let tokens of other namespaces run ranks on this machine. All ranks run as the user of "
    "the control plane, so whoever has such a token can read and stop everything here.",
)
@config_option
@click.option(
    "--tls-cert",
    type=Path,
    help="Serve HTTPS with this certificate chain, a file in PEM.",
    show_default="HTTP",
)
@click.option("--tls-key", type=Path, help="Private key of the certificate, a file in PEM.")
@click.option("--owned", "is_owned", is_flag=True, hidden=True)  # by the process at its stdin
@json_option
def serve(
    port: int,
    host: str,
    state_dir: Path | None,
    slots: int | None,
    has_shared_namespaces: bool,
    tls_cert: Path | None,
    tls_key: Path | None,
    is_owned: bool,
    is_json: bool,
) -> None:
    """Run a control plane until it is stopped. Ranks keep running when it stops.

    Once it answers requests it prints one line of JSON with its URL and process id.
    """
    from atoll import main as main
    from atoll.backends.local import state
    from atoll.backends.local.enclosing_rank import enclosing_rank

    if not is_owned and (rank := enclosing_rank()) is not None:
        raise Permanent(
            f"{rank} must not run a control plane, as it would end with the rank, and so would "
            "what it runs: start it outside of ranks, or use Client.local()"
        )
    from atoll.files.ownership import make_private

    where = state.state_dir(state_dir)
    try:
        make_private(where)
    except OSError as error:
        raise Permanent(f"cannot keep state in {where}: {error.strerror}") from error
    if not is_json:
        print(f"atoll: state in {where}; Ctrl-C stops", file=sys.stderr, flush=True)
    main.serve(
        host=host,
        port=port,
        where=where,
        slots=slots,
        has_shared_namespaces=has_shared_namespaces,
        tls_cert=tls_cert,
        tls_key=tls_key,
        is_owned=is_owned,
    )


home_option = click.option(
    "--home",
    metavar="NAMESPACE",
    help="Use the tokens of the operator in this namespace of a Kubernetes cluster.",
    show_default="those of this machine's control plane",
)


@click.group()
def token() -> None:
    """Create, list and revoke tokens of the control plane, or of an operator."""


@token.command()
@click.option(
    "--namespace",
    default="default",
    help="Namespace that the token gives access to.",
    show_default=True,
)
@click.option("--label", default="", help="Note on whose token it is, for 'atoll token list'.")
@state_dir_option
@home_option
@json_option
@needs_extra
def create(
    namespace: str, label: str, state_dir: Path | None, home: str | None, is_json: bool
) -> None:
    """Create a token and print it. Only its hash is stored: it cannot be shown again."""
    import asyncio

    from atoll.cli.show import full, print_json
    from atoll.server.http.auth import hash_token, new_token

    check_name("namespace", namespace)
    if home is not None:
        secret, record = asyncio.run(new_operator_token(home, namespace, label))
    else:
        secret = new_token()
        tokens = _tokens(state_dir)
        record = asyncio.run(tokens.add(hash_token(secret), namespace, label, time.time()))
    print_json({"token": secret, **full(record)}) if is_json else print(secret)


@token.command("list")
@state_dir_option
@home_option
@json_option
@needs_extra
def list_tokens(state_dir: Path | None, home: str | None, is_json: bool) -> None:
    """List tokens by id. The tokens themselves are not stored."""
    import asyncio

    from atoll.cli import show

    tokens = asyncio.run(_with_tokens(state_dir, home, lambda tokens: tokens.all()))
    if is_json:
        show.print_json(tokens)
        return
    rows = [(t.id, t.namespace, t.label or "-", show.clock(t.created_at)) for t in tokens]
    print(show.table(TOKENS, rows))


@token.command("revoke")
@click.argument("id")
@state_dir_option
@home_option
@json_option
@needs_extra
def revoke(id: str, state_dir: Path | None, home: str | None, is_json: bool) -> None:
    """Revoke the token with this ID, as `atoll token list` shows it. It is refused from then on;
    by an operator within 5 seconds."""
    import asyncio

    from atoll.cli.show import print_json

    if not id:
        raise ValidationError("id", id, "expected an id from 'atoll token list'")
    if not asyncio.run(_with_tokens(state_dir, home, lambda tokens: tokens.remove(id))):
        raise NotFound("token", id)
    print_json({"removed": [id]}) if is_json else print(f"{id}: removed")


token.add_command(revoke, "rm")


async def _with_tokens(
    state_dir: Path | None, home: str | None, act: Callable[[Tokens], Awaitable[T]]
) -> T:
    if home is None:
        return await act(_tokens(state_dir))
    async with operator_tokens(home) as tokens:
        return await act(tokens)


def _tokens(state_dir: Path | None) -> Tokens:
    from atoll.backends.local import state
    from atoll.files.ownership import make_private
    from atoll.store.tokens import SQLiteTokens

    if os.environ.get("ATOLL_URL") and state_dir is None and "ATOLL_STATE_DIR" not in os.environ:
        says = "ATOLL_URL names a control plane elsewhere: make tokens on its machine, "
        raise Permanent(says + "or give --state-dir if it is this one")
    where = state.state_dir(state_dir)
    make_private(where)
    return SQLiteTokens(where / "atoll.db")
