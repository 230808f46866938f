"""HTTP for the drivers: performs effects, and streams logs, once blocking and once with asyncio.

A lost connection becomes Temporary here; the flows decide what to do about it. A followed log goes
on where it broke, without losing or repeating a line.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from math import inf
from socket import SHUT_RDWR
from typing import TYPE_CHECKING, Any

import msgspec

from atoll.core.checks import TEXT
from atoll.core.errors import Permanent, Temporary, ValidationError
from atoll.core.model import decode
from atoll.core.ports import Change
from atoll.core.problem import Problem
from atoll.core.spec import Code
from atoll.core.status import LogLine, Training
from atoll.core.text import alines_of, lines_of
from atoll.sdk.effects import Effect, NextChange, Pack, Pause, Reply, Send, check_reply
from atoll.sdk.endpoint import Address, Endpoint
from atoll.sdk.flows import TrainingRef
from atoll.sdk.local_http import LocalAnswer, LocalClient, Unreachable

if TYPE_CHECKING:
    import ssl

    import httpx2

    # Clients for blocking requests. httpx2 is imported only for control planes with a URL.
    Blocking = LocalClient | httpx2.Client
    Answer = LocalAnswer | httpx2.Response


class Parser:
    """Parses server-sent events. Raises Temporary when the server ends the stream with an error."""

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, chunk: bytes) -> Iterator[Change]:
        *blocks, self._buffer = (self._buffer + chunk).split(b"\n\n")
        for block in blocks:
            change = _change(block)
            if change is not None:
                yield change


def _change(block: bytes) -> Change | None:
    fields = dict(line.split(b": ", 1) for line in block.split(b"\n") if b": " in line)
    if b"data" not in fields or b"event" not in fields:
        return None
    if fields[b"event"] == b"error":
        raise Temporary(decode(fields[b"data"], Problem).detail)
    return Change(
        version=int(fields[b"id"]),
        training=decode(fields[b"data"], Training),
        is_removed=fields[b"event"] == b"removed",
    )


def packed(effect: Pack) -> Code | None:
    from atoll.code.archive import pack

    return pack(effect.root, effect.path)


CONNECT_S = 5.0  # TCP repeats its first packet after 1 and 3 s
READ_S = 30.0  # three heartbeats of the server
SLOWEST = 200_000.0  # bytes per second of the slowest upload allowed


class Wire:
    """Connections of one Client. Threads and event loops may share it; a fork opens its own."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._current: tuple[int, Address, Blocking] | None = None
        self._old: list[tuple[int, Address, Blocking]] = []
        self._lock = threading.Lock()

    def close(self) -> None:
        with self._lock:
            clients = [*self._old, *([self._current] if self._current else ())]
            self._current, self._old = None, []
        for pid, _, client in clients:
            if pid == os.getpid():
                client.close()

    def client(self) -> Blocking:
        with self._lock:
            address = self.endpoint.address()
            if self._current is None or self._current[:2] != (os.getpid(), address):
                if self._current is not None:
                    self._old.append(self._current)  # another thread may still use it
                self._current = os.getpid(), address, _blocking(address)
            return self._current[2]

    def async_client(self) -> httpx2.AsyncClient:
        """A new client: its connections belong to one event loop, and to one operation."""
        import httpx2

        return httpx2.AsyncClient(**_settings(self.endpoint.address()))


