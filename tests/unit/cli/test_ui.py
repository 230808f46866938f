"""The link opens under the control plane's own name where that resolves, and by address else."""

from __future__ import annotations

import socket

import pytest

from atoll.cli import ui

HOST = "atoll-12345678.localhost"


@pytest.mark.parametrize(
    ("answer", "url", "wanted"),
    [
        ("127.0.0.1", "http://127.0.0.1:7878", f"http://{HOST}:7878/in#code"),
        ("::1", "http://127.0.0.1:7878", "http://127.0.0.1:7878/in#code"),
        ("10.0.0.9", "http://127.0.0.1:7878", "http://127.0.0.1:7878/in#code"),
        (None, "http://127.0.0.1:7878", "http://127.0.0.1:7878/in#code"),
        ("127.0.0.1", "https://atoll.example.org", "https://atoll.example.org/in#code"),
    ],
)
def test_the_name_is_used_where_it_leads_to_this_machine(
    monkeypatch: pytest.MonkeyPatch, answer: str | None, url: str, wanted: str
) -> None:
    def resolve(host: str, port: object) -> list[object]:
        assert host == HOST
        if answer is None:
            raise socket.gaierror("unknown")
        return [(socket.AF_INET, 1, 6, "", (answer, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert ui.link_of(url, HOST, "code") == wanted
    assert ui.link_of(url, "", "code") == f"{url}/in#code"
