"""What a start costs the control plane with 10, 100 and 300 trainings waiting for one slot.

A freed slot should wake the training whose turn it is and nobody else, so the CPU time of a start
should not grow with the queue.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
os.environ["PYTHONPATH"] = str(ROOT / "src")

from tests.support.control_plane import cpu_seconds, serving  # noqa: E402

QUEUED = (10, 100, 300)
STARTS = 10  # that are measured, of the first in the queue
WITHIN_S = 300.0
RESULTS = Path(__file__).with_name("results") / "slots.json"


def measure(folder: Path, queued: int) -> dict[str, float]:
    with serving(folder / "state", slots=1) as plane:
        first = plane.create("sleep 1000")
        plane.until_ready(first, 1)
        names = [plane.create("exit 0") for _ in range(queued)]
        for name in names:
            plane.until(name, lambda t: t.status.phase == "pending", timeout=WITHIN_S)
        used, began = cpu_seconds(plane.pid), time.perf_counter()
        plane.ask(first, cancel=True)
        for name in names[:STARTS]:
            plane.until_over(name, timeout=WITHIN_S)
        took, used = time.perf_counter() - began, cpu_seconds(plane.pid) - used
    return {
        "queued": queued,
        "cpu_ms_a_start": round(used / STARTS * 1000, 1),
        "wall_ms_a_start": round(took / STARTS * 1000, 1),
    }


def main() -> None:
    rows = []
    for queued in QUEUED:
        with tempfile.TemporaryDirectory(prefix="atoll-queue-") as folder:
            rows.append(measure(Path(folder), queued))
        print(json.dumps(rows[-1]), flush=True)
    kept = {"rows": rows, "starts": STARTS, "loadAverage": os.getloadavg()}
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
