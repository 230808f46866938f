"""The command line of the link bench, and a measurement put into the fields of a BenchResult."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import sys
import time
from pathlib import Path

from atoll.bench import netbench
from atoll.bench.netbench import MIB, Measurement, measure, median, percentile
from atoll.core.errors import BackendError
from atoll.core.mesh import split_endpoint
from atoll.core.model import encode
from atoll.core.status import BenchResult

LONGEST_S = 86_400.0


def summarise(
    found: Measurement, host_a: str, host_b: str, at: float, *, is_worker_pair: bool = True
) -> BenchResult:
    """Pure: raw times and windows in, the published fields out."""
    slower = min((w for w in (found.away, found.towards) if w), key=median, default=[])
    rates = {
        size: [size * 8e-9 / seconds for seconds in times] for size, times in found.sweep.items()
    }
    return BenchResult(
        measured_at=at,
        probe_node_a=host_a,
        probe_node_b=host_b,
        size_bytes_swept=sorted(rates),
        busbw_gbps_p10=percentile(slower, 10) if slower else None,
        busbw_gbps_p50=percentile(slower, 50) if slower else None,
        busbw_gbps_p90=percentile(slower, 90) if slower else None,
        algbw_gbps_p50=median(rates[max(rates)]) if rates else None,
        latency_us_at_1mib=median(found.sweep[MIB]) * 1e6 if MIB in found.sweep else None,
        is_worker_pair=is_worker_pair,
        points=[(size, median(values)) for size, values in sorted(rates.items())],
    )


def loopback(host: str, limit_s: float = netbench.LIMIT_S) -> BenchResult:
    """This host with itself: what ranks that share it can expect of each other."""
    token = secrets.token_hex(16)
    with netbench.listen("127.0.0.1") as listener:
        join = netbench.in_background(lambda: netbench.serve(listener, token, limit_s))
        try:
            found = measure("127.0.0.1", listener.getsockname()[1], token, limit_s)
        finally:
            join()
    return summarise(found, host, host, time.time())


def main() -> None:
    given = _arguments()
    try:
        if given.what == "serve":
            with netbench.listen(given.address) as listener:
                token = secrets.token_hex(16)
                place = {"port": listener.getsockname()[1], "token": token}
                sys.stdout.write(encode(place).decode() + "\n")
                sys.stdout.flush()
                netbench.serve(listener, token, given.limit)
            return
        if given.what == "loopback":
            result = loopback(given.host, given.limit)
        else:
            address, port = given.peer
            found = measure(address, port, given.token, given.limit)
            result = summarise(found, given.host, given.peer_host or address, time.time())
        _give(encode(result).decode() + "\n", given.output)
    except (BackendError, OSError) as error:
        raise SystemExit(f"netbench: {error}") from error


def _give(text: str, output: Path | None) -> None:
    if output is None:
        sys.stdout.write(text)
    else:  # whole or not at all, for whoever reads it
        draft = output.with_name(output.name + ".new")
        draft.write_text(text)
        draft.replace(output)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m atoll.bench.netbench")
    kinds = parser.add_subparsers(dest="what", required=True)
    for kind in ("serve", "measure", "loopback"):
        command = kinds.add_parser(kind)
        command.add_argument("--limit", type=_seconds, default=netbench.LIMIT_S, help="seconds")
        if kind == "serve":
            command.add_argument("--address", required=True)
            continue
        command.add_argument("--host", default=os.environ.get("NODE_NAME") or socket.gethostname())
        command.add_argument("--output", type=Path)
        if kind == "measure":
            command.add_argument("peer", type=_endpoint)
            command.add_argument("--token", required=True)
            command.add_argument("--peer-host", default="")
    return parser.parse_args()


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, more than 0")
    return seconds


def _endpoint(text: str) -> tuple[str, int]:
    found = split_endpoint(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: expected host:port")
    return found
