"""The dashboard in a real browser: failures are understood, actions act, changes appear, and what
ranks print is only ever text."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from tests.e2e.browser import Visitor, open_browser, violations
from tests.e2e.conftest import until
from tests.proxy import Proxy

FOREVER = "trap 'exit 0' TERM; while :; do sleep 0.05; done"
HOSTILE = "<img src=x onerror=document.title='broken'>"
FAILING = f"""
import os, sys, time, atoll
rank = int(os.environ["RANK"])
for step in range(30):
    atoll.report(step=step, loss=1 / (step + 1), **{{"{HOSTILE}": step}})
print("{HOSTILE}", flush=True)
if rank == 1:
    print("ValueError: shapes do not match", flush=True)
    sys.exit(7)
time.sleep(600)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with open_browser() as opened:
        yield opened


@pytest.fixture
def visitor(browser: Any, atoll: Any) -> Iterator[Visitor]:
    visitor = Visitor(browser, atoll)
    visitor.sign_in()
    yield visitor
    visitor.close()


def fail(atoll: Any, name: str) -> None:
    (atoll.cwd / "fail.py").write_text(FAILING)
    atoll("run", "--name", name, "-n", "3", "--min", "3", "--", sys.executable, "fail.py")


def test_a_failure_is_understood_from_its_page_and_nothing_a_rank_says_is_markup(
    atoll: Any, visitor: Visitor
) -> None:
    fail(atoll, "understood")
    page = visitor.page
    page.click("a.name:has-text('understood')")
    page.wait_for_selector("#cause >> text=Root cause: rank 1")
    page.wait_for_selector("#cause >> text=exited with code 7")
    page.wait_for_selector("#cause >> text=ValueError: shapes do not match")
    page.wait_for_selector(".seq >> text=Rank 1 exited with code 7")
    page.wait_for_selector(".tally >> text=2 stopped by atoll")
    page.wait_for_selector(f".logs li:has-text({HOSTILE!r})")
    assert re.fullmatch(r"\d\d:\d\d:\d\d", page.inner_text(".logs li time >> nth=0"))
    page.wait_for_selector(".chart h3:has-text('loss')")
    page.wait_for_selector(f"option:text-is({HOSTILE!r})", state="attached")
    assert page.locator("main img").count() == 0
    assert page.title().startswith("✕ understood")


def test_scale_and_cancel_ask_first_and_the_page_follows(atoll: Any, visitor: Visitor) -> None:
    atoll(
        "run",
        "-d",
        "--name",
        "acted",
        "-n",
        "2",
        "--min",
        "1",
        "--max",
        "4",
        "--",
        "sh",
        "-c",
        FOREVER,
    )
    page = visitor.open("/t/acted", ".facts >> text='2 of 2'")
    page.click("button:has-text('Scale…')")
    page.fill("dialog input", "9")
    assert page.is_disabled("dialog button.primary"), "outside of the bounds"
    page.fill("dialog input", "3")
    assert "Starts rank 2." in page.inner_text("dialog")
    page.click("dialog button.primary")
    page.wait_for_selector(".facts >> text='3 of 3'")
    page.click("button:has-text('Cancel…')")
    page.keyboard.press("Escape")
    assert atoll.json("status", "acted")["phase"] == "ready", "Escape leaves it as it is"
    page.click("button:has-text('Cancel…')")
    page.click("dialog button.danger")
    page.wait_for_selector(".title >> text=Cancelled")
    assert page.get_attribute("button:has-text('Scale…')", "aria-disabled") == "true"
    page.click("button:has-text('Delete…')")
    page.click("dialog button.danger")
    page.wait_for_selector("text=Deleted at")


def test_a_running_training_is_deleted_only_by_its_name(atoll: Any, visitor: Visitor) -> None:
    atoll("run", "-d", "--name", "kept", "-n", "1", "--", "sh", "-c", FOREVER)
    page = visitor.open("/t/kept", ".facts >> text='1 of 1'")
    page.click("button:has-text('Delete…')")
    assert page.is_disabled("dialog button.danger")
    page.fill("dialog input", "kept")
    page.click("dialog button.danger")
    until(lambda: "kept" not in [each["name"] for each in atoll.json("ps")])


