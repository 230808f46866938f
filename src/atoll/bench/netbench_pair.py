"""The link bench as two pods of one Job: index 0 listens, index 1 measures and reports.

`python -m atoll.bench.netbench_pair PEER:PORT`, the same for both. The token comes in
`ATOLL_BENCH_TOKEN`; the result goes to stdout and, for the control plane, to the pod's
termination message.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time

import click

from atoll.bench.netbench import LIMIT_S, measure, serve
from atoll.bench.netbench_main import summarise
from atoll.core.errors import Temporary
from atoll.core.mesh import split_endpoint
from atoll.core.model import encode
from atoll.core.status import BenchResult

PATIENCE_S = 7 * 86_400.0  # for the listener: the other pod may wait long for its node
AGAIN_S = 0.2
REPORT = "/dev/termination-log"


def listen_once(port: int, token: str, patience_s: float = PATIENCE_S) -> None:
    """Listens until one measurement has succeeded."""
    deadline = time.monotonic() + patience_s
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    is_both = family == socket.AF_INET6
    with socket.create_server(("", port), family=family, dualstack_ipv6=is_both) as listener:
        while True:
            try:
                return serve(listener, token, max(deadline - time.monotonic(), 0.0))
            except Temporary:  # a measurement that broke off may be repeated
                if time.monotonic() >= deadline:
                    raise


def measure_until(
    peer: str, port: int, token: str, host: str, limit_s: float = LIMIT_S
) -> BenchResult:
    """Measures as soon as the peer has a name and answers. Raises Temporary after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            measured = measure(peer, port, token, max(deadline - time.monotonic(), 0.0))
            return summarise(measured, host, peer, time.time())
        except Temporary:
            if time.monotonic() + AGAIN_S >= deadline:
                raise
            time.sleep(AGAIN_S)


@click.command()
@click.argument("peer")
@click.option("--limit", type=float, default=LIMIT_S, help="Seconds that the measurement may take.")
@click.option("--report", default=REPORT, help="File to write the result to as well.")
def main(peer: str, limit: float, report: str) -> None:
    """Measure the link to PEER, the host of the two that listens, given as host:port."""
    place = split_endpoint(peer)
    index = os.environ.get("JOB_COMPLETION_INDEX", "")
    token = os.environ.get("ATOLL_BENCH_TOKEN", "")
    if place is None or index not in ("0", "1") or not token:
        raise click.UsageError(
            "expected host:port, JOB_COMPLETION_INDEX of 0 or 1 and ATOLL_BENCH_TOKEN"
        )
    try:
        if index == "0":
            return listen_once(place[1], token)
        host = os.environ.get("NODE_NAME") or socket.gethostname()
        text = encode(measure_until(*place, token, host, limit)).decode()
    except (Temporary, OSError) as error:
        _report(report, f"netbench: {error}")
        raise SystemExit(f"netbench: {error}") from error
    sys.stdout.write(text + "\n")
    _report(report, text)


def _report(path: str, text: str) -> None:
    with contextlib.suppress(OSError), open(path, "w") as report:
        report.write(text)


if __name__ == "__main__":
    main(prog_name="python -m atoll.bench.netbench_pair")
