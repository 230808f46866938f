"""`atoll ui`: the dashboard in a browser, signed in."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import click

from atoll.cli.options import json_option
from atoll.core.errors import Permanent

FILES = "ui-*.html"
FILE_S = 120.0  # a code is good for 60 s, and a browser may take as long to start


@click.command()
@click.option("--no-open", "is_printed", is_flag=True, help="Print the link and open nothing.")
@click.option(
    "--revoke", "is_revoked", is_flag=True, help="Sign all browsers of the namespace out instead."
)
@json_option
def ui(is_printed: bool, is_revoked: bool, is_json: bool) -> None:
    """Open the dashboard in a browser.

    The link signs in once and is good for a minute: who has it first is signed in as you. It opens
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