def test_a_killed_rank_appears_and_reload_back_and_two_tabs_show_the_same(
    atoll: Any, visitor: Visitor
) -> None:
    words = ("--name", "killed", "-n", "2", "--max-restarts", "3")
    atoll("run", "-d", *words, "--", "sh", "-c", f"echo $$ > pid-$RANK; {FOREVER}")
    page = visitor.open("/t/killed", ".facts >> text='2 of 2'")
    other = visitor.tab()
    other.goto(f"{visitor.origin}/?q=killed")
    other.wait_for_selector("a.name:has-text('killed')")
    pid = int((atoll.cwd / "pid-1").read_text())
    os.kill(pid, signal.SIGKILL)
    page.wait_for_selector(".lane.cross", state="attached")
    page.wait_for_selector("#events >> text=SIGKILL")
    other.wait_for_selector("td.sy:has-text('1 restart')")
    page.reload()
    page.wait_for_selector(".lane.cross", state="attached")
    other.click("a.name:has-text('killed')")
    other.wait_for_selector(".lane.cross", state="attached")
    other.go_back()
    other.wait_for_selector("a.name:has-text('killed')")
    assert "q=killed" in other.url
    atoll("rm", "-f", "killed")


def test_a_page_says_that_it_is_stale_and_goes_on_when_the_server_is_back(
    browser: Any, atoll: Any
) -> None:
    atoll("run", "-d", "--name", "stays", "-n", "1", "--", "sh", "-c", FOREVER)
    line = Proxy(json.loads((atoll.state / "endpoint.json").read_text())["url"])
    visitor = Visitor(browser, atoll)
    link = urlsplit(visitor.link())
    by_line = f"{link.hostname}:{urlsplit(line.url).port}"
    visitor.page.goto(urlunsplit(link._replace(netloc=by_line)))
    visitor.page.wait_for_selector(".chips button")
    page = visitor.open("/t/stays", ".facts >> text='1 of 1'")
    line.is_refusing = True
    line.cut()
    page.wait_for_selector("#stale:visible")
    assert "Not connected since" in page.inner_text("#stale")
    assert page.get_attribute("button:has-text('Cancel…')", "aria-disabled") == "true"
    line.is_refusing = False
    page.wait_for_selector("#stale", state="hidden")
    page.click("button:has-text('Cancel…')")
    page.click("dialog button.danger")
    page.wait_for_selector(".title >> text=Cancelled")
    visitor.close()
    line.close()
    atoll("rm", "-f", "stays")


@pytest.mark.parametrize("width", [1440, 390])
def test_axe_has_nothing_against_any_page_in_either_theme(
    browser: Any, atoll: Any, width: int
) -> None:
    fail(atoll, f"axe-{width}")
    atoll("run", "-d", "--name", f"axe-runs-{width}", "-n", "2", "--", "sh", "-c", FOREVER)
    visitor = Visitor(browser, atoll, width=width)
    page = visitor.page
    page.goto(visitor.link().split("#")[0])
    page.wait_for_selector(".signin")
    assert violations(page) == []
    visitor.sign_in()
    pages = {
        "/": "table.list a.name",
        f"/t/axe-{width}": ".chart canvas",
        f"/t/axe-runs-{width}": ".lanes .lane",
        f"/t/axe-{width}/r/1": ".side pre",  # the rank that failed first
        "/t/no-such-training": "text=There is no such training.",
        f"/compare?t=axe-{width}&t=axe-runs-{width}": ".holder canvas",
    }
    for path, wanted in pages.items():
        visitor.open(path, wanted)
        for theme in ("light", "dark"):
            page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
            assert violations(page) == [], (path, theme)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{path} scrolls sideways by {wide} px"
    visitor.close()
    atoll("rm", "-f", f"axe-{width}", f"axe-runs-{width}")


def test_a_link_signs_in_once_and_a_used_one_says_what_to_do(visitor: Visitor) -> None:
    link = visitor.link()
    visitor.page.goto(link)
    visitor.page.wait_for_selector(".chips button")
    assert "#" not in visitor.page.url, "the code is not left in the address bar"
    stranger = visitor.context.browser.new_context()
    page = stranger.new_page()
    page.goto(link)
    page.wait_for_selector(".signin .trouble:has-text('run')")
    assert "atoll ui" in page.inner_text(".signin")
    stranger.close()


def test_signing_out_and_revoking_end_the_session(atoll: Any, browser: Any) -> None:
    visitor = Visitor(browser, atoll)
    visitor.sign_in()
    visitor.page.click("button:has-text('Sign out')")
    visitor.page.wait_for_selector(".signin")
    visitor.sign_in()
    assert "ended" in atoll("ui", "--revoke").stderr
    visitor.page.goto(f"{visitor.origin}/")
    visitor.page.wait_for_selector(".signin")
    visitor.close()


