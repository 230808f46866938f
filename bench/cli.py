"""What a user waits for at the prompt: help, imports, and a launch of no-op ranks beside torchrun.

Runs are interleaved, so that a busy machine disturbs all rows alike; compare the ratios. atoll is
byte-compiled first, as pip leaves what it installs: torch is, and a checkout may not be.
"""

from __future__ import annotations

import compileall
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import atoll

ROUNDS = 9
PY = sys.executable
ATOLL = [PY, "-m", "atoll.cli"]
RESULTS = Path(__file__).parent / "results" / "cli.json"
NO_OP = "pass\n"


def timed(*command: str, **env: str) -> float:
    began = time.perf_counter()
    subprocess.run(
        command,
        env=os.environ | env,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - began


def stop_server(state: Path) -> None:
    pid = json.loads((state / "endpoint.json").read_bytes())["pid"]
    os.kill(pid, signal.SIGTERM)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)


def cold(place: Path) -> float:
    """`atoll run` that has to start the control plane first, in a new state directory."""
    state = Path(tempfile.mkdtemp(dir=place))
    took = timed(*ATOLL, "run", "-n", "4", "--", "true", ATOLL_STATE_DIR=str(state))
    stop_server(state)
    return took


def main() -> None:
    compileall.compile_dir(Path(atoll.__file__).parent, quiet=1)
    place = Path(tempfile.mkdtemp(prefix="atoll-bench-"))
    warm = {"ATOLL_STATE_DIR": str(place / "warm")}
    script = place / "noop.py"
    script.write_text(NO_OP)
    torchrun = [PY, "-m", "torch.distributed.run", "--nproc-per-node", "4"]
    rows: dict[str, Callable[[], float]] = {
        "python -c pass": lambda: timed(PY, "-c", "pass"),
        "import atoll": lambda: timed(PY, "-c", "import atoll"),
        "from atoll import mesh_wait": lambda: timed(PY, "-c", "from atoll import mesh_wait"),
        "atoll --help": lambda: timed(*ATOLL, "--help"),
        "atoll run -n 4 -- true, server up": lambda: timed(
            *ATOLL, "run", "-n", "4", "--", "true", **warm
        ),
        "atoll run -n 4 -- true, server started by it": lambda: cold(place),
        "atoll run -n 4 -- python noop.py, server up": lambda: timed(
            *ATOLL, "run", "-n", "4", "--", PY, str(script), **warm
        ),
        "torchrun --nproc-per-node 4 --no-python true": lambda: timed(
            *torchrun, "--no-python", "true"
        ),
        "torchrun --nproc-per-node 4 noop.py": lambda: timed(*torchrun, str(script)),
    }
    if find_spec("atoll.mesh.gate") is None:
        del rows["from atoll import mesh_wait"]
    timed(*ATOLL, "ps", **warm)  # the server is up from here on
    times: dict[str, list[float]] = {name: [] for name in rows}
    load = os.getloadavg()
    try:
        for _ in range(ROUNDS):
            for name, measure in rows.items():
                times[name].append(measure())
    finally:
        stop_server(place / "warm")
        shutil.rmtree(place)
    report(times, load)


def report(times: dict[str, list[float]], load: tuple[float, float, float]) -> None:
    medians = {name: statistics.median(values) for name, values in times.items()}
    bare = medians["python -c pass"]
    torchrun = medians["torchrun --nproc-per-node 4 --no-python true"]
    print(f"medians of {ROUNDS}; load {load[0]:.1f}; {os.cpu_count()} cores")
    print(f"{'what':<48}{'seconds':>9}{'over bare python':>18}{'torchrun is':>13}")
    for name, median in medians.items():
        ratio = f"{torchrun / median:.1f}x" if "run" in name else ""
        print(f"{name:<48}{median:>9.3f}{median - bare:>+17.3f}s{ratio:>13}")
    run_s = {
        name: medians[f"atoll run -n 4 -- true, {name}"]
        for name in ("server up", "server started by it")
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps(
            {
                "machine": {
                    "cpus": os.cpu_count(),
                    "python": platform.python_version(),
                    "system": platform.platform(),
                    "load_average": load,
                },
                "rounds": ROUNDS,
                "median_s": medians,
                "all_s": times,
                "torchrun_over": {
                    name: torchrun / median for name, median in medians.items() if "run" in name
                },
                "run_s": run_s,
                "torchrun_over_run": {name: torchrun / median for name, median in run_s.items()},
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
