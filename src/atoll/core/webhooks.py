"""Webhooks: which events go where, and how a message is made and signed. Pure.

Messages follow the Standard Webhooks specification: `webhook-id`, `webhook-timestamp` and
`webhook-signature`, which is an HMAC with SHA-256 over both and the body.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta

from atoll.core.checks import check_name
from atoll.core.errors import ValidationError
from atoll.core.model import SpecModel, encode
from atoll.core.status import Event

EVERY = "*"
WARNINGS = "warnings"
# The default: ends, and what needs attention.
DEFAULT = ("Succeeded", "Failed", "Cancelled", "RankStalled", "WorldShrunkBelowMin")
MAX_WAITING = 1000  # messages of one webhook, of about 1 kB each
FIRST_RETRY_S, MAX_RETRY_S = 5.0, 3600.0  # a receiver that restarts, and one that is down
MAX_ATTEMPTS = 80  # with those pauses three days: a receiver may be down over a weekend
SECRET_PREFIX = "whsec_"
MIN_SECRET, MAX_SECRET = 16, 256  # bytes

_REASON = re.compile(r"\*|warnings|[A-Z][A-Za-z]{1,62}")
Text = Annotated[str, Meta(min_length=1, max_length=2048)]


class WebhookConfig(SpecModel, frozen=True):
    """One `[[webhooks]]` of atoll.toml. Its secret is in a file or an environment variable, so that
    the configuration itself can be shown."""

    url: Text
    events: Annotated[list[Text], Meta(max_length=64)] = []  # empty: those of `DEFAULT`
    namespaces: list[Text] | None = None  # None: all
    secret_file: Text | None = None
    secret_env: Text | None = None
    private: bool = False  # its host may have an address outside of the public internet

    def __post_init__(self) -> None:
        check_url(self.url)
        for event in self.events:
            if not _REASON.fullmatch(event):
                expected = "expected reasons of events such as Failed, or warnings, or *"
                raise ValidationError("events", event, expected)
        for namespace in self.namespaces or []:
            check_name("namespaces", namespace)
        if (self.secret_file is None) == (self.secret_env is None):
            expected = "expected the name of a file, or secret_env and not this"
            raise ValidationError("secret_file", self.secret_file, expected)


@dataclass(frozen=True)
class Webhook:
    """Where events go, and the key that signs them."""

    id: str  # the same as long as its URL is
    url: str
    events: Sequence[str]
    namespaces: Collection[str] | None
    key: bytes = field(repr=False)
    is_private: bool = False

    @property
    def host(self) -> str:
        """For logs: paths of such URLs are often secrets."""
        return urlsplit(self.url).hostname or ""

    def wants(self, namespace: str, event: Event) -> bool:
        if self.namespaces is not None and namespace not in self.namespaces:
            return False
        chosen = self.events or DEFAULT
        is_warning = WARNINGS in chosen and event.type == "Warning"
        return EVERY in chosen or is_warning or event.reason in chosen


def webhook_of(config: WebhookConfig, secret: str) -> Webhook:
    """Raises ValidationError if this is no secret."""
    from hashlib import sha256  # loads slowly, and the SDK needs it not

    return Webhook(
        id=sha256(config.url.encode()).hexdigest()[:12],
        url=config.url,
        events=config.events,
        namespaces=config.namespaces,
        key=key_of(secret),
        is_private=config.private,
    )


class Delivery(NamedTuple):
    """One message that waits to be delivered."""

    id: str
    body: bytes
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
        redacted = f"{parts.scheme}://…@{parts.hostname}"
        raise ValidationError("url", redacted, "expected no user in it")


def key_of(secret: str) -> bytes:
    """The bytes that sign. Raises ValidationError."""
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith(SECRET_PREFIX) or not MIN_SECRET <= len(key) <= MAX_SECRET:
        expected = f"expected {SECRET_PREFIX} and {MIN_SECRET} bytes or more in base64"
        raise ValidationError("secret", "…", expected)
    return key


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


def message_id(webhook: Webhook, uid: str, mark: str) -> str:
    """The id of a message: the same for the same event of a training, which `mark` identifies."""
    from hashlib import sha256

    return "msg_" + sha256(f"{webhook.id} {uid} {mark}".encode()).hexdigest()[:24]


def signed_headers(webhook: Webhook, delivery: Delivery, now: float) -> dict[str, str]:
    stamp = str(int(now))
    return {
        "content-type": "application/json",
        "user-agent": "atoll-webhook",
        "webhook-id": delivery.id,
        "webhook-timestamp": stamp,
        "webhook-signature": signature(webhook.key, delivery.id, stamp, delivery.body),
    }


def signature(key: bytes, id: str, stamp: str, body: bytes) -> str:
    import hashlib
    import hmac

    digest = hmac.new(key, f"{id}.{stamp}.".encode() + body, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"
