"""Measures the link between two hosts over one TCP connection. Bandwidths are in Gbit/s.

The sweep sends messages of each size there and back: it shows what a collective of that size can
reach, and the latency of 1 MiB. Then one stream runs each way, cut into windows. `busbw` is that of
the slower direction, because an all-reduce moves the same bytes both ways and waits for the slower.

`python -m atoll.bench.netbench serve|measure|loopback` measures by hand. `pair` is what the two
pods of a bench Job run: index 0 listens, index 1 measures and reports.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

from atoll.core.errors import BackendError, Temporary
from atoll.core.mesh import split_endpoint
from atoll.core.model import encode
from atoll.core.status import BenchResult
from atoll.files.writing import write_file

SIZES = tuple(4096 * 4**power for power in range(8))  # 4 KiB to 64 MiB
MIB = 1 << 20
SWEEP_S = 0.2  # for each size: 8 sizes and two streams stay below 5 s on a fast link
NEXT_S = 1.0  # a size whose round trip would take longer is not tried
STREAM_S = 1.5  # for each direction: some 50 windows, enough for a 10th percentile
WINDOW_S = 0.03  # long against the scheduler's tick, short against STREAM_S
WARM_SHARE = 0.25  # left out at the start of a stream, while TCP opens its window
MIN_CHUNK, MAX_CHUNK = 1 << 12, 1 << 17  # one page; 128 KiB stay in the cache of a core
CHUNK_S = 0.01  # a third of a window, so that windows are exact
LIMIT_S = 60.0  # for all of it; sizes that a slow link cannot carry are skipped
MAX_LIMIT_S = 86_400.0  # a day; longer is a mistake in the argument
PAIR_WAIT_S = 7 * 86_400.0  # for the listener of a pair: the other pod may wait days for its node
RETRY_S = 0.2  # until the other pod of a pair has a name and listens
TERMINATION_LOG = "/dev/termination-log"  # where the kubelet takes a container's message from

_HEAD = struct.Struct("!cQI")
PING, STREAM, SEND, QUIT = b"P", b"S", b"R", b"Q"
_GREETING = b"atoll-netbench "


class Measurement(NamedTuple):
    """`sweep`: one-way seconds by size. `away`, `towards`: Gbit/s of windows, from and to us."""

    sweep: dict[int, list[float]]
    away: list[float]
    towards: list[float]


class Link:
    """One connection, all of whose operations share a deadline."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._socket = connection
        self._deadline = deadline
        self._buffer = memoryview(bytearray(max(*SIZES, MAX_CHUNK)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, data: bytes | bytearray | memoryview) -> None:
        self._limit()
        self._socket.sendall(data)

    def receive(self, size: int) -> memoryview:
        """Exactly that many bytes, valid until the next call."""
        got, view = 0, self._buffer[:size]
        while got < size:
            self._limit()
            more = self._socket.recv_into(view[got:])
            if not more:
                raise ConnectionError("the other side closed the connection")
            got += more
        return view

    def order(self, what: bytes, size: int = 0, count: int = 0) -> None:
        self.send(_HEAD.pack(what, size, count))

    def ping(self, size: int, count: int) -> list[float]:
        """One-way seconds of each message: half of there and back, so that one clock is enough."""
        self.order(PING, size, count)
        payload, times = self._buffer[:size], []
        for _ in range(count):
            began = time.perf_counter()
            self.send(payload)
            self.receive(size)
            times.append((time.perf_counter() - began) / 2)
        return times

    def echo(self, size: int, count: int) -> None:
        for _ in range(count):
            self.send(self.receive(size))

    def pour(self, chunk: int, seconds: float) -> None:
        """Send chunks for `seconds`; the first byte of the last one marks it as the last."""
        payload = bytearray(chunk)
        end = time.perf_counter() + seconds
        while not payload[0]:
            payload[0] = time.perf_counter() >= end
            self.send(payload)

    def catch(self, chunk: int) -> list[float]:
        """Receive a stream; returns the Gbit/s of each window."""
        windows: list[float] = []
        began, window_bytes, is_last = time.perf_counter(), 0, False
        while not is_last:
            is_last = bool(self.receive(chunk)[0])
            window_bytes += chunk
            now = time.perf_counter()
            if now - began >= WINDOW_S:
                windows.append(window_bytes * 8e-9 / (now - began))
                began, window_bytes = now, 0
        return windows

    def _limit(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for the measurement is over")
        self._socket.settimeout(left)


def serve(listener: socket.socket, token: str, limit_s: float = LIMIT_S) -> None:
    """Answer one measurement by a client that knows the token. Raises Temporary if none comes."""
    deadline = time.monotonic() + limit_s
    greeting = _GREETING + token.encode() + b"\n"
    with _translated("no peer connected"):
        while True:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            connection, _ = listener.accept()
            with connection, contextlib.suppress(ConnectionError):
                link = Link(connection, min(deadline, time.monotonic() + 5))
                if secrets.compare_digest(bytes(link.receive(len(greeting))), greeting):
                    link = Link(connection, deadline)
                    link.send(greeting)
                    return _answer(link)


def _answer(link: Link) -> None:
    while True:
        what, size, count = _HEAD.unpack(link.receive(_HEAD.size))
        if size > max(*SIZES, MAX_CHUNK):
            raise ConnectionError(f"a message of {size} bytes was announced")
        match what:
            case b"P":
                link.echo(size, count)
            case b"S":
                windows = link.catch(size)
                link.send(struct.pack(f"!I{len(windows)}d", len(windows), *windows))
            case b"R":
                link.pour(size, count / 1000)
            case _:
                return


def measure(address: str, port: int, token: str, limit_s: float = LIMIT_S) -> Measurement:
    """Measure both parts against a `serve`. Raises Temporary if the link or the time fails it."""
    deadline = time.monotonic() + limit_s
    with _translated(f"{address} port {port}"):
        with socket.create_connection((address, port), timeout=min(limit_s, 10)) as connection:
            link = Link(connection, deadline)
            greeting = _GREETING + token.encode() + b"\n"
            link.send(greeting)
            link.receive(len(greeting))
            sweep = _sweep(link)
            away, towards = _streams(link, _chunk(sweep))
            link.order(QUIT)
    return Measurement(sweep, _warm(away), _warm(towards))


def _sweep(link: Link) -> dict[int, list[float]]:
    """Seconds of every size that fits into the time: a slow link skips the large ones."""
    sweep: dict[int, list[float]] = {}
    for size in SIZES:
        first = link.ping(size, 1)[0]
        count = int(min(max(SWEEP_S / (2 * first), 1), 200))
        sweep[size] = link.ping(size, count)
        if min(sweep[size]) * 2 * 4 > NEXT_S:  # the next size takes four times as long
            break
    return sweep


def _chunk(sweep: dict[int, list[float]]) -> int:
    """Bytes that the link carries in about 10 ms: windows are fine enough and calls few."""
    rate = max(size / median(times) for size, times in sweep.items())
    return int(min(max(rate * CHUNK_S, MIN_CHUNK), MAX_CHUNK))


def _streams(link: Link, chunk: int) -> tuple[list[float], list[float]]:
    link.order(STREAM, chunk)
    link.pour(chunk, STREAM_S)
    (count,) = struct.unpack("!I", link.receive(4))
    away = struct.unpack(f"!{count}d", link.receive(8 * count))
    link.order(SEND, chunk, int(STREAM_S * 1000))
    return list(away), link.catch(chunk)


def _warm(windows: list[float]) -> list[float]:
    return windows[int(len(windows) * WARM_SHARE) :]


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def percentile(values: Sequence[float], share: float) -> float:
    """Interpolates linearly between the two nearest values, as numpy does by default."""
    ordered = sorted(values)
    at = (len(ordered) - 1) * share / 100
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise Temporary(f"{what}: not measured in time") from error
    except OSError as error:
        raise Temporary(f"{what}: {error}") from error


def listen(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def in_background(work: Callable[[], None]) -> Callable[[], None]:
    """Start `work` in a child process and return the function that joins it.

    In one process, both ends of the link would share the interpreter lock.
    """
    import multiprocessing

    process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
    process.start()

    def join() -> None:
        process.join(5)
        process.kill()

    return join


def summarise(
    measured: Measurement, host_a: str, host_b: str, at: float, *, is_worker_pair: bool = True
) -> BenchResult:
    """The result to publish. Pure."""
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


def loopback(host: str, limit_s: float = LIMIT_S) -> BenchResult:
    """Measures this host with itself: the link between ranks that share it."""
    token = secrets.token_hex(16)
    with listen("127.0.0.1") as listener:
        join = in_background(lambda: serve(listener, token, limit_s))
        try:
            measured = measure("127.0.0.1", listener.getsockname()[1], token, limit_s)
        finally:
            join()
    return summarise(measured, host, host, time.time())


def listen_once(port: int, token: str, timeout_s: float = PAIR_WAIT_S) -> None:
    """Listens until one measurement has succeeded; one that broke off may be repeated."""
    deadline = time.monotonic() + timeout_s
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    is_both = family == socket.AF_INET6
    with socket.create_server(("", port), family=family, dualstack_ipv6=is_both) as listener:
        while True:
            try:
                return serve(listener, token, max(deadline - time.monotonic(), 0.0))
            except Temporary:
                if time.monotonic() >= deadline:
                    raise


def measure_when_up(
    peer: str, port: int, token: str, host: str, limit_s: float = LIMIT_S
) -> BenchResult:
    """Measures as soon as the peer has a name and answers. Raises Temporary after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            measured = measure(peer, port, token, max(deadline - time.monotonic(), 0.0))
            return summarise(measured, host, peer, time.time())
        except Temporary:
            if time.monotonic() + RETRY_S >= deadline:
                raise
            time.sleep(RETRY_S)


def _seconds(text: str) -> float:
    if not 0 < float(text) <= MAX_LIMIT_S:
        raise click.BadParameter(f"{text!r}: expected seconds, more than 0")
    return float(text)


limit_option = click.option(
    "--limit",
    type=_seconds,
    default=LIMIT_S,
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
    with _exit_on_error(), listen(address) as listener:
        token = secrets.token_hex(16)
        endpoint = {"port": listener.getsockname()[1], "token": token}
        sys.stdout.write(encode(endpoint).decode() + "\n")
        sys.stdout.flush()
        serve(listener, token, limit)


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
    endpoint = split_endpoint(peer)
    if endpoint is None:
        raise click.BadParameter(f"{peer!r}: expected host:port")
    with _exit_on_error():
        measured = measure(*endpoint, token, limit)
        _write_result(summarise(measured, host, peer_host or endpoint[0], time.time()), output)


@main.command("loopback")
@limit_option
@host_option
@output_option
def measure_loopback(limit: float, host: str, output: Path | None) -> None:
    """Measure the loopback of this host."""
    with _exit_on_error():
        _write_result(loopback(host, limit), output)


@main.command("pair")
@click.argument("peer")
@limit_option
@host_option
@click.option("--report", default=TERMINATION_LOG, help="File to write the result to as well.")
def measure_pair(peer: str, limit: float, host: str, report: str) -> None:
    """Measure the link to PEER, the pod of the two that listens, given as host:port.

    JOB_COMPLETION_INDEX says which of the two this is, ATOLL_BENCH_TOKEN has the token of both.
    """
    endpoint = split_endpoint(peer)
    index = os.environ.get("JOB_COMPLETION_INDEX", "")
    token = os.environ.get("ATOLL_BENCH_TOKEN", "")
    if endpoint is None or index not in ("0", "1") or not token:
        raise click.UsageError(
            "expected host:port, JOB_COMPLETION_INDEX of 0 or 1 and ATOLL_BENCH_TOKEN"
        )
    try:
        if index == "0":
            return listen_once(endpoint[1], token)
        text = encode(measure_when_up(*endpoint, token, host, limit)).decode()
    except (Temporary, OSError) as error:
        _write_report(report, f"netbench: {error}")
        raise SystemExit(f"netbench: {error}") from error
    sys.stdout.write(text + "\n")
    _write_report(report, text)


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
    else:  # a reader sees the complete file or none
        write_file(output, text.encode(), mode=0o644, is_durable=False)


def _write_report(path: str, text: str) -> None:
    """The result is on stdout too, so a pod without a termination log loses nothing."""
    with contextlib.suppress(OSError), open(path, "w") as report:
        report.write(text)


if __name__ == "__main__":
    main(prog_name="python -m atoll.bench.netbench")
