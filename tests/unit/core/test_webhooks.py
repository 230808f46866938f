from __future__ import annotations

import base64
import hashlib
import hmac
import json

import pytest

from atoll.core.errors import ValidationError
from atoll.core.status import Event
from atoll.core.webhooks import (
    Delivery,
    WebhookRequest,
    event_body,
    new_secret,
    signature,
    signed_headers,
    wants,
)


def event(reason: str, type: str = "Normal") -> Event:
    return Event(type=type, reason=reason, message="m", at=1_700_000_000.25)  # type: ignore[arg-type]


def test_the_signature_is_that_of_the_standard() -> None:
    # The example of the Standard Webhooks specification.
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    id, stamp = "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330"
    body = b'{"test": 2432232314}'
    assert signature(secret, id, stamp, body) == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_receiver_can_check_a_message_with_its_secret() -> None:
    secret = new_secret()
    body = event_body("n", "t", "u", event("Failed", "Warning"))
    delivery = Delivery("msg_1", "wh-1", "n", "http://x/", secret, body, 0.0, 0)
    headers = signed_headers(delivery, 12.9)
    key = base64.b64decode(secret.removeprefix("whsec_"))
    digest = hmac.new(key, b"msg_1.12." + body, hashlib.sha256).digest()
    assert headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
    told = json.loads(body)
    assert (told["type"], told["timestamp"]) == ("Failed", "2023-11-14T22:13:20.250Z")
    assert told["data"]["training"] == "t"


@pytest.mark.parametrize(
    ("chosen", "reasons"),
    [
        ([], ["Failed"]),
        (["*"], ["Failed", "Scaled", "RankLost"]),
        (["warnings"], ["Failed", "RankLost"]),
        (["Scaled"], ["Scaled"]),
        (["Scaled", "warnings"], ["Failed", "Scaled", "RankLost"]),
    ],
)
def test_which_events_are_wanted(chosen: list[str], reasons: list[str]) -> None:
    events = [event("Failed", "Warning"), event("Scaled"), event("RankLost", "Warning")]
    assert [e.reason for e in events if wants(chosen, e)] == reasons


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"url": "ftp://x/"}, "url"),
        ({"url": "http://"}, "url"),
        ({"url": "http:///path"}, "url"),
        ({"url": "http://x:99999/"}, "url"),
        ({"url": "http://x/a b"}, "url"),
        ({"url": "http://x/\r\nHost: y"}, "url"),
        ({"url": "http://me:word@x/"}, "url"),
        ({"url": "file:///etc/passwd"}, "url"),
        ({"url": "http://x/", "events": ["failed"]}, "events"),
        ({"url": "http://x/", "secret": "whsec_c2hvcnQ="}, "secret"),
        ({"url": "http://x/", "secret": "a" * 40}, "secret"),
    ],
)
def test_what_is_wrong_is_named_and_no_secret_is_shown(
    fields: dict[str, object], field: str
) -> None:
    with pytest.raises(ValidationError) as refusal:
        WebhookRequest(**fields)  # type: ignore[arg-type]
    assert refusal.value.field == field
    assert "word" not in str(refusal.value)
    assert str(fields.get("secret", "nothing")) not in str(refusal.value)
