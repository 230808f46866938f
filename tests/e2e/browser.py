"""A real Chromium for tests: Debian's, driven by Playwright. It fails a test on whatever the page
complains of."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]


def need_chromium() -> str:
    if CHROMIUM is None:
        if os.environ.get("ATOLL_CI"):
            pytest.fail("chromium is missing: .ci/run installs it")
        pytest.skip("chromium is not installed: apt-get install chromium")
    return CHROMIUM


@contextlib.contextmanager
def open_browser() -> Iterator[Any]:
    executable = need_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=ARGUMENTS)
        try:
            yield browser
        finally:
            browser.close()


class Visitor:
    """One person at one browser window, signed in by `atoll ui`."""

    def __init__(self, browser: Any, atoll: Any, *, width: int = 1440) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900})
        self.context.set_default_timeout(60_000)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.complaints: list[str] = []
        self.hosts: set[str] = set()
        self.atoll = atoll
        self.page = self.tab()

    def tab(self) -> Any:
        page = self.context.new_page()
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("request", lambda request: self.hosts.add(request.url.split("/")[2]))
        return page

    def _hear(self, message: Any) -> None:
        # Requests that fail while the server is away are the page's business, not a fault of it.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)

    def link(self) -> str:
        done = self.atoll("ui", "--no-open")
        assert done.returncode == 0, done.stderr
        return str(done.stdout.strip())

    def sign_in(self) -> None:
        self.page.goto(self.link())
        self.page.wait_for_selector(".chips button")

    @property
    def origin(self) -> str:
        return str(self.page.evaluate("location.origin"))

    def open(self, path: str, wanted: str) -> Any:
        self.page.goto(f"{self.origin}{path}")
        self.page.wait_for_selector(wanted)
        return self.page

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []
        assert len(self.hosts) == 1, f"only the control plane is asked: {self.hosts}"


def violations(page: Any) -> list[str]:
    """What axe has against the page."""
    from axe_playwright_python import base

    source = (Path(base.__file__).parent / "axe.min.js").read_text()
    page.evaluate(source)
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
    return [
        f"{each['id']}: {[n['html'][:120] for n in each['nodes']][:3]}"
        for each in found["violations"]
    ]


def press_until(page: Any, focus: str, key: str, wanted: str) -> None:
    """Presses a key in an element until that shows; what is drawn anew loses a key."""
    from playwright.sync_api import TimeoutError as NotShown

    for _ in range(30):
        page.focus(focus)
        page.keyboard.press(key)
        try:
            page.wait_for_selector(wanted, timeout=2000)
            return
        except NotShown:
            continue
    raise AssertionError(f"{key} in {focus} does not show {wanted}")