def test_a_search_finds_what_is_far_from_the_end_and_a_rerun_is_a_new_training(
    atoll: Any, visitor: Visitor
) -> None:
    script = (
        "[ $ATOLL_ATTEMPT = 1 ] || exit 3; i=0; while [ $i -lt 9000 ]; do echo line $i; "
        "[ $i != 40 ] || echo the needle; i=$((i+1)); done"
    )
    atoll("run", "--name", "long", "--max-restarts", "1", "--", "sh", "-c", script)
    page = visitor.open("/t/long", ".logs li:has-text('line 8999')")
    assert page.query_selector(".logs li:has-text('the needle')") is None
    page.fill("input[aria-label='Search the logs']", "THE NEEDLE")
    page.press("input[aria-label='Search the logs']", "Enter")
    page.wait_for_selector(".logs li.at:has-text('the needle')")
    assert page.wait_for_selector(".logbar [role=status]:has-text('1 of 1')")
    assert "exited with code 3" in page.text_content(".strips svg rect title")
    page.click("button:has-text('Rerun…')")
    page.click("dialog button:has-text('Run it again')")
    page.wait_for_selector("h1:has-text('long-r2')")


REPORTING = """
import sys, atoll
for step in range(int(sys.argv[-1])):
    atoll.report(step=step, loss=4 - step / 100, tokens=100)
"""


def test_a_chart_has_axes_smoothing_a_log_scale_values_at_the_cursor_and_zoom(
    atoll: Any, visitor: Visitor
) -> None:
    (atoll.cwd / "reports.py").write_text(REPORTING)
    atoll("run", "--name", "drawn", "-n", "2", "--", sys.executable, "reports.py", "200")
    page = visitor.open("/t/drawn", ".chart[data-name=loss] canvas")
    over = ".chart[data-name=loss] .u-over"

    def at_cursor(share: float) -> str:
        tip = page.locator(".chart[data-name=loss] .tip")

        def is_shown() -> bool:  # a chart that is drawn anew meanwhile knows of no cursor
            box = page.locator(over).bounding_box()
            if box is None:
                return False
            page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2 - 1)
            page.mouse.move(box["x"] + box["width"] * share, box["y"] + box["height"] / 2)
            return bool(tip.is_visible())

        until(is_shown)
        return str(tip.inner_text())

    page.locator("#charts").scroll_into_view_if_needed()
    page.select_option("select[aria-label='Horizontal axis']", "step")
    # The mean, and the edges of its band.
    shown = r"(?s)(?=.*step 10)(?=.*mean\s+3\.0)(?=.*max)"
    until(lambda: re.match(shown, at_cursor(0.5)))
    page.select_option("select[aria-label='Horizontal axis']", "tokens")
    until(lambda: re.search(r"tokens 10\.\d k", at_cursor(0.5)))
    page.click("button:text-is('Log scale')")
    page.focus("#smoothing")
    page.keyboard.press("End")
    until(lambda: {"x=tokens", "log=1", "smooth=0.98"} <= set(re.split("[?&]", page.url)))
    page.reload()
    page.wait_for_selector(".chart[data-name=loss] canvas")
    assert page.get_attribute("button:text-is('Log scale')", "aria-pressed") == "true"
    page.locator("#charts").scroll_into_view_if_needed()

    def zoom() -> bool:
        box = page.locator(over).bounding_box()
        if box is None:
            return False
        middle = box["y"] + box["height"] / 2
        page.mouse.move(box["x"] + box["width"] * 0.5, middle)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.75, middle, steps=4)
        page.mouse.up()
        return bool(page.locator("button:text-is('Whole')").is_visible())

    until(zoom)
    until(lambda: re.search(r"tokens 1[0-5]\.\d k", at_cursor(0.02)))
    page.click("button:text-is('Whole')")
    page.wait_for_selector("button:text-is('Whole')", state="detached")


def test_trainings_are_rows_and_each_flag_that_differs_is_a_column_that_fits(
    atoll: Any, visitor: Visitor
) -> None:
    (atoll.cwd / "reports.py").write_text(REPORTING)
    flags = ("--lr", "--width", "--depth", "--seed", "--batch", "--decay", "--beta")
    for number in range(3):
        words = [word for flag in flags for word in (flag, str(number / 10))]
        script = ("reports.py", "--same", "yes", *words, "20")
        atoll("run", "--name", f"set-{number}", "--", sys.executable, *script)
    query = "&".join(f"t=set-{number}" for number in range(3))
    page = visitor.open(f"/compare?{query}", ".u-over")
    page.wait_for_selector("table.compare th:has-text('lr')")
    assert page.locator("td:text-is('0.2')").count() >= 2
    assert page.locator("table.compare th:has-text('same')").count() == 0
    wide = (
        "document.querySelector('.runs').scrollWidth - document.querySelector('.runs').clientWidth"
    )
    assert page.evaluate(wide) <= 0
    page.click("table.compare th button:text-is('lr')")
    page.click("table.compare th button:text-is('lr')")
    assert page.inner_text("table.compare tbody th >> nth=0") == "set-2"
    for theme in ("light", "dark"):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        assert violations(page) == []


