"""Delivers messages to webhooks, and tries again with longer and longer pauses.

A tenant's address must not make the server reach what the tenant could not: for namespaces that are
not trusted, only addresses of the public internet are connected to, the very ones that were
checked. No redirect is followed, and of what the other side answers only the status is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import random
import socket
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import httpx2

from atoll.core.errors import AtollError
from atoll.core.retry import grown_s
from atoll.core.webhooks import (
    FIRST_RETRY_S,
    GIVEN_UP_S,
    LONGEST_RETRY_S,
    Delivery,
    signed_headers,
)
from atoll.store.outbox import Outbox

TIMEOUT_S = 10.0
AT_ONCE = 64
TRANSLATED = ipaddress.ip_network("64:ff9b::/32")  # to IPv4 addresses, whichever those are
LOOK_S = 60.0  # the longest pause between two looks

log = logging.getLogger(__name__)


class Sent(NamedTuple):
    """How one message was answered. `status` is None where there was no answer."""

    status: int | None
    error: str = ""

    @property
    def is_accepted(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def words(self) -> str:
        return "" if self.is_accepted else self.error or f"it answered {self.status}"


class Deliverer:
    """`trusted` are namespaces whose messages may go anywhere: their tokens may run commands where
    the server runs, or whoever runs the server says so."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        trusted: Collection[str] = (),
        clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = lambda: random.uniform(0.8, 1.2),
    ) -> None:
        self._outbox = outbox
        self._trusted = frozenset(trusted)
        self._clock = clock
        self._jitter = jitter
        self._news = asyncio.Event()
        self._busy: set[str] = set()

    async def run(self) -> None:
        """Until it is cancelled."""
        loop = asyncio.get_running_loop()

        def on_news() -> None:
            loop.call_soon_threadsafe(self._news.set)

        self._outbox.on_news = on_news
        slots = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._news.clear()
                try:
                    due = self._outbox.due(self._clock())
                    next_at = self._outbox.next_due()
                except AtollError as error:  # a full disk: nothing is lost
                    log.warning("webhooks: %s", error)
                    due, next_at = [], None
                for delivery in due:
                    if delivery.id not in self._busy:
                        self._busy.add(delivery.id)
                        tasks.create_task(self._deliver(delivery, slots))
                pause_s = LOOK_S if next_at is None else next_at - self._clock()
                if due:
                    pause_s = max(pause_s, 0.2)  # those that are under way are due, too
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(max(pause_s, 0.01), LOOK_S)):
                        await self._news.wait()

    async def _deliver(self, delivery: Delivery, slots: asyncio.Semaphore) -> None:
        try:
            async with slots:
                sent = await self.send(delivery)
            with contextlib.suppress(AtollError):
                self._settle(delivery, sent)
        finally:
            self._busy.discard(delivery.id)
            self._news.set()

    def _settle(self, delivery: Delivery, sent: Sent) -> None:
        now = self._clock()
        if sent.is_accepted:
            self._outbox.delivered(delivery, now)
        elif now - delivery.created_at > GIVEN_UP_S:
            self._outbox.given_up(delivery, sent.words, now)
        else:
            pause_s = grown_s(FIRST_RETRY_S, LONGEST_RETRY_S, delivery.attempts) * self._jitter()
            self._outbox.postponed(delivery, sent.words, now, now + pause_s)

    def is_tenant(self, namespace: str) -> bool:
        return namespace not in self._trusted

    async def send(self, delivery: Delivery) -> Sent:
        """Never raises."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._send(delivery)
        except TimeoutError:
            return Sent(None, f"no answer within {TIMEOUT_S:g} s")
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            return Sent(None, " ".join(str(error).split())[:200] or type(error).__name__)

    async def _send(self, delivery: Delivery) -> Sent:
        headers, url = signed_headers(delivery, self._clock()), delivery.url
        extensions: dict[str, Any] = {}
        is_tenant = self.is_tenant(delivery.namespace)
        if is_tenant:
            address = await public_address(delivery.url)
            if address is None:
                return Sent(None, "its host has no address on the public internet")
            url, headers["host"], extensions = pinned(delivery.url, address)
        options: dict[str, Any] = {"trust_env": not is_tenant, "follow_redirects": False}
        async with httpx2.AsyncClient(timeout=TIMEOUT_S, **options) as client:
            request = client.build_request(
                "POST", url, headers=headers, content=delivery.body, extensions=extensions
            )
            answer = await client.send(request, stream=True)
            await answer.aclose()  # its body is nobody's business
        return Sent(answer.status_code)


async def public_address(url: str) -> str | None:
    """An address of the host, if all that it has are on the public internet."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    entries = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in entries]
    return addresses[0] if addresses and all(map(is_public, addresses)) else None


def is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None) or getattr(found, "sixtofour", None)
    if mapped is not None:
        found = mapped
    return found.is_global and not found.is_multicast and found not in TRANSLATED


def pinned(url: str, address: str) -> tuple[str, str, dict[str, Any]]:
    """The URL with that address for its host, what to send as `Host`, and the name that a
    certificate must be for."""
    parts = urlsplit(url)
    where = f"[{address}]" if ":" in address else address
    port = "" if parts.port is None else f":{parts.port}"
    host = parts.netloc.rpartition("@")[2]
    fixed = urlunsplit((parts.scheme, f"{where}{port}", parts.path, parts.query, ""))
    return fixed, host, {"sni_hostname": parts.hostname}
