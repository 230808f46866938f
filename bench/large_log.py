"""A rank that prints a gigabyte, seen by `atoll logs` and by the dashboard in a real Chromium.

`python bench/large_log.py [--mb 1024]`: seconds to first lines, of a search and of the whole log;
memory of the control plane, of the command and of the page. Beside it `cat` and `grep` on the same
files, in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from tests.e2e.browser import Visitor, open_browser  # noqa: E402
from tests.e2e.conftest import ATOLL, Shell, until  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "large_log.json"
LINE = "step %09d loss 2.3456 tokens 1048576 grad_norm 0.1234 lr 3.0e-04 and a few more words"
RANK = f"""
import os, sys, time
lines, out = int(sys.argv[1]), sys.stdout
for number in range(lines):
    out.write({LINE!r} % number + "\\n")
    if number == lines // 2:
        out.write("the needle in the middle\\n")
out.write("all is printed\\n")
out.flush()
while not os.path.exists("go"):
    time.sleep(0.05)
for number in range(200_000):
    out.write("more " + {LINE!r} % number + "\\n")
out.write("the very end\\n")
out.flush()
while not os.path.exists("leave"):
    time.sleep(0.05)
"""


def memory(pid: int, name: str = "VmRSS") -> float:
    """MB of a process; `VmHWM` is its peak."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(name))


class Lab:
    """A training whose rank has printed, and how the control plane fares."""

    def __init__(self, where: Path, megabytes: int) -> None:
        (where / "work").mkdir()
        self.atoll = Shell(where / "state", where / "work")
        kept = 4 * megabytes * 2**20
        self.atoll.configure(f"[executors.local]\nlog_bytes = {kept}\n")
        (where / "work/train.py").write_text(RANK)
        lines = megabytes * 2**20 // (len(LINE % 0) + 1)
        began = time.perf_counter()
        made = self.atoll(
            "run", "-d", "--name", "large", "--", sys.executable, "train.py", str(lines)
        )
        assert made.returncode == 0, made.stderr
        self.pid = self.atoll.server_pid()
        self.before_mb = memory(self.pid)
        until(lambda: "all is printed" in self.atoll("logs", "large", "--tail", "1").stdout, 3600)
        self.print_s = time.perf_counter() - began
        self.uid = self.atoll.json("status", "large")["uid"]
        self.folder = where / "state" / "ranks" / self.uid / "logs" / "0"

    def measured(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """With the peak of the control plane meanwhile, in MB over what it had at the start."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")  # forgets the peak
        found = work()
        return {**found, "server_peak_mb": memory(self.pid, "VmHWM") - self.before_mb}

    def command(self, *words: str) -> dict[str, Any]:
        """Seconds to the first byte and to the end, bytes, and the peak of the command."""
        began = time.perf_counter()
        process = subprocess.Popen(
            [*ATOLL, "logs", "large", *words],
            cwd=self.atoll.cwd,
            env=self.atoll.env,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        size = len(os.read(process.stdout.fileno(), 1))
        first_s = time.perf_counter() - began
        peak = 0.0
        while more := len(os.read(process.stdout.fileno(), 1 << 20)):
            size += more
            if process.poll() is None:
                peak = max(peak, memory(process.pid, "VmHWM"))
        process.wait()
        whole_s = time.perf_counter() - began
        return {"first_s": first_s, "whole_s": whole_s, "bytes": size, "own_peak_mb": peak}


def peer(words: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(words, stdout=subprocess.DEVNULL, check=False)
    return time.perf_counter() - began


def page_memory(visitor: Any, session: Any) -> dict[str, float]:
    session.send("HeapProfiler.collectGarbage")
    metrics = {
        each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]
    }
    elements = visitor.page.evaluate("document.querySelectorAll('*').length")
    return {"heap_mb": metrics["JSHeapUsedSize"] / 2**20, "elements": elements}


def dashboard(lab: Lab) -> dict[str, Any]:
    """The page of the training: its last lines, a search through all of it, and following."""
    with open_browser() as browser:
        visitor = Visitor(browser, lab.atoll)
        visitor.sign_in()
        page = visitor.page
        page.set_default_timeout(300_000)
        session = visitor.context.new_cdp_session(page)
        session.send("Performance.enable")

        def ms_until(text: str) -> float:
            began = time.perf_counter()
            script = "(text) => document.querySelector('.logs').innerText.includes(text)"
            page.wait_for_function(script, arg=text, polling=20)
            return (time.perf_counter() - began) * 1e3

        def open_page() -> dict[str, Any]:
            visitor.open("/t/large", ".logs")
            ms_until("all is printed")
            return {"ms": page.evaluate("performance.now()"), **page_memory(visitor, session)}

        def search() -> dict[str, Any]:
            page.fill(".logbar input[type=search]", "the NEEDLE")
            page.press(".logbar input[type=search]", "Enter")
            return {"ms": ms_until("the needle in the middle"), **page_memory(visitor, session)}

        def search_many() -> dict[str, Any]:
            page.fill(".logbar input[type=search]", "grad_norm")
            page.press(".logbar input[type=search]", "Enter")
            began = time.perf_counter()
            page.wait_for_function(
                "() => /^1 of/.test(document.querySelector('.logbar [role=status]').innerText)"
            )
            words = page.inner_text(".logbar [role=status]")
            ms = (time.perf_counter() - began) * 1e3
            return {"ms": ms, "words": words, **page_memory(visitor, session)}

        def follow() -> dict[str, Any]:
            page.fill(".logbar input[type=search]", "")
            page.click("text=Follow")
            ms_until("all is printed")
            (Path(lab.atoll.cwd) / "go").touch()
            return {"ms": ms_until("the very end"), **page_memory(visitor, session)}

        steps = (open_page, search, search_many, follow)
        found = {step.__name__: lab.measured(step) for step in steps}
        visitor.close()
        return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=int, default=1024)
    megabytes = parser.parse_args().mb
    with tempfile.TemporaryDirectory() as where:
        lab = Lab(Path(where), megabytes)
        files = [str(path) for path in sorted(lab.folder.glob("*.log"))]
        results = {
            "load": os.getloadavg(),
            "mb": megabytes,
            "print_s": lab.print_s,
            "server_mb_at_first": lab.before_mb,
            "cat_s": peer(["cat", *files]),
            "grep_s": peer(["grep", "-ci", "the needle", *files]),
            "tail": lab.measured(lambda: lab.command("--tail", "10")),
            "search": lab.measured(lambda: lab.command("--grep", "the NEEDLE", "-i")),
            "whole": lab.measured(lambda: lab.command()),
            "dashboard": dashboard(lab),
        }
        (lab.atoll.cwd / "leave").touch()
        lab.atoll.stop()
    print(json.dumps(results, indent=2))
    if megabytes >= 1024:
        RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
