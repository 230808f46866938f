"""Webhooks: which events go where, and how a message is made and signed. Pure.

Messages follow the Standard Webhooks specification: `webhook-id`, `webhook-timestamp` and
`webhook-signature`, which is an HMAC with SHA-256 over both and the body.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta

from atoll.core.errors import ValidationError
from atoll.core.model import Model, SpecModel, encode
from atoll.core.status import Event

EVERY = "*"
WARNINGS = "warnings"
# What is sent where nothing was chosen: ends, and what needs a look.
DEFAULT = ("Succeeded", "Failed", "Cancelled", "RankStalled", "WorldShrunkBelowMin")
MOST_OF_NAMESPACE = 20
MOST_WAITING = 1000  # deliveries of one webhook
FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 3600.0
GIVEN_UP_S = 3 * 86_400.0
SECRET_PREFIX = "whsec_"
LEAST_SECRET, MOST_SECRET = 16, 256  # bytes

_REASON = re.compile(r"\*|warnings|[A-Z][A-Za-z]{1,62}")
Words = Annotated[str, Meta(max_length=2048)]


class WebhookRequest(SpecModel, frozen=True):
    """A webhook that is wanted. Without events, those of `DEFAULT`; without a secret, a new one."""

    url: Words
    events: Annotated[list[Words], Meta(max_length=64)] = []
    secret: Words | None = None

    def __post_init__(self) -> None:
        check_url(self.url)
        for event in self.events:
            if not _REASON.fullmatch(event):
                expected = "expected reasons of events such as Failed, or warnings, or *"
                raise ValidationError("events", event, expected)
        if self.secret is not None:
            key_of(self.secret)


class Webhook(Model, frozen=True):
    """One webhook of a namespace, and how its deliveries go."""

    id: str
    namespace: str
    url: str
    events: list[str]
    created_at: float
    delivered: int = 0
    waiting: int = 0  # for their turn, or to be sent again
    dropped: int = 0  # given up, or too many at once
    last_at: float | None = None
    last_error: str = ""  # of the last attempt; empty if that was accepted
    secret: str | None = None  # shown once, when it is made


class WebhookList(Model, frozen=True):
    items: list[Webhook]


class WebhookTest(Model, frozen=True, omit_defaults=False):
    """How a test message was answered. `status` is None where there was no answer."""

    id: str
    url: str
    is_accepted: bool
    status: int | None
    error: str
    seconds: float


class Delivery(NamedTuple):
    """One message that is to be delivered."""

    id: str
    webhook: str
    namespace: str
    url: str
    secret: str
    body: bytes
    created_at: float
    attempts: int


def check_url(url: str) -> None:
    """Raises ValidationError unless it is an address that a message can be sent to."""
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    if not is_right or not url.isascii() or any(c <= " " for c in url):
        raise ValidationError("url", url, "expected http://HOST/… or https://HOST/…")
    if parts.username is not None or parts.password is not None:
        shown = f"{parts.scheme}://…@{parts.hostname}"
        raise ValidationError("url", shown, "expected no user in it")


def new_secret() -> str:
    import secrets  # loads slowly, as do those below: the SDK needs none of them

    return SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def key_of(secret: str) -> bytes:
    """The bytes that sign. Raises ValidationError."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith(SECRET_PREFIX) or not LEAST_SECRET <= len(key) <= MOST_SECRET:
        expected = f"expected {SECRET_PREFIX} and {LEAST_SECRET} bytes or more in base64"
        raise ValidationError("secret", "…", expected)
    return key


def wants(events: Sequence[str], event: Event) -> bool:
    chosen = events or DEFAULT
    is_warning = WARNINGS in chosen and event.type == "Warning"
    return EVERY in chosen or is_warning or event.reason in chosen


def event_body(namespace: str, name: str, uid: str, event: Event) -> bytes:
    at = datetime.fromtimestamp(event.at, UTC).isoformat(timespec="milliseconds")
    return encode(
        {
            "type": event.reason,
            "timestamp": at.replace("+00:00", "Z"),
            "data": {
                "namespace": namespace,
                "training": name,
                "uid": uid,
                "type": event.type,
                "reason": event.reason,
                "message": event.message,
                "at": event.at,
            },
        }
    )


def signed_headers(delivery: Delivery, now: float) -> dict[str, str]:
    stamp = str(int(now))
    return {
        "content-type": "application/json",
        "user-agent": "atoll-webhook",
        "webhook-id": delivery.id,
        "webhook-timestamp": stamp,
        "webhook-signature": signature(delivery.secret, delivery.id, stamp, delivery.body),
    }


def signature(secret: str, id: str, stamp: str, body: bytes) -> str:
    import hashlib
    import hmac

    digest = hmac.new(key_of(secret), f"{id}.{stamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"
