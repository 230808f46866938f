"""The rounds of a training in a real browser: the grid, a round's manifest, keyboard, axe."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.browser import Visitor, open_browser, press_until, violations
from tests.e2e.test_cli_rounds import SCRIPT, SLOW_SCRIPT


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


def test_rounds_are_a_grid_that_opens_their_manifests(atoll: Any, browser: Any) -> None:
    (atoll.cwd / "train.py").write_text(SCRIPT)
    (atoll.cwd / "go").touch()
    made = atoll(
        "run", "--name", "seen", "-n", "3", "--min", "1", "--rendezvous", "none",
        "--max-restarts", "2", "--", sys.executable, "train.py",
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    visitor = Visitor(browser, atoll)
    visitor.sign_in()
    page = visitor.open("/t/seen", "#rounds canvas")
    page.wait_for_selector("#rounds >> text=rounds committed")
    assert "Read from the manifests in the store" in page.inner_text("#rounds")
    page.wait_for_selector(".jump a:has-text('Rounds')")
    tip = "#rounds .rtip >> text=/Rank 0, round \\d+: (in|joined)/"
    press_until(page, "#rounds canvas", "ArrowLeft", tip)
    page.keyboard.press("Enter")
    page.wait_for_selector("#rounds .rdetail table")
    assert "Weight" in page.inner_text("#rounds .rdetail")
    page.click("#rounds summary:has-text('Show as table')")
    page.wait_for_selector("#rounds .twin table tbody tr")
    assert violations(page) == []
    visitor.close()


def test_a_slow_rank_is_named_above_the_grid(atoll: Any, browser: Any) -> None:
    (atoll.cwd / "train.py").write_text(SLOW_SCRIPT)
    made = atoll("run", "--name", "lagging", "--replicas", "2", "--", sys.executable, "train.py")
    assert made.returncode == 0, made.stderr
    visitor = Visitor(browser, atoll)
    visitor.sign_in()
    page = visitor.open("/t/lagging", "#rounds .slow li")
    assert page.inner_text("#rounds .slow li").startswith("Rank 1 is slow: ")
    tip = "#rounds .rtip >> text=/Rank 1, round \\d+: (in|joined)/"
    press_until(page, "#rounds canvas", "ArrowDown", tip)
    page.keyboard.press("Enter")
    page.wait_for_selector("#rounds .rdetail table")
    data, compute = page.locator("#rounds .rdetail tbody tr >> nth=1 >> td").all_inner_texts()[-2:]
    assert float(data.removesuffix(" s")) > float(compute.removesuffix(" s"))
    assert violations(page) == []
    visitor.close()
