"""The list of trainings shows what is used and free on this machine, and who waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.browser import Visitor, open_browser, violations

HOLD = ("sh", "-c", "while [ ! -e go ]; do sleep 0.05; done")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


def test_used_and_free_are_above_the_list_and_a_row_says_what_it_waits_for(
    lone_atoll: Any, browser: Any
) -> None:
    asked = ("--slots", "3", "--cpu", "1", "--memory", "64Mi")
    lone_atoll("run", "-d", "--name", "held", "-n", "2", *asked, "--", *HOLD)
    assert lone_atoll("limits", "--cpu", "4", "--memory", "1Gi").returncode == 0
    assert lone_atoll("wait", "--for", "target", "held").returncode == 0
    lone_atoll("run", "-d", "--name", "waits", "-n", "2", "--", "true")
    visitor = Visitor(browser, lone_atoll)
    visitor.sign_in()
    page = visitor.open("/", ".use:has-text('2 of 3 slots (1 free)')")
    text = page.inner_text(".use")
    assert "2 of 4 CPUs (2 free)" in text
    assert "128 MiB of 1.00 GiB memory (896 MiB free)" in text
    page.wait_for_selector("tr:has(a:text-is('waits')) .sy:has-text('2 of 3 slots')")
    assert violations(page) == []
    (lone_atoll.cwd / "go").touch()
    page.wait_for_selector(".use:has-text('0 of 3 slots (3 free)')")
    visitor.close()