class Performer:
    """Performs the effects of one flow. A watch stays open between two of them."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._changes: Iterator[Change] | None = None
        self._watched = ""  # the path of those changes
        self._exits = contextlib.ExitStack()

    def close(self) -> None:
        self._exits.close()
        self._changes = None

    def __call__(self, effect: Effect) -> Any:
        if isinstance(effect, Pack):
            return packed(effect)
        if isinstance(effect, Pause):
            return time.sleep(effect.seconds)
        with translate_errors(self._wire.endpoint):
            if isinstance(effect, Send):
                return self._send(effect)
        return self._next(effect)

    def _send(self, effect: Send) -> Reply:
        with self._wire.client().stream(**_request(effect)) as response:
            return reply(response, response.read())

    def _next(self, effect: NextChange) -> Change | None:
        if effect.path != self._watched:
            self.close()  # a flow within the flow has watched something else
            self._watched = effect.path
        try:
            with translate_errors(self._wire.endpoint):
                if self._changes is None:
                    self._changes = self._exits.enter_context(self._watch(effect))
                change = next(self._changes, None)
        except Temporary:
            change = None
        if change is None:
            self.close()
        return change

    @contextlib.contextmanager
    def _watch(self, effect: NextChange) -> Iterator[Iterator[Change]]:
        with self._wire.client().stream(**_watch_request(effect)) as response:
            with _cut_off(response, effect.timeout):
                yield _parsed(response) if response.status_code == 200 else iter(())


class AsyncPerformer:
    """The same on an event loop. Only this class imports asyncio, which is slow to load."""

    def __init__(self, wire: Wire) -> None:
        import asyncio

        self._asyncio = asyncio
        self._wire = wire
        self._client: httpx2.AsyncClient | None = None
        self._changes: AsyncIterator[Change] | None = None
        self._watched = ""  # the path of those changes
        self._exits = contextlib.AsyncExitStack()

    async def close(self) -> None:
        await self._exits.aclose()
        self._changes = None
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def __call__(self, effect: Effect) -> Any:
        if isinstance(effect, Pack):
            return await self._asyncio.to_thread(packed, effect)
        if isinstance(effect, Pause):
            return await self._asyncio.sleep(effect.seconds)
        if isinstance(effect, NextChange):
            return await self._next(effect)
        try:
            with translate_errors(self._wire.endpoint):
                client = await self._connected()
                response = await client.request(**_request(effect))
                return reply(response, response.content)
        except Temporary:
            await self.close()  # the next attempt asks where the control plane is
            raise

    async def _connected(self) -> httpx2.AsyncClient:
        if self._client is None:
            # Finding the control plane may start it, which takes a while.
            self._client = await self._asyncio.to_thread(self._wire.async_client)
        return self._client

    async def _next(self, effect: NextChange) -> Change | None:
        if effect.path != self._watched:
            await self.close()  # a flow within the flow has watched something else
            self._watched = effect.path
        limit = None if effect.timeout == inf else effect.timeout
        try:
            with translate_errors(self._wire.endpoint):
                async with self._asyncio.timeout(limit):
                    if self._changes is None:
                        client = await self._connected()
                        stream = client.stream(**_watch_request(effect))
                        response = await self._exits.enter_async_context(stream)
                        self._changes = _aparsed(response)
                    change = await anext(self._changes, None)
        except (Temporary, TimeoutError):
            change = None
        if change is None:
            await self.close()
        return change


def reply(response: Answer, body: bytes) -> Reply:
    return Reply(response.status_code, body)


def _blocking(address: Address) -> Blocking:
    if address.directory is not None:
        return LocalClient(address.directory, _headers(address))
    import httpx2

    return httpx2.Client(**_settings(address))


def _headers(address: Address) -> dict[str, str]:
    token = {"Authorization": f"Bearer {address.token}"} if address.token else {}
    return {"User-Agent": "atoll", **token}


def _settings(address: Address) -> dict[str, Any]:
    import httpx2

    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=20)
    if address.directory is not None:
        from atoll.sdk.local_transport import LocalTransport

        return {
            "base_url": "http://localhost",
            "headers": _headers(address),
            "transport": LocalTransport(address.directory, limits),
            "trust_env": False,  # a proxy would be preferred to the transport
        }
    return {
        "base_url": address.url,
        "headers": _headers(address),
        "limits": limits,
        "trust_env": not address.is_local,
        "verify": trust(address.url),
    }


def _request(effect: Send) -> dict[str, Any]:
    seconds = READ_S if effect.timeout is None else effect.timeout
    if effect.body is not None:
        seconds = READ_S + len(effect.body) / SLOWEST
    request: dict[str, Any] = {
        "method": effect.method,
        "url": effect.path,
        "params": {name: value for name, value in effect.query.items() if value is not None},
        "headers": dict(effect.headers),
        "timeout": _timeout(seconds),
    }
    if effect.body is not None:
        request["content"] = effect.body
        request["headers"]["Content-Type"] = "application/json"
    return request


def _timeout(seconds: float) -> tuple[float, float, float, float | None]:
    """Seconds to connect, read and write; no limit to wait for a free connection."""
    return min(seconds, CONNECT_S), seconds, seconds, None


def _watch_request(effect: NextChange) -> dict[str, Any]:
    params: dict[str, Any] = {"watch": "true", "after": effect.after}
    if effect.timeout != inf:
        params["timeout"] = f"{effect.timeout:.3f}"
    timeout = _timeout(min(READ_S, max(0.001, effect.timeout)))
    return {"method": "GET", "url": effect.path, "params": params, "timeout": timeout}


def stream_request(effect: Send) -> dict[str, Any]:
    """A request whose answer is read as it comes; heartbeats show that a slow server is alive."""
    return _request(effect) | {"timeout": _timeout(READ_S)}


def _parsed(response: Answer) -> Iterator[Change]:
    parser = Parser()
    for chunk in response.iter_bytes():
        yield from parser.feed(chunk)


async def _aparsed(response: httpx2.Response) -> AsyncIterator[Change]:
    if response.status_code != 200:
        return
    parser = Parser()
    async for chunk in response.aiter_bytes():
        for change in parser.feed(chunk):
            yield change


@contextlib.contextmanager
def _cut_off(response: Answer, after_s: float) -> Iterator[None]:
    """Shuts the connection down after `after_s`, so that a blocked read ends."""
    if after_s == inf:
        yield
        return
    if isinstance(response, LocalAnswer):
        connection = response.socket
    else:
        connection = response.extensions["network_stream"].get_extra_info("socket")

    def cut() -> None:
        with contextlib.suppress(OSError):
            connection.shutdown(SHUT_RDWR)

    timer = threading.Timer(after_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextlib.contextmanager
def translate_errors(endpoint: Endpoint) -> Iterator[None]:
    """Raises errors of the connection as errors of atoll."""
    try:
        yield
    except Unreachable as error:
        endpoint.lost()
        raise Temporary(str(error)) from error
    except OSError as error:
        raise Temporary(f"connection lost: {type(error).__name__}: {error}") from error
    except UnicodeEncodeError as error:
        raise ValidationError("request", error.object, TEXT) from error
    except Exception as error:
        if "httpx2" not in sys.modules:
            raise
        import httpx2

        if isinstance(error, httpx2.ConnectError):
            url = error.request.url
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise Permanent(distrust(f"{url.host}:{url.port}", str(error))) from error
            endpoint.lost()
            port = "" if url.port is None else f":{url.port}"
            reason = re.sub(r"^\[Errno -?\d+\] ", "", str(error))
            raise Temporary(f"cannot reach {url.host}{port}: {reason}") from error
        if isinstance(error, httpx2.TransportError):
            raise Temporary(f"connection lost: {type(error).__name__}: {error}") from error
        if isinstance(error, httpx2.InvalidURL):
            raise Permanent(f"not a usable address: {error}") from error
        raise


CA = "ATOLL_CA"


def trust(url: str) -> ssl.SSLContext | bool:
    """What the server's certificate is checked against: `ATOLL_CA`, else `SSL_CERT_FILE` and
    `SSL_CERT_DIR`, else the usual.

    Raises ValidationError for a file that holds no certificate.
    """
    import ssl

    if not url.startswith("https://"):
        # Reading the system's certificates takes longer than all of a local request.
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if path := os.environ.get(CA):
        return _only(path)
    if os.environ.get("SSL_CERT_FILE") or os.environ.get("SSL_CERT_DIR"):
        return ssl.create_default_context()
    return True


def _only(path: str) -> ssl.SSLContext:
    import ssl

    try:
        return ssl.create_default_context(cafile=path)
    except OSError as error:
        is_file = isinstance(error, ssl.SSLError)
        reason = "it has no certificate in PEM" if is_file else error.strerror
        raise ValidationError(CA, path, f"expected a file of certificates: {reason}") from error


def distrust(host: str, reason: str) -> str:
    """A sentence on why a certificate was refused, and what to do."""
    text = f"the certificate of {host} is not trusted ({reason.partition('] ')[2] or reason})"
    if not has_authorities():
        remedy = f"install ca-certificates, or name a file of them in SSL_CERT_FILE or {CA}"
        return f"{text}: this machine or image has no CA certificates: {remedy}"
    return f"{text}: name the file of its CA in {CA} or SSL_CERT_FILE"


def has_authorities() -> bool:
    """Whether this machine has the certificates of any authority."""
    import ssl

    paths = ssl.get_default_verify_paths()
    if paths.cafile is not None and os.path.getsize(paths.cafile):
        return True
    try:
        return paths.capath is not None and bool(os.listdir(paths.capath))
    except OSError:
        return False


LOG_RETRY_S = 0.2  # a restarted control plane answers within a second
LOG_PATIENCE_S = 60.0  # a followed log outlives a restart of the server, on a loaded machine too


class LogPosition:
    """How far each rank's log was read, so that a second connection resumes there.

    By the offsets of lines; where lines have none, by counting them from the beginning.
    """

    def __init__(
        self,
        ref: TrainingRef,
        ranks: Sequence[int] | None,
        tail: int | None,
        follow: bool,
        filters: Mapping[str, Any] | None = None,
    ) -> None:
        self._path = f"{ref.path}/logs"
        self._uid = ref.uid
        self._ranks = list(ranks or ())
        self.is_empty = ranks is not None and not self._ranks
        self._tail = tail
        self._follow = follow
        self._filters = dict(filters or {})  # further options: since, search
        self._offsets: dict[int, int] | None = None
        self._yielded: Counter[int] = Counter()
        self._read: Counter[int] = Counter()
        self._lost_at: float | None = None

    @property
    def request(self) -> dict[str, Any]:
        query: dict[str, Any] = {
            "rank": self._ranks,
            "follow": self._follow or None,
            "uid": self._uid,
            **self._filters,
        }
        if self._offsets is None:
            query["tail"] = self._tail
        elif self._offsets:
            query["offsets"] = ",".join(f"{rank}:{at}" for rank, at in self._offsets.items())
        return stream_request(Send("GET", self._path, query))

    def new(self, raw: str) -> LogLine | None:
        """The line, unless it was read before. Raises Temporary where the server cut the log."""
        self._lost_at = None  # anything, also a heartbeat, shows that the server is alive
        if not raw:
            return None
        message: dict[str, Any] = msgspec.json.decode(raw)
        if message.get("cut"):
            raise Temporary("the server went away while its log was read")
        if "offsets" in message:
            self._offsets = {int(rank): at for rank, at in message["offsets"].items()}
            return None
        line = LogLine(rank=message["rank"], text=message["text"], time=message.get("time"))
        if "at" in message:
            self._offsets = {} if self._offsets is None else self._offsets
            self._offsets[line.rank] = message["at"]
            return line
        self._read[line.rank] += 1
        if self._read[line.rank] <= self._yielded[line.rank]:
            return None
        self._yielded[line.rank] += 1
        return line

    def lost(self, error: Temporary) -> None:
        """The connection broke: go on where it did, or give up."""
        self._read.clear()
        now = time.monotonic()
        self._lost_at = self._lost_at or now
        # Counted lines say nothing of where a tail began.
        is_placed = self._tail is None or self._offsets is not None or not self._yielded
        if not self._follow or not is_placed or now - self._lost_at > LOG_PATIENCE_S:
            raise error


def read_log(wire: Wire, position: LogPosition) -> Iterator[LogLine]:
    while not position.is_empty:
        try:
            with translate_errors(wire.endpoint):
                with wire.client().stream(**position.request) as response:
                    if response.status_code != 200:
                        check_reply(reply(response, response.read()))
                    for raw in lines_of(response.iter_bytes()):
                        line = position.new(raw)
                        if line is not None:
                            yield line
            return
        except Temporary as error:
            position.lost(error)
            time.sleep(LOG_RETRY_S)


async def aread_log(wire: Wire, position: LogPosition) -> AsyncIterator[LogLine]:
    import asyncio

    while not position.is_empty:
        try:
            with translate_errors(wire.endpoint):
                client = await asyncio.to_thread(wire.async_client)
                async with client, client.stream(**position.request) as response:
                    if response.status_code != 200:
                        check_reply(reply(response, await response.aread()))
                    async for raw in alines_of(response.aiter_bytes()):
                        line = position.new(raw)
                        if line is not None:
                            yield line
            return
        except Temporary as error:
            position.lost(error)
            await asyncio.sleep(LOG_RETRY_S)
