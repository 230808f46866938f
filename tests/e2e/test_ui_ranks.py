"""What a page shows of its ranks: one beside the page, some of a thousand as lanes, a span of time,
and the address that brings all of it back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from atoll.core.phase import Phase
from atoll.core.spec import WorldSize
from atoll.core.status import LogLine, Status, WorldStatus
from tests.e2e.browser import open_browser, violations
from tests.support.crowded_plane import CrowdedPlane, crowded_plane, large, losing, many, training

HOSTILE = "<img src=x onerror=document.title='broken'>"


@pytest.fixture(scope="module")
def plane() -> Iterator[CrowdedPlane]:
    with crowded_plane() as plane:
        plane.put(*many(30), large(8, name="small"), large(300))
        losing(plane, "uid-small", 8, 20)
        plane.executor.lines["small"] = [LogLine(rank=5, text=f"five {HOSTILE}\x1b[31m")]
        plane.start()
        yield plane


@pytest.fixture(scope="module")
def page(plane: CrowdedPlane) -> Iterator[Any]:
    with open_browser() as browser:
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        page = context.new_page()
        page.set_default_timeout(60_000)
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(plane.link())
        page.wait_for_selector(".chips button")
        yield page
        context.close()
        assert complaints == []


def test_a_rank_opens_beside_the_page_with_its_own_address(plane: CrowdedPlane, page: Any) -> None:
    page.goto(f"{plane.origin}/t/small")
    page.click(".strips a:text-is('4')")
    page.wait_for_selector(".side >> text=Newest metrics")
    assert page.url.endswith("/t/small/r/4")
    side = page.inner_text(".side")
    assert "Rank 4" in side
    assert "node-000" in side
    assert "machine/memory" in side
    assert page.locator(".strips").count() == 1, "the page stays"
    assert violations(page) == []
    page.click(".side button[aria-label='Rank after']")
    page.wait_for_selector(".side pre:has-text('five')")
    assert HOSTILE in page.inner_text(".side")
    assert page.locator(".side img").count() == 0
    assert page.url.endswith("/r/5")
    page.reload()
    page.wait_for_selector(".side pre:has-text('five')")
    page.keyboard.press("Escape")
    page.wait_for_selector(".side", state="hidden")
    assert page.url.endswith("/t/small")
    page.go_back()
    page.wait_for_selector(".side >> text=Rank 5")


def test_some_ranks_of_a_large_world_are_seen_as_lanes(plane: CrowdedPlane, page: Any) -> None:
    page.goto(f"{plane.origin}/t/large")
    page.wait_for_selector(".mosaic canvas")
    page.fill("input[aria-label='Ranks to show as lanes']", "10-12,150")
    page.click("button:text-is('Show')")
    page.wait_for_selector(".strips a:text-is('150')")
    assert page.locator(".strips .rk").all_inner_texts() == ["10", "11", "12", "150"]
    assert "lanes=10-12%2C150" in page.url
    page.reload()
    page.wait_for_selector(".strips a:text-is('150')")
    page.click(".mosaic canvas", position={"x": 5, "y": 5})
    page.wait_for_selector(".side >> text=Rank 0")


def test_a_span_of_time_is_drawn_with_the_pointer_and_kept_in_the_address(
    plane: CrowdedPlane, page: Any
) -> None:
    page.goto(f"{plane.origin}/t/small?w=all")
    world = page.wait_for_selector(".worldchart svg").bounding_box()
    middle = world["y"] + world["height"] / 2
    page.mouse.move(world["x"] + world["width"] * 0.5, middle)
    page.mouse.down()
    page.mouse.move(world["x"] + world["width"] * 0.75, middle)
    page.mouse.up()
    page.wait_for_selector(".brush:not(.none)")
    assert "from=" in page.url
    assert "to=" in page.url
    page.keyboard.press("0")
    page.wait_for_selector(".brush.none", state="attached")
    assert "from=" not in page.url


def test_keys_are_told_and_go_where_they_say(plane: CrowdedPlane, page: Any) -> None:
    page.goto(f"{plane.origin}/t/small")
    page.wait_for_selector(".chart canvas")
    page.keyboard.press("?")
    assert "all trainings" in page.wait_for_selector("dialog").inner_text()
    assert violations(page) == []
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("t")
    page.wait_for_selector("table.list a.name")
    for number in (1, 2):
        page.keyboard.press("j")
        page.keyboard.press("x")
        page.wait_for_function(
            f"document.querySelectorAll('table.list input:checked').length === {number}"
        )
    page.keyboard.press("c")
    page.wait_for_selector("h1:text-is('Compare')")
    assert page.url.count("t=") == 2


def test_runs_are_compared_by_step_time_and_tokens(plane: CrowdedPlane, page: Any) -> None:
    page.goto(f"{plane.origin}/compare?t=small&t=large&t=run-00001&t=nobody&x=tokens")
    page.wait_for_selector(".u-over")
    assert page.locator("table.compare tbody tr").count() == 3
    said = page.inner_text("[role=status].dim")
    assert "No loss over tokens: large, run-00001" in said
    assert "No such training: nobody" in said
    page.click("summary:has-text('that are the same')")
    page.wait_for_selector("dt:text-is('executor')")
    assert violations(page) == []
    page.click("button[aria-label='Remove small']")
    page.wait_for_selector("button[aria-label='Remove small']", state="detached")
    assert "t=small" not in page.url


def test_a_chart_of_many_runs_names_those_that_it_leaves_out(
    plane: CrowdedPlane, page: Any
) -> None:
    names = [f"sweep-{number:02}" for number in range(70)]
    done = Status(phase=Phase.SUCCEEDED, world=WorldStatus.of(1, WorldSize(min=1, target=1, max=1)))
    plane.put(*(training(name, done) for name in names))
    for number, name in enumerate(names):
        plane.report(f"uid-{name}", 0, {"loss": [(at, at, number + at) for at in range(5)]})
    page.goto(f"{plane.origin}/compare?{'&'.join(f't={name}' for name in names)}")
    page.wait_for_selector("[role=status]:has-text('Not drawn: sweep-64')")
    assert page.locator("table.compare tbody tr").count() == 70
    page.hover(".u-over")
    page.wait_for_selector(".tip:visible")
    assert page.locator(".tip li").count() == 64
    page.uncheck("input[aria-label='Draw sweep-00']")
    page.wait_for_selector("[role=status]:has-text('Not drawn: sweep-65')")
