"""The link has the dashboard's own name on this machine; no argument of a program has its code."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from atoll.cli import plane

HOST = "atoll-0123456789abcdef.localhost"


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("http://127.0.0.1:7878", f"http://{HOST}:7878/in#code"),
        ("http://localhost:7878", f"http://{HOST}:7878/in#code"),
        ("http://[::1]:7878", f"http://{HOST}:7878/in#code"),
        ("https://127.0.0.1", f"https://{HOST}/in#code"),
        ("https://atoll.example.org", "https://atoll.example.org/in#code"),
    ],
)
def test_the_dashboard_has_a_name_of_its_own_on_this_machine(url: str, wanted: str) -> None:
    assert plane.link_of(url, HOST, "code") == wanted


def test_the_file_that_leads_there_is_private_and_old_ones_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_STATE_DIR", str(tmp_path / "state"))
    before = os.umask(0)
    try:
        first = plane.write_redirect(f"http://{HOST}:1/in#first")
        second = plane.write_redirect(f"http://{HOST}:1/in#sec&ond")
    finally:
        os.umask(before)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert first.stat().st_mode & 0o777 == 0o600
    assert f'url=http://{HOST}:1/in#first"' in first.read_text()
    assert f'url=http://{HOST}:1/in#sec&amp;ond"' in second.read_text()
    old = time.time() - 2 * plane.FILE_S
    os.utime(first, (old, old))
    third = plane.write_redirect("http://x/in#third")
    assert sorted((tmp_path / "state").glob("*")) == sorted([second, third])
