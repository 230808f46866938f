"""What the times of log lines cost, and a search of a large log.

    python -m bench.logs [--mb 256]

Ratios in one run: writing with times against without, reading with against without, and the search
against `grep -c` on the same files.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from atoll.logs import segments
from atoll.logs.files import read_lines
from atoll.logs.search import LogSearch

LINE = b"step 000123 loss 2.3456 tokens 1048576 grad_norm 0.1234 lr 3.0e-04 and some more words\n"


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def write(folder: Path, chunk: bytes, count: int, *, is_timed: bool) -> None:
    stamp = segments.LogWriter._stamp
    if not is_timed:
        segments.LogWriter._stamp = lambda self: None  # type: ignore[method-assign]
    try:
        log = segments.LogWriter(folder, max_bytes=2**40)
        for _ in range(count):
            log.write(chunk)
        log.close()
    finally:
        segments.LogWriter._stamp = stamp  # type: ignore[method-assign]


def read(folder: Path) -> int:
    async def count() -> int:
        lines = read_lines(folder, {}, ranks=None, follow=None)
        return sum([1 async for _ in lines])

    return asyncio.run(count())


def search(folder: Path) -> float:
    looked = LogSearch(folder, "needle", is_case_blind=True)
    while looked.step() is not None:
        pass
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=256)
    size = parser.parse_args().mb * 10**6
    results: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        for name, chunk, count in (("line", LINE, 100_000), ("64 KiB", LINE * 750, 1_000)):
            took = {}
            for is_timed in (False, True, False, True):  # the first two warm up
                folder = Path(place) / f"{name}-{is_timed}-{len(took)}" / "0"
                took[is_timed] = timed(lambda: write(folder, chunk, count, is_timed=is_timed))  # noqa: B023
            results[f"write by {name}, with times / without"] = took[True] / took[False]
            results[f"write by {name}, us a write"] = took[True] / count * 1e6
        folder = Path(place) / "read"
        write(folder / "0", LINE, 200_000, is_timed=True)
        with_times = timed(lambda: read(folder))
        for path in (folder / "0").glob("*.times"):
            path.unlink()
        results["read, with times / without"] = with_times / timed(lambda: read(folder))
        large = Path(place) / "large"
        write(large / "0", LINE * 750, size // (len(LINE) * 750), is_timed=True)
        files = [str(path) for path in (large / "0").glob("*.log")]
        grep = timed(lambda: subprocess.run(["grep", "-ci", "needle", *files], check=False))
        ours = timed(lambda: search(large))
        results["search, MB/s"] = size / 10**6 / ours
        results["search / grep -i"] = ours / grep
    print(json.dumps({name: round(value, 3) for name, value in results.items()}, indent=2))


if __name__ == "__main__":
    main()