def test_a_group_is_one_row_until_it_is_opened_and_is_compared_by_a_click(
    lone_atoll: Any, browser: Any
) -> None:
    (lone_atoll.cwd / "reports.py").write_text(REPORTING)
    for lr in ("0.1", "0.3"):
        words = ("--name", f"train-lr{lr}", "--label", "group=lrs", "--", sys.executable)
        lone_atoll("run", *words, "reports.py", "--lr", lr, "5")
    lone_atoll("run", "--name", "train-lr9", "--label", "group=lrs", "--", "false")
    visitor = Visitor(browser, lone_atoll)
    visitor.sign_in()
    page = visitor.page
    page.wait_for_selector("td:has-text('3 trainings: 1 failed, 2 succeeded')")
    assert page.locator("a.name").count() == 0
    page.click("button:has-text('lrs')")
    page.wait_for_selector("a.name:has-text('train-lr0.3')")
    assert violations(page) == []
    page.click("button:text-is('Compare')")
    page.wait_for_selector("table.compare td:text-is('0.3')")
    rows = page.locator("table.compare tbody th").all_inner_texts()
    assert sorted(rows) == ["train-lr0.1", "train-lr0.3", "train-lr9"]
    visitor.close()


def test_running_work_stays_on_top_and_failures_fold_once_they_were_seen(
    lone_atoll: Any, browser: Any
) -> None:
    lone_atoll("run", "-d", "--name", "works", "--", "sh", "-c", FOREVER)
    for name in ("broken-1", "broken-2"):
        lone_atoll("run", "--name", name, "--", "false")
    visitor = Visitor(browser, lone_atoll)
    visitor.sign_in()
    page = visitor.page
    page.wait_for_selector("a.name:has-text('broken-2')")
    assert page.locator("a.name").all_inner_texts() == ["works", "broken-2", "broken-1"]
    page.click("a.name:has-text('broken-1')")
    page.wait_for_selector("#cause")
    page.go_back()
    page.wait_for_selector("button:has-text('1 that you have seen')")
    assert page.locator("a.name").all_inner_texts() == ["works", "broken-2"]
    page.click("button:has-text('Mark all as seen')")
    page.click("button:has-text('2 that you have seen')")
    page.wait_for_selector("a.name:has-text('broken-1')")
    assert violations(page) == []
    page.reload()
    page.wait_for_selector("button:has-text('2 that you have seen')")
    visitor.close()


HANGING = """
import threading

def wait_for_a_lock():
    threading.Event().wait()

wait_for_a_lock()
"""


def test_stacks_of_a_training_and_of_one_rank_are_a_click_away(
    atoll: Any, visitor: Visitor
) -> None:
    (atoll.cwd / "hang.py").write_text(HANGING)
    atoll("run", "-d", "--name", "hanging", "-n", "2", "--", sys.executable, "hang.py")
    page = visitor.open("/t/hanging", ".facts >> text='2 of 2'")
    line = "2 ranks (0-1) in wait (threading.py), hang.py:5 in wait_for_a_lock"

    def take() -> bool:
        page.focus(".acts button:has-text('Stacks')")
        page.keyboard.press("Enter")
        page.wait_for_selector("dialog pre")
        if line in page.inner_text("dialog pre"):
            return True
        page.keyboard.press("Escape")
        return False

    until(take)  # Python may still be on its way to the script
    assert line in atoll("stacks", "hanging").stdout
    for theme in ("light", "dark"):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        assert violations(page) == []
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog", state="detached")
    visitor.open("/t/hanging/r/1", ".side button:has-text('Stacks')")
    page.click(".side button:has-text('Stacks')")
    page.wait_for_selector("dialog pre >> text=rank 1 in wait (threading.py), hang.py:5")
    page.keyboard.press("Escape")
    atoll("rm", "-f", "hanging")


def test_a_tab_whose_session_ended_says_what_to_do_and_goes_on_by_itself(
    atoll: Any, browser: Any
) -> None:
    atoll("run", "-d", "--name", "outlives", "-n", "1", "--", "sh", "-c", FOREVER)
    visitor = Visitor(browser, atoll)
    visitor.sign_in()
    page = visitor.open("/t/outlives", ".facts >> text='1 of 1'")
    os.kill(atoll.server_pid(), signal.SIGKILL)
    assert atoll("ps").returncode == 0  # starts the next control plane
    page.wait_for_selector("text=This session has ended: run `atoll ui`")
    assert page.is_hidden("#stale")
    assert violations(page) == []
    other = visitor.tab()
    other.goto(visitor.link())
    other.wait_for_selector(".chips button")
    page.wait_for_selector(".facts >> text='1 of 1'")
    assert page.url.endswith("/t/outlives")
    visitor.close()
    atoll("rm", "-f", "outlives")
