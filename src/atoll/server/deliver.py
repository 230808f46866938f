"""Delivers messages to webhooks, and retries with growing pauses.

Somebody who controls a name in DNS must not make the control plane connect to its own network:
unless a webhook is configured as private, it connects only to addresses of the public internet, and
to exactly the address that was checked. It follows no redirect and reports only the status.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import random
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import httpx2

from atoll.core.clock import grown_s
from atoll.core.config import in_file
from atoll.core.errors import AtollError, ValidationError
from atoll.core.webhooks import (
    FIRST_RETRY_S,
    MAX_ATTEMPTS,
    MAX_RETRY_S,
    Delivery,
    Webhook,
    WebhookConfig,
    signed_headers,
    webhook_of,
)
from atoll.store.feed import Outbox

TIMEOUT_S = 10.0  # Standard Webhooks asks receivers to answer within seconds
TRANSLATED = ipaddress.ip_network("64:ff9b::/32")  # to IPv4 addresses, whichever those are
NOT_PUBLIC = "its host has no address on the public internet: set private = true if that is meant"
# Any right of others, and writing by the group: the group of a mounted Secret may read it.
OPEN_TO_OTHERS = 0o027
MAX_FILE = 4096  # bytes: a secret has at most 100

log = logging.getLogger(__name__)


class DeliveryAnswer(NamedTuple):
    """How the receiver answered. `status` is None if it did not."""

    status: int | None
    error: str = ""

    @property
    def is_accepted(self) -> bool:
        return self.status is not None and 200 <= self.status < 300

    @property
    def problem(self) -> str:
        return "" if self.is_accepted else self.error or f"it answered {self.status}"


class Deliverer:
    """Delivers the messages of an outbox, one after another for each webhook.

    Pauses use the monotonic clock and are not stored: after a restart every message is tried at
    once.
    """

    def __init__(
        self,
        outbox: Outbox,
        *,
        clock: Callable[[], float] = time.time,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self._outbox = outbox
        self._clock = clock  # for the time in a message, and for nothing else
        self._first_retry_s = first_retry_s

    async def run(self) -> None:
        """Until it is cancelled; returns at once if there is no webhook."""
        loop = asyncio.get_running_loop()
        news = [(webhook, asyncio.Event()) for webhook in self._outbox.webhooks]

        def wake() -> None:
            for _, event in news:
                event.set()

        self._outbox.on_news = lambda: loop.call_soon_threadsafe(wake)
        try:
            async with asyncio.TaskGroup() as tasks:
                for webhook, event in news:
                    tasks.create_task(self._deliver_to(webhook, event))
        finally:
            self._outbox.on_news = lambda: None

    async def _deliver_to(self, webhook: Webhook, news: asyncio.Event) -> None:
        due: dict[str, float] = {}  # by message: when it is tried; at once if it never was
        while True:
            news.clear()
            try:
                due = {id: due.get(id, 0.0) for id in self._outbox.waiting(webhook)}
                # The oldest of those that were never tried, else the one whose pause ends first.
                first = min(due, key=lambda id: due[id], default=None)
                pause_s = math.inf if first is None else due[first] - time.monotonic()
                if first is None or pause_s > 0:
                    await _wait(news, pause_s)
                else:
                    retry_s = await self._deliver(webhook, first)
                    due[first] = time.monotonic() + retry_s
            except AtollError as error:  # a full disk: nothing is lost
                log.warning("webhook %s: %s", webhook.host, error)
                await asyncio.sleep(self._first_retry_s)

    async def _deliver(self, webhook: Webhook, id: str) -> float:
        """Tries once. Returns how long to wait before it is tried again."""
        delivery = self._outbox.get(id)
        if delivery is None:
            return 0.0
        answer = await self.send(webhook, delivery)
        if answer.is_accepted:
            self._outbox.remove(id)
            return 0.0
        if delivery.attempts + 1 >= MAX_ATTEMPTS:
            log.warning("webhook %s: message %s is given up: %s", webhook.host, id, answer.problem)
            self._outbox.remove(id)
            return 0.0
        pause_s = grown_s(self._first_retry_s, MAX_RETRY_S, delivery.attempts)
        log.warning(
            "webhook %s: message %s is tried again in %.0f s: %s",
            *(webhook.host, id, pause_s, answer.problem),
        )
        self._outbox.count_attempt(id)
        return pause_s * random.uniform(0.8, 1.2)

    async def send(self, webhook: Webhook, delivery: Delivery) -> DeliveryAnswer:
        """Never raises."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._send(webhook, delivery)
        except TimeoutError:
            return DeliveryAnswer(None, f"no answer within {TIMEOUT_S:g} s")
        except (OSError, httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            return DeliveryAnswer(None, " ".join(str(error).split())[:200] or type(error).__name__)

    async def _send(self, webhook: Webhook, delivery: Delivery) -> DeliveryAnswer:
        headers, url = signed_headers(webhook, delivery, self._clock()), webhook.url
        extensions: dict[str, Any] = {}
        if not webhook.is_private:
            address = await public_address(url)
            if address is None:
                return DeliveryAnswer(None, NOT_PUBLIC)
            url, headers["host"], extensions = pin_address(url, address)
        options: dict[str, Any] = {"trust_env": webhook.is_private, "follow_redirects": False}
        async with httpx2.AsyncClient(timeout=TIMEOUT_S, **options) as client:
            request = client.build_request(
                "POST", url, headers=headers, content=delivery.body, extensions=extensions
            )
            answer = await client.send(request, stream=True)
            await answer.aclose()  # its body is not read
        return DeliveryAnswer(answer.status_code)


async def _wait(news: asyncio.Event, pause_s: float) -> None:
    """Until there is news, or the pause is over."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(None if math.isinf(pause_s) else pause_s):
            await news.wait()


def load_webhooks(configs: Sequence[WebhookConfig], path: str | None) -> list[Webhook]:
    """The webhooks with their secrets; paths are relative to the configuration, `path`.

    Raises ValidationError naming the field if a secret is missing, wrong, or open to others.
    """
    webhooks = []
    for at, config in enumerate(configs):
        try:
            webhooks.append(webhook_of(config, _secret(config, Path(path or "").parent)))
        except ValidationError as error:
            raise in_file(path, error, f"webhooks[{at}]") from error
    return webhooks


def _secret(config: WebhookConfig, directory: Path) -> str:
    if config.secret_env is not None:
        secret = os.environ.get(config.secret_env)
        if secret is None:
            expected = "expected an environment variable of the control plane: it has none"
            raise ValidationError("secret_env", config.secret_env, expected)
        return secret
    path = directory / (config.secret_file or "")
    try:
        with path.open() as file:
            if os.fstat(file.fileno()).st_mode & OPEN_TO_OTHERS:
                expected = f"expected a file that others cannot read: chmod 600 {path}"
                raise ValidationError("secret_file", config.secret_file, expected)
            return file.read(MAX_FILE).strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        expected = f"expected a file with the secret: {reason}"
        raise ValidationError("secret_file", config.secret_file, expected) from error


async def public_address(url: str) -> str | None:
    """An address of the host, if all that it has are on the public internet."""
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    entries = await loop.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in entries]
    return addresses[0] if addresses and all(map(is_public, addresses)) else None


def is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(parsed, "ipv4_mapped", None) or getattr(parsed, "sixtofour", None)
    if mapped is not None:
        parsed = mapped
    return parsed.is_global and not parsed.is_multicast and parsed not in TRANSLATED


def pin_address(url: str, address: str) -> tuple[str, str, dict[str, Any]]:
    """The URL with that address for its host, what to send as `Host`, and the name that a
    certificate must be for."""
    parts = urlsplit(url)
    where = f"[{address}]" if ":" in address else address
    port = "" if parts.port is None else f":{parts.port}"
    host = parts.netloc.rpartition("@")[2]
    fixed = urlunsplit((parts.scheme, f"{where}{port}", parts.path, parts.query, ""))
    return fixed, host, {"sni_hostname": parts.hostname}
