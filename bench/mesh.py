"""How long the mesh gate costs: from the last host reachable to `mesh-ready`, and `mesh_wait`.

Needs root and iproute2. `python bench/mesh.py`; writes bench/results/mesh.json.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench.netbench import save  # noqa: E402
from bench.netns import Network  # noqa: E402

ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
HOSTS, ROUNDS, WAITS = 16, int(os.environ.get("ROUNDS", "20")), 200

# On the hub: etcd, the controller's side, and the time at which each verdict was written.
WATCH = """
import asyncio, sys, time
from pathlib import Path
from atoll.mesh.watch import MeshWatch
from atoll.mesh.etcd import EtcdKeys
from atoll.backends.local.etcd_server import start_etcd

async def main(address, directory, hosts):
    server = start_etcd(Path(directory), address)
    print(server.endpoint, flush=True)
    async with EtcdKeys(server.endpoint) as keys:
        say = lambda verdict: print(verdict.state, time.monotonic(), flush=True)
        await MeshWatch(keys, say, deadline_s=600).run(hosts)

asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
"""


def mesh_ready(rounds: int) -> dict[str, list[float]]:
    """Seconds from the last host's coming, and from a healed link, to the key's being written."""
    joined, healed = [], []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        net = stack.enter_context(Network(HOSTS))
        run = (sys.executable, "-c", WATCH, net.hub_address, f"{folder}/etcd", *net.hosts)
        watch = net.popen("hub", *run, stdout=subprocess.PIPE, env=ENV)
        stack.callback(finish, watch)
        assert watch.stdout is not None
        endpoint = watch.stdout.readline().strip()

        def agent(host: str) -> subprocess.Popen[str]:
            run = (sys.executable, "-c", AGENT, host, net.address(host), endpoint)
            process = net.popen(host, *run, stdout=subprocess.PIPE, env=ENV)
            stack.callback(finish, process)
            return process

        def verdict(state: str) -> float:
            while True:
                word, at = watch.stdout.readline().split()  # type: ignore[union-attr]
                if word == state:
                    return float(at)

        for host in net.hosts[:-1]:
            listens(agent(host))
        last = net.hosts[-1]
        for _ in range(rounds):
            process = agent(last)
            came = listens(process)
            joined.append(verdict("Ready") - came)
            finish(process)
            verdict("Degraded")
        listens(agent(last))
        verdict("Ready")
        for _ in range(rounds):
            net.cut_pair(net.hosts[0], net.hosts[1])
            verdict("Degraded")
            net.heal_pair(net.hosts[0], net.hosts[1])
            at = time.monotonic()
            healed.append(verdict("Ready") - at)
    return {"last host listens": joined, "link healed": healed}


AGENT = """
import asyncio, sys, time
from atoll.mesh import fabric
start = asyncio.start_server
async def told(*args, **more):
    server = await start(*args, **more)
    print(time.monotonic(), flush=True)
    return server
asyncio.start_server = told
asyncio.run(fabric.run(*sys.argv[1:]))
"""


def listens(process: subprocess.Popen[str]) -> float:
    assert process.stdout is not None
    return float(process.stdout.readline())


def finish(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def mesh_waits(count: int) -> dict[str, list[float]]:
    """Seconds of `mesh_wait()` with the key there, beside one urllib request for the same key."""
    from atoll.backends.local.etcd_server import start_etcd, stop_etcd
    from atoll.core.mesh import ready_path

    found: dict[str, list[float]] = {"mesh_wait, key there": [], "urllib, the same key": []}
    with tempfile.TemporaryDirectory() as folder:
        server = start_etcd(Path(folder) / "etcd")
        url = f"http://{server.endpoint}{ready_path('host')}"
        put = urllib.request.Request(url, data=b"value=1", method="PUT")
        urllib.request.urlopen(put).close()
        os.environ |= {"NODE_NAME": "host", "BASILICA_RDZV_ENDPOINT": server.endpoint}
        import atoll

        with open(os.devnull, "w") as silent, contextlib.redirect_stderr(silent):
            for _ in range(count):
                began = time.perf_counter()
                atoll.mesh_wait()
                middle = time.perf_counter()
                urllib.request.urlopen(url).read()
                found["mesh_wait, key there"].append(middle - began)
                found["urllib, the same key"].append(time.perf_counter() - middle)
        stop_etcd(server)
    return found


def imports(count: int = 20) -> dict[str, list[float]]:
    """Whole processes: what `from atoll import mesh_wait` adds to a bare Python."""
    found: dict[str, list[float]] = {}
    for _ in range(count):
        for name, code in (("bare python", "pass"), ("+ mesh_wait", "from atoll import mesh_wait")):
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], env=ENV, check=True)
            found.setdefault(name, []).append(time.perf_counter() - began)
    return found


def main() -> None:
    parts = {**mesh_ready(ROUNDS), **mesh_waits(WAITS), **imports()}
    print(f"{'':<24}{'n':>5}{'median ms':>12}{'p90':>10}{'p99':>10}")
    table = {}
    for name, seconds in parts.items():
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        median, p90, p99 = (1000 * cuts[at] for at in (49, 89, 98))
        print(f"{name:<24}{len(seconds):>5}{median:>12.1f}{p90:>10.1f}{p99:>10.1f}")
        table[name] = {"n": len(seconds), "median": median, "p90": p90, "p99": p99}
    save("mesh", {"unit": "ms", "hosts": HOSTS, "times": table})


if __name__ == "__main__":
    main()
