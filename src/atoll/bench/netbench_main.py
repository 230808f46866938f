"""The command line of the link bench, and a measurement as a BenchResult."""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click

from atoll.bench import netbench
from atoll.bench.netbench import MIB, Measurement, measure, median, percentile
from atoll.core.errors import BackendError
from atoll.core.mesh import split_endpoint
from atoll.core.model import encode
from atoll.core.status import BenchResult

LONGEST_S = 86_400.0


def summarise(
    measured: Measurement, host_a: str, host_b: str, at: float, *, is_worker_pair: bool = True
) -> BenchResult:
    """The published figures of a measurement. Pure."""
    slower = min((w for w in (measured.away, measured.towards) if w), key=median, default=[])
    rates = {
        size: [size * 8e-9 / seconds for seconds in times] for size, times in measured.sweep.items()
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
        latency_us_at_1mib=median(measured.sweep[MIB]) * 1e6 if MIB in measured.sweep else None,
        is_worker_pair=is_worker_pair,
        points=[(size, median(values)) for size, values in sorted(rates.items())],
    )


def loopback(host: str, limit_s: float = netbench.LIMIT_S) -> BenchResult:
    """Measures this host with itself: the link between ranks that share it."""
    token = secrets.token_hex(16)
    with netbench.listen("127.0.0.1") as listener:
        join = netbench.in_background(lambda: netbench.serve(listener, token, limit_s))
        try:
            measured = measure("127.0.0.1", listener.getsockname()[1], token, limit_s)
        finally:
            join()
    return summarise(measured, host, host, time.time())


def _seconds(text: str) -> float:
    if not 0 < float(text) <= LONGEST_S:
        raise click.BadParameter(f"{text!r}: expected seconds, more than 0")
    return float(text)


limit_option = click.option(
    "--limit",
    type=_seconds,
    default=netbench.LIMIT_S,
    help="Seconds that the measurement may take.",
    show_default=True,
)
host_option = click.option(
    "--host",
    envvar="NODE_NAME",
    default=socket.gethostname,
    help="Name of this host in the result.",
    show_default="the host name",
)
output_option = click.option(
    "--output", type=Path, help="File to write the result to.", show_default="stdout"
)


@click.group()
def main() -> None:
    """Measure the link between two hosts."""


@main.command("serve")
@click.option("--address", required=True, help="Address to listen on.")
@limit_option
def serve_once(address: str, limit: float) -> None:
    """Answer one measurement. Prints the port and the token that the other host needs."""
    with _exit_on_error(), netbench.listen(address) as listener:
        token = secrets.token_hex(16)
        place = {"port": listener.getsockname()[1], "token": token}
        sys.stdout.write(encode(place).decode() + "\n")
        sys.stdout.flush()
        netbench.serve(listener, token, limit)


@main.command("measure")
@click.argument("peer")
@click.option("--token", required=True, help="Token that the other host printed.")
@click.option("--peer-host", default="", help="Name of the other host.")
@limit_option
@host_option
@output_option
def measure_peer(
    peer: str, token: str, peer_host: str, limit: float, host: str, output: Path | None
) -> None:
    """Measure the link to PEER, given as host:port."""
    place = split_endpoint(peer)
    if place is None:
        raise click.BadParameter(f"{peer!r}: expected host:port")
    with _exit_on_error():
        measured = measure(*place, token, limit)
        _write_result(summarise(measured, host, peer_host or place[0], time.time()), output)


@main.command("loopback")
@limit_option
@host_option
@output_option
def measure_here(limit: float, host: str, output: Path | None) -> None:
    """Measure the loopback of this host."""
    with _exit_on_error():
        _write_result(loopback(host, limit), output)


@contextlib.contextmanager
def _exit_on_error() -> Iterator[None]:
    try:
        yield
    except (BackendError, OSError) as error:
        raise SystemExit(f"netbench: {error}") from error


def _write_result(result: BenchResult, output: Path | None) -> None:
    text = encode(result).decode() + "\n"
    if output is None:
        sys.stdout.write(text)
    else:  # a reader sees the whole file or none
        draft = output.with_name(output.name + ".new")
        draft.write_text(text)
        draft.replace(output)
