"""What reports cost: a call of `atoll.report`, and the control plane for 1,000 ranks.

Beside it, in the same run, TensorBoard's writer and reader where they are installed
(`pip install tensorboard`; no dependency of atoll).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from atoll.agent.metric_sinks import EVERY_S
from atoll.agent.metrics import Reporter, Teller, batch_of
from atoll.metrics.collect import FolderReader
from atoll.metrics.series import COUNT
from atoll.metrics.store import MetricStore

RANKS, NAMES, SECONDS = 1_000, 10, 30
CALLS = 20_000


def nothing(step: int, figures: dict[str, float]) -> None:
    """In place of a report: what the loop, the interpreter and the machine take by themselves."""


def per_call(folder: Path) -> dict[str, float]:
    """Microseconds of a call: processor time of the calling thread, and time on the clock.

    Calls and calls of nothing take turns in the same loop, beside the thread that hands figures on.
    The longest ones on the clock are those in which the machine ran something else.
    """
    os.environ["ATOLL_REPORTS"] = folder.as_uri()
    reporter = Reporter()
    before = time.perf_counter()
    reporter.add(0, {"loss": 0.5, "tokens": 4096})
    first_us = (time.perf_counter() - before) * 1e6
    seen: dict[str, list[float]] = {"report": [], "nothing": []}
    for step in range(1, CALLS):
        for name, call in (("report", reporter.add), ("nothing", nothing)):
            before = time.perf_counter()
            call(step, {"loss": 0.5, "tokens": 4096})
            seen[name].append((time.perf_counter() - before) * 1e6)
        if step % 100 == 0:
            time.sleep(0.005)  # as a step of a training does, which computes elsewhere
    used = {}
    for name, call in (("report", reporter.add), ("nothing", nothing)):
        begun, began_us = time.perf_counter(), time.thread_time() * 1e6
        for step in range(CALLS):
            call(step, {"loss": 0.5, "tokens": 4096})
        used[f"{name}_cpu_us"] = (time.thread_time() * 1e6 - began_us) / CALLS
        used[f"{name}_mean_us"] = (time.perf_counter() - begun) / CALLS * 1e6
    reporter.flush()
    own = {"mean_us": used.pop("report_mean_us"), "cpu_us": used.pop("report_cpu_us")}
    result = {**own, "first_us": first_us, **used}
    for name, times in seen.items():
        times.sort()
        result[f"{name}_median_us"] = times[len(times) // 2]
        result[f"{name}_999_of_1000_us"] = times[len(times) * 999 // 1000]
        result[f"{name}_longest_us"] = times[-1]
        result[f"{name}_over_1_ms"] = float(sum(each > 1000 for each in times))
    return result


def tensorboard(folder: Path) -> dict[str, float] | None:
    """The same calls, and what is written read again; None where it is not installed."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    writer = SummaryWriter(str(folder))
    begun, began_us = time.perf_counter(), time.thread_time() * 1e6
    for step in range(CALLS):
        writer.add_scalar("loss", 0.5, step)
        writer.add_scalar("tokens", 4096, step)
    mean_us = (time.perf_counter() - begun) / CALLS * 1e6
    cpu_us = (time.thread_time() * 1e6 - began_us) / CALLS
    writer.close()
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    before = time.process_time()
    accumulated = EventAccumulator(str(folder), {"scalars": 0})
    accumulated.Reload()
    points = sum(len(accumulated.Scalars(name)) for name in ("loss", "tokens"))
    read_us = (time.process_time() - before) / points * 1e6
    return {
        "mean_us": mean_us,
        "cpu_us": cpu_us,
        "read_us_a_point": read_us,
        "bytes_a_point": size / points,
    }


def read_path(folder: Path) -> dict[str, float]:
    """From the files of ranks to columns, for as many points as TensorBoard reads."""
    figures_folder = folder / "metrics"
    figures_folder.mkdir()
    life = Teller(0, 1, 0, "life")
    with open(figures_folder / "0.1.0.life.000000", "wb") as file:
        for number in range(CALLS // 10):
            steps = range(number * 10, number * 10 + 10)
            points = {
                name: [[float(step), step, value] for step in steps]
                for name, value in (("loss", 0.5), ("tokens", 4096.0))
            }
            file.write(batch_of(life, number + 1, points, 0))
        size = file.tell()
    before = time.process_time()
    metric_store = MetricStore(folder / "series.db")
    reader = FolderReader("u", figures_folder)
    while reader.read(metric_store):
        pass
    points_read = sum(sum(one.series.columns[COUNT]) for one in metric_store.series("u"))
    spent = time.process_time() - before
    return {"read_us_a_point": spent / points_read * 1e6, "bytes_a_point": size / points_read}


def control_plane(folder: Path) -> dict[str, float]:
    """CPU seconds a second of figures: every rank writes a line a second, all are read and kept."""
    figures_folder = folder / "metrics"
    figures_folder.mkdir()
    metric_store = MetricStore(folder / "series.db")
    reader = FolderReader("u", figures_folder)
    spent = written = 0.0
    for second in range(1, SECONDS + 1):
        for rank in range(RANKS):
            points = {f"name{n}": [[float(second), second, second / 7]] for n in range(NAMES)}
            line = batch_of(Teller(rank, 1, 0, f"life{rank}"), second, points, 0)
            with open(figures_folder / f"{rank}.1.0.life{rank}.000000", "ab") as file:
                file.write(line)
            written += len(line)
        before = time.process_time()
        while reader.read(metric_store):
            pass
        spent += time.process_time() - before
    begun = time.perf_counter()
    count = len(metric_store.series("u"))
    read_s = time.perf_counter() - begun
    stored = sum(path.stat().st_size for path in folder.glob("series.db*"))
    return {
        "cpu_per_second": spent / SECONDS,
        "series": count,
        "read_all_s": read_s,
        "bytes_told": written,
        "bytes_stored": stored,
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as where:
        root = Path(where)
        for name in ("calls", "board", "read", "plane"):
            (root / name).mkdir()
        own = {**per_call(root / "calls"), **read_path(root / "read")}
        peer = tensorboard(root / "board")
        results = {
            "report": own,
            "tensorboard": peer,
            "ratios_to_tensorboard": peer and {name: own[name] / peer[name] for name in peer},
            "control_plane": control_plane(root / "plane"),
        }
    json.dump(results, sys.stdout, indent=2)
    path = Path(__file__).parent / "results" / "series.json"
    path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    assert EVERY_S == 1.0
    main()
