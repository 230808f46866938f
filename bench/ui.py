"""The dashboard in a real Chromium: first paint, bytes, requests, elements and long tasks.

`python bench/ui.py`: 10,000 stored trainings, and a world of 1,000 ranks of which one changes each
second. Beside each figure is that of a small plane (10 trainings, 4 ranks) in the same run.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from msgspec.structs import replace  # noqa: E402
from tests.e2e.browser import open_browser  # noqa: E402
from tests.support.crowded_plane import CrowdedPlane, crowded_plane, large, losing, many  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "ui.json"
LIVE_S = 20
OBSERVER = """
window.seen = { long: [], shift: 0, paint: {} };
new PerformanceObserver((list) => {
  for (const each of list.getEntries()) seen.long.push(Math.round(each.duration));
}).observe({ type: "longtask", buffered: true });
new PerformanceObserver((list) => {
  for (const each of list.getEntries()) if (!each.hadRecentInput) seen.shift += each.value;
}).observe({ type: "layout-shift", buffered: true });
new PerformanceObserver((list) => {
  for (const each of list.getEntries()) seen.paint[each.name] = Math.round(each.startTime);
}).observe({ type: "paint", buffered: true });
"""


class Watcher:
    """One tab, and what it costs."""

    def __init__(self, browser: Any, plane: CrowdedPlane) -> None:
        self.plane = plane
        self.context = browser.new_context(viewport={"width": 1440, "height": 900})
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.add_init_script(OBSERVER)
        self.page.goto(plane.link())
        self.page.wait_for_selector(".chips button")
        self.cdp = self.context.new_cdp_session(self.page)
        self.cdp.send("Network.enable")
        self.cdp.send("Performance.enable")
        self.bytes = self.requests = 0
        self.cdp.on("Network.loadingFinished", self._count)

    def _count(self, event: Any) -> None:
        self.bytes += int(event["encodedDataLength"])
        self.requests += 1

    def open(self, path: str, wanted: str) -> dict[str, Any]:
        self.bytes = self.requests = 0
        self.page.goto(f"{self.plane.origin}{path}")
        self.page.wait_for_selector(wanted)
        usable_ms = round(self.page.evaluate("performance.now()"))
        self.page.wait_for_timeout(1500)
        return {"usable_ms": usable_ms, **self.figures()}

    def figures(self) -> dict[str, Any]:
        seen = self.page.evaluate("seen")
        metrics = {
            each["name"]: each["value"]
            for each in self.cdp.send("Performance.getMetrics")["metrics"]
        }
        return {
            "first_paint_ms": seen["paint"].get("first-contentful-paint"),
            "bytes": self.bytes,
            "requests": self.requests,
            "elements": self.page.evaluate("document.querySelectorAll('*').length"),
            "long_tasks": len(seen["long"]),
            "longest_task_ms": max(seen["long"], default=0),
            "layout_shift": round(seen["shift"], 4),
            "heap_mb": round(metrics["JSHeapUsedSize"] / 1e6, 1),
        }

    def live(self, ranks: int) -> dict[str, Any]:
        """While one rank changes each second and all of them report."""
        self.page.evaluate("seen.long.length = 0")
        before = self._busy()
        begun, changes = time.monotonic(), 0
        while time.monotonic() - begun < LIVE_S:
            changes += 1
            self._change(ranks, changes)
            self.page.wait_for_timeout(1000)
        figures = self.figures()
        return {
            "changes": changes,
            "main_thread_share": round((self._busy() - before) / (time.monotonic() - begun), 4),
            "long_tasks": figures["long_tasks"],
            "longest_task_ms": figures["longest_task_ms"],
            "elements": figures["elements"],
            "heap_mb": figures["heap_mb"],
        }

    def _busy(self) -> float:
        metrics = self.cdp.send("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    def _change(self, ranks: int, number: int) -> None:
        training = self.plane.run(self.plane.store.get(("default", "large")))
        rows = list(training.status.ranks)
        rank = number * 17 % ranks
        rows[rank] = replace(rows[rank], restarts=rows[rank].restarts + 1)
        self.plane.change("large", replace(training.status, ranks=rows))
        now = time.time()
        for each in range(0, ranks, max(1, ranks // 100)):
            self.plane.report("uid-large", each, {"loss": [(now, 1000 + number, 2.2)]})


def measured(browser: Any, trainings: int, ranks: int) -> dict[str, Any]:
    with crowded_plane() as plane:
        plane.put(*many(trainings), large(ranks))
        losing(plane, "uid-large", ranks)
        plane.start()
        watcher = Watcher(browser, plane)
        first = "table.list a.name"
        out = {
            "list": watcher.open("/", first),
            "list_searched": watcher.open("/?q=run-0000", first),
            "list_sorted": watcher.open("/?sort=-ran", first),
            "list_last_page": watcher.open(f"/?sort=name&offset={max(0, trainings - 50)}", first),
            "training": watcher.open("/t/large", ".chart canvas"),
            "training_live": watcher.live(ranks),
        }
        watcher.context.close()
        return out


def main() -> None:
    with open_browser() as browser:
        results = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores",
            "chromium": browser.version,
            "small: 10 trainings, 4 ranks": measured(browser, 10, 4),
            "large: 10,000 trainings, 1,000 ranks": measured(browser, 10_000, 1_000),
        }
    print(json.dumps(results, indent=2))
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
