"""Thousands of trainings, a thousand ranks, a long log: what the browser holds and asks for stays
bounded. How long its tasks take is measured by `bench/ui.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.core.status import LogLine
from tests.e2e.browser import open_browser
from tests.support.crowded_plane import CrowdedPlane, crowded_plane, large, losing, many

TRAININGS, RANKS, LINES = 1_000, 1_000, 20_000
MAX_ELEMENTS = 3_000


@pytest.fixture(scope="module")
def crowd() -> Iterator[CrowdedPlane]:
    with crowded_plane() as plane:
        plane.put(*many(TRAININGS), large(RANKS))
        losing(plane, "uid-large", 70, 20)
        plane.executor.lines["large"] = [LogLine(rank=3, text=f"line {n}") for n in range(LINES)]
        plane.start()
        yield plane


class Tab:
    """A page, and the answers it got."""

    def __init__(self, browser: Any, plane: CrowdedPlane) -> None:
        self.plane = plane
        self.context = browser.new_context(viewport={"width": 1440, "height": 900})
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.sizes: dict[str, list[int]] = {}
        self.page.on("requestfinished", self._note)
        self.page.goto(plane.link())
        self.page.wait_for_selector(".chips button")

    def _note(self, request: Any) -> None:
        path = request.url.removeprefix(self.plane.origin).partition("?")[0]
        self.sizes.setdefault(path, []).append(request.sizes()["responseBodySize"])

    def open(self, path: str, wanted: str) -> Any:
        self.sizes.clear()
        self.page.goto(f"{self.plane.origin}{path}")
        self.page.wait_for_selector(wanted)
        return self.page

    def elements(self) -> int:
        return int(self.page.evaluate("document.querySelectorAll('*').length"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def tab(browser: Any, crowd: CrowdedPlane) -> Iterator[Tab]:
    tab = Tab(browser, crowd)
    yield tab
    tab.context.close()


def test_a_list_of_thousands_is_one_small_answer_a_page(tab: Tab) -> None:
    page = tab.open("/", "table.list a.name")
    assert "1,001" in page.inner_text(".chips button[data-phase=all]")
    assert page.locator("tbody tr").count() <= 64
    assert tab.elements() < MAX_ELEMENTS
    assert len(tab.sizes["/ui/rows"]) == 1
    assert tab.sizes["/ui/rows"][0] < 30_000
    page.fill("input[type=search]", "run-00999")
    page.wait_for_selector("tbody tr:nth-child(2):last-child")
    assert page.locator("a.name").all_inner_texts() == ["run-00999"]
    tab.open("/?sort=name&offset=980", "a.name:has-text('run-00999')")
    assert page.locator("a.name").count() == 21
    assert page.is_disabled("button:has-text('Older')")


def test_a_world_of_a_thousand_is_one_small_answer_and_its_exceptions_are_found(tab: Tab) -> None:
    page = tab.open("/t/large", ".chart canvas")
    assert tab.sizes["/ui/page/large"][0] < 30_000
    assert "995 running, 3 restarted, 2 pending" in page.inner_text(".counts")
    assert "waits for a node" in page.inner_text("table.ranks")
    assert page.locator("table.ranks tbody tr").count() == 5
    assert tab.elements() < MAX_ELEMENTS
    page.wait_for_selector(f".logs li:has-text('line {LINES - 1}')")
    assert page.locator(".logs li").count() <= 300
    page.evaluate("document.querySelector('.logs').scrollTop = 0")
    page.wait_for_selector(".logs li:has-text('line 15000')")
    assert page.locator(".logs li").count() <= 300
    training = tab.plane.run(tab.plane.store.get(("default", "large")))
    before = len(tab.sizes["/ui/page/large"])
    for number in range(40):
        rows = list(training.status.ranks)
        rows[number + 100] = replace(rows[number + 100], restarts=1)
        tab.plane.change("large", replace(training.status, ranks=rows))
    rows[990] = replace(rows[990], phase="Failed", message="exited with code 9")
    tab.plane.change("large", replace(training.status, ranks=rows))
    page.wait_for_selector("table.ranks >> text=exited with code 9")
    assert len(tab.sizes["/ui/page/large"]) - before <= 42
    assert tab.elements() < MAX_ELEMENTS
