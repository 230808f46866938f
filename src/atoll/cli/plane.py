"""Commands on a control plane: run and stop it, its tokens, executors and dashboard."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit, urlunsplit

import click

from atoll.cli.options import config_option, json_option
from atoll.core.checks import check_name
from atoll.core.errors import (
    BelowMinimumWorld,
    NotFound,
    Permanent,
    UDTerminalState,
    ValidationError,
)
from atoll.operator.__main__ import manifests, needs_extra, new_operator_token, operator_tokens
from atoll.operator.__main__ import run as operator

if TYPE_CHECKING:
    from atoll.core.ports import Tokens

T = TypeVar("T")

TOKENS = ("ID", "NAMESPACE", "LABEL", "CREATED")

state_dir_option = click.option(
    "--state-dir",
    type=Path,
    help="Directory for the state of the control plane.",
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
    from atoll.backends.local.state import enclosing_rank

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
    """Create, list and revoke tokens."""


@token.command()
@click.option(
    "--namespace",
    default="default",
    help="Namespace that the token gives access to.",
    show_default=True,
)
@click.option("--label", default="", help="Owner or purpose of the token, for 'atoll token list'.")
@state_dir_option
@home_option
@json_option
@needs_extra
def create(
    namespace: str, label: str, state_dir: Path | None, home: str | None, is_json: bool
) -> None:
    """Create a token and print it. Only its hash is stored: it cannot be printed again."""
    import asyncio

    from atoll.cli.output import full, print_json
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

    from atoll.cli.output import format_time, print_json, table

    tokens = asyncio.run(_with_tokens(state_dir, home, lambda tokens: tokens.all()))
    if is_json:
        print_json(tokens)
        return
    rows = [(t.id, t.namespace, t.label or "-", format_time(t.created_at)) for t in tokens]
    print(table(TOKENS, rows))


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

    from atoll.cli.output import print_json

    if not id:
        raise ValidationError("id", id, "expected an id from 'atoll token list'")
    if not asyncio.run(_with_tokens(state_dir, home, lambda tokens: tokens.remove(id))):
        raise NotFound("token", id)
    print_json({"removed": [id]}) if is_json else print(f"{id}: removed")


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
    from atoll.store.database import SQLiteTokens

    if os.environ.get("ATOLL_URL") and state_dir is None and "ATOLL_STATE_DIR" not in os.environ:
        text = "ATOLL_URL names a control plane elsewhere: make tokens on its machine, "
        raise Permanent(text + "or give --state-dir if it is this one")
    where = state.state_dir(state_dir)
    make_private(where)
    return SQLiteTokens(where / "atoll.db")


STOP_S = 60.0  # the grace of a rank is 10 s by default, and a loaded machine takes longer
POLL_S = 0.02  # nobody notices such a delay


@click.command()
@click.option("--all", "is_all", is_flag=True, help="Cancel all trainings first.")
@json_option
def stop(is_all: bool, is_json: bool) -> None:
    """Stop the control plane of this user. Ranks keep running; the next command starts it again.

    If none runs, this is not an error. A control plane that ATOLL_URL names is not stopped.
    """
    from atoll.backends.local.state import state_dir
    from atoll.cli.output import count_of, print_json

    if os.environ.get("ATOLL_URL"):
        text = "ATOLL_URL names a control plane: stop it where it runs, or unset ATOLL_URL"
        raise Permanent(f"{text} to stop your own")
    where = state_dir()
    names = cancel_all(where) if is_all else []
    pid = stop_plane(where)
    if is_json:
        print_json({"pid": pid, "cancelled": names})
        return
    if names:
        print(f"cancelled {count_of(len(names), 'training')}: {', '.join(names)}")
    if pid is None:
        print("no control plane runs")
    else:
        note = "" if is_all else "; its ranks keep running, and the next command starts it again"
        print(f"stopped the control plane (pid {pid}){note}")


def cancel_all(where: Path) -> list[str]:
    """Cancel what runs, wait until no rank is alive, and return the names."""
    from atoll.sdk.client import Client
    from atoll.sdk.endpoint import running

    if running(where) is None and not _may_run(where):
        return []
    with Client() as client:
        trainings = [t for t in client.list() if not t.last.status.phase.is_terminal]
        for training in trainings:
            training.cancel()
        for training in trainings:
            try:
                training.wait_until_complete(training.last.spec.stop_grace_s + STOP_S)
            except BelowMinimumWorld as error:
                if not training.last.status.phase.is_terminal:
                    raise Permanent(f"{training.name} did not end: {error}") from error
            except UDTerminalState:
                pass  # over before it was cancelled
    return [training.name for training in trainings]


def _may_run(where: Path) -> bool:
    """Whether a control plane would find ranks, or trainings that have not ended."""
    import sqlite3

    from atoll.backends.local.protocol import DESIRED_FILE
    from atoll.core.phase import Phase
    from atoll.store.database import read_phases

    try:
        phases = read_phases(where / "atoll.db")
    except sqlite3.Error:
        return True
    if any(not Phase(phase).is_terminal for phase in phases.values()):
        return True
    # Ranks may outlive a store that was lost.
    paths = (path for name in (DESIRED_FILE, "journal") for path in where.glob(f"ranks/*/{name}"))
    return any(path.parent.name not in phases for path in paths)


def stop_plane(where: Path) -> int | None:
    """Stop the control plane and return its pid; None if none ran."""
    from atoll.sdk.endpoint import read_announcement, start_time

    endpoint = read_announcement(where)
    if endpoint is None:
        return None
    pid = int(endpoint["pid"])
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return None
    except PermissionError as error:
        raise Permanent(f"the control plane (pid {pid}) belongs to another user") from error
    until = time.monotonic() + STOP_S
    while start_time(pid) == str(endpoint["startTime"]):
        if time.monotonic() > until:
            raise Permanent(f"the control plane (pid {pid}) still runs after {STOP_S:g} s")
        time.sleep(POLL_S)
    return pid


EXECUTORS = ("NAME", "KIND", "REACHABLE", "WHY NOT")


@click.command()
@config_option
@json_option
def executors(is_json: bool) -> None:
    """List executors, and whether each is reachable.

    The default has a star. The control plane reads atoll.toml when it starts.
    """
    from atoll.cli.output import print_json, print_note, table
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
    print(table(EXECUTORS, rows))
    if listed.message:
        print_note(listed.message)


LIMITS = ("RESOURCE", "USED", "FREE", "TOTAL")


@click.command()
@click.option(
    "--slots",
    type=click.IntRange(1, 10_000),
    help="Largest number of ranks at once; 10000 is no limit.",
)
@click.option("--cpu", help="CPUs that all ranks together may ask for, such as 8 or 500m.")
@click.option("--memory", help="Memory that all ranks together may ask for, such as 16Gi.")
@json_option
def limits(slots: int | None, cpu: str | None, memory: str | None, is_json: bool) -> None:
    """Show or set what ranks on this machine may ask for.

    The limits are for all ranks together. atoll counts what ranks ask for with --cpu, --memory and
    --gpus of 'atoll run', and what does not fit waits. This is not enforced: a rank may use more.
    A limit holds until you change it.
    """
    from atoll.cli.output import print_json, table
    from atoll.core.executors import LOCAL
    from atoll.sdk.client import Client

    client = Client()
    is_changed = (slots, cpu, memory) != (None, None, None)
    items = (
        client.set_limits(slots=slots, cpu=cpu, memory=memory) if is_changed else client.executors()
    )
    uses = next((each.resources for each in items if each.name == LOCAL), [])
    if is_json:
        print_json(uses)
        return
    print(
        table(LIMITS, [(use.name, *map(use.text, (use.used, use.free, use.total))) for use in uses])
    )


@click.group(commands={"operator": operator, "manifests": manifests})
def k8s() -> None:
    """Run the operator on a Kubernetes cluster."""


FILES = "ui-*.html"
FILE_S = 120.0  # a code is good for 60 s, and a browser may take as long to start


@click.command()
@click.option("--no-open", "is_printed", is_flag=True, help="Print the link instead of opening it.")
@click.option(
    "--revoke", "is_revoked", is_flag=True, help="Sign out all browsers of the namespace instead."
)
@json_option
def ui(is_printed: bool, is_revoked: bool, is_json: bool) -> None:
    """Open the dashboard in a browser.

    The link works once, within a minute: whoever opens it first is signed in as you. It opens
    on this machine, or on another one with the control plane's port forwarded.
    """
    from atoll.cli.output import count_of, print_json, print_note
    from atoll.sdk import flows
    from atoll.sdk.client import Client

    client = Client()
    if is_revoked:
        ended = client.run(flows.end_sessions()).sessions
        print_json({"sessions": ended}) if is_json else print_note(
            f"{count_of(ended, 'session')} ended"
        )
        return
    code = client.run(flows.ui_code())
    url = link_of(client.wire.endpoint.address().url, code.host, code.code)
    if is_json:
        print_json({"url": url})
        return
    print(url, flush=True)
    if not is_printed and sys.stdout.isatty():
        open_in_browser(url)


def link_of(url: str, host: str, code: str) -> str:
    """The address to open. The code is behind the `#`: it reaches no log and no other site.

    On this machine the dashboard has a name of its own, because a browser sends the cookies of
    127.0.0.1 to every port there. Browsers know that names below localhost are this machine.
    """
    from atoll.sdk.endpoint import Address

    parts = urlsplit(url)
    if Address(url).is_local:
        parts = parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host)
    return urlunsplit(parts._replace(path="/in", fragment=code))


def open_in_browser(url: str) -> None:
    """Opens a private file that leads to the address, which signs in: all users of this machine
    can read the arguments of a browser. Without a browser, or room for the file, the printed link
    is what there is."""
    import webbrowser

    with contextlib.suppress(OSError, Permanent):
        webbrowser.open(write_redirect(url).as_uri())


def write_redirect(url: str) -> Path:
    """A page in the state directory, for this user alone, that leads to the address. Raises
    OSError."""
    from html import escape

    from atoll.backends.local.state import state_dir
    from atoll.files.ownership import make_private, private

    where = state_dir()
    make_private(where)
    _remove_old(where)
    link = escape(url)
    path = where / FILES.replace("*", secrets.token_hex(8))
    with open(path, "x", opener=private) as file:
        file.write(
            '<!doctype html><meta charset="utf-8"><title>atoll</title>\n'
            '<meta name="referrer" content="no-referrer">\n'
            f'<meta http-equiv="refresh" content="0;url={link}">\n'
            f'<a href="{link}">Open the dashboard</a>\n'
        )
    return path


def _remove_old(where: Path) -> None:
    """A browser does not say when it has read its file, so a later command removes it."""
    for path in where.glob(FILES):
        with contextlib.suppress(OSError):
            if abs(time.time() - path.stat().st_mtime) > FILE_S:
                os.unlink(path)
