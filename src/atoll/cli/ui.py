"""`atoll ui`: the dashboard in a browser, signed in."""

from __future__ import annotations

import socket
import sys
from urllib.parse import urlsplit, urlunsplit

import click

from atoll.cli.options import json_option


@click.command()
@click.option("--no-open", "is_printed", is_flag=True, help="Print the link and open nothing.")
@click.option(
    "--revoke", "is_revoked", is_flag=True, help="Sign all browsers of the namespace out instead."
)
@json_option
def ui(is_printed: bool, is_revoked: bool, is_json: bool) -> None:
    """Open the dashboard in a browser.

    The link signs in once and is good for a minute. It opens on this machine, or on another one
    with the control plane's port forwarded.
    """
    import webbrowser

    from atoll.cli.show import counted, print_json, says
    from atoll.sdk import flows
    from atoll.sdk.client import Client

    client = Client()
    if is_revoked:
        ended = client.run(flows.end_sessions()).sessions
        print_json({"sessions": ended}) if is_json else says(f"{counted(ended, 'session')} ended")
        return
    code = client.run(flows.ui_code())
    url = link_of(client.wire.endpoint.address().url, code.host, code.code)
    if is_json:
        print_json({"url": url})
        return
    print(url, flush=True)
    if not is_printed and sys.stdout.isatty():
        webbrowser.open(url)


def link_of(url: str, host: str, code: str) -> str:
    """The address to open. The code is behind the `#`: it reaches no log and no other site.

    On this machine, the control plane's own name keeps its cookie from other local servers, where
    that name resolves.
    """
    parts = urlsplit(url)
    if host and parts.hostname in ("127.0.0.1", "localhost") and _resolves(host):
        parts = parts._replace(netloc=f"{host}:{parts.port}" if parts.port else host)
    return urlunsplit(parts._replace(path="/in", fragment=code))


def _resolves(host: str) -> bool:
    try:
        return any(entry[4][0] == "127.0.0.1" for entry in socket.getaddrinfo(host, None))
    except OSError:
        return False
