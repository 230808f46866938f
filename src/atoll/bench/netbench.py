"""Measures the link between two hosts over one TCP connection. Bandwidths are in Gbit/s.

The first part is a sweep: messages of each size go there and back, which shows what a collective of
that size can reach, and the time of 1 MiB. The second is a stream each way, cut into windows:
`busbw` is that of the slower direction, as an all-reduce moves the same bytes both ways and waits
for the slower. `python -m atoll.bench.netbench serve`, `measure` and `loopback` are in
`netbench_main`.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from atoll.core.errors import Temporary

SIZES = tuple(4096 * 4**power for power in range(8))  # 4 KiB to 64 MiB
MIB = 1 << 20
SWEEP_S = 0.2  # for each size
NEXT_S = 1.0  # a size whose round trip would take longer than this is not tried
STREAM_S = 1.5  # for each direction
WINDOW_S = 0.03
WARM_SHARE = 0.25  # left out at the start of a stream, while TCP opens its window
LEAST_CHUNK, MOST_CHUNK, CHUNK_S = 1 << 12, 1 << 17, 0.01  # 128 KiB stay in the cache
LIMIT_S = 60.0  # for all of it

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
        self._buffer = memoryview(bytearray(max(*SIZES, MOST_CHUNK)))
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
        if size > max(*SIZES, MOST_CHUNK):
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
    return int(min(max(rate * CHUNK_S, LEAST_CHUNK), MOST_CHUNK))


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


if __name__ == "__main__":
    from atoll.bench.netbench_main import main

    main(prog_name="python -m atoll.bench.netbench")
