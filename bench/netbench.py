"""The link bench beside iperf3 and a bare socket, on shaped and unshaped links, in one run.

Needs root, iproute2 and iperf3. `python bench/netbench.py`; writes bench/results/netbench.json.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from bench.netns import Network  # noqa: E402

ENV = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "env": ENV}
LINKS = {
    "100 Mbit/s": ("tbf", "rate", "100mbit", "burst", "64k", "latency", "50ms"),
    "1 Gbit/s": ("tbf", "rate", "1gbit", "burst", "256k", "latency", "50ms"),
    "unshaped veth": (),
}
ROUNDS = 3
RAW = """
import socket, sys, time
if sys.argv[1] == "in":
    listener = socket.create_server((sys.argv[2], 0))
    print(listener.getsockname()[1], flush=True)
    link, _ = listener.accept()
    buffer, got, began, seconds = bytearray(1 << 17), 0, 0.0, float(sys.argv[3])
    start = time.perf_counter()
    while (more := link.recv_into(buffer)):
        now = time.perf_counter()
        if now - start >= seconds / 4:
            began = began or now
            got += more
    print(got * 8e-9 / (now - began))
else:
    link = socket.create_connection((sys.argv[2], int(sys.argv[3])))
    end, data = time.perf_counter() + float(sys.argv[4]), bytes(1 << 17)
    while time.perf_counter() < end:
        link.sendall(data)
"""


def iperf3(net: Network) -> float:
    with net.popen("host-1", "iperf3", "-s", "-1", "--forceflush", **PIPES) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        address = net.address("host-1")
        client = net.popen("host-2", "iperf3", "-c", address, "-t", "2", "-O", "1", "-J", **PIPES)
        out = client.communicate()[0]
        server.communicate()
    return float(json.loads(out)["end"]["sum_received"]["bits_per_second"]) / 1e9


def raw(net: Network) -> float:
    address, run = net.address("host-1"), (sys.executable, "-c", RAW)
    with net.popen("host-1", *run, "in", address, "2", **PIPES) as server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        net.popen("host-2", *run, "out", address, port, "2").communicate()
        return float(server.stdout.readline())


def ours(net: Network) -> dict[str, Any]:
    run, address = (sys.executable, "-m", "atoll.bench.netbench"), net.address("host-1")
    with net.popen("host-1", *run, "serve", "--address", address, **PIPES) as server:
        assert server.stdout is not None
        place = json.loads(server.stdout.readline())
        peer = (f"{address}:{place['port']}", "--token", place["token"])
        client = net.popen("host-2", *run, "measure", *peer, "--host", "host-2", **PIPES)
        result: dict[str, Any] = json.loads(client.communicate()[0])
    return result


def main() -> None:
    rows = []
    print(f"{'link':<16}{'ours p50':>10}{'iperf3':>10}{'socket':>10}  ours/iperf3  ours/socket")
    for link, shape in LINKS.items():
        with Network(2) as net:
            for host in net.hosts if shape else ():
                net.shape(host, *shape)
            # In turn, so that a change of load on the machine meets all three.
            rounds = [(ours(net)["busbwGbpsP50"], iperf3(net), raw(net)) for _ in range(ROUNDS)]
        us, them, bare = (statistics.median(column) for column in zip(*rounds, strict=True))
        by_round = statistics.median(a / b for a, b, _ in rounds)
        by_socket = statistics.median(a / c for a, _, c in rounds)
        print(f"{link:<16}{us:>10.3f}{them:>10.3f}{bare:>10.3f}{by_round:>13.3f}{by_socket:>13.3f}")
        row = {"link": link, "ours": us, "iperf3": them, "socket": bare}
        rows.append({**row, "ours_over_iperf3": by_round, "ours_over_socket": by_socket})
    save("netbench", {"unit": "Gbit/s", "rounds": ROUNDS, "links": rows})


def save(name: str, found: dict[str, Any]) -> None:
    folder = ROOT / "bench" / "results"
    folder.mkdir(exist_ok=True)
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg()[0]}
    text = json.dumps({"machine": machine, "python": platform.python_version(), **found}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
