from __future__ import annotations

import base64
import hashlib
import hmac
import json

import pytest

from atoll.core.config import parse
from atoll.core.errors import ValidationError
from atoll.core.status import Event
from atoll.core.webhooks import (
    Delivery,
    WebhookConfig,
    event_body,
    key_of,
    message_id,
    signature,
    signed_headers,
    webhook_of,
)

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def event(reason: str, type: str = "Normal") -> Event:
    return Event(type=type, reason=reason, message="m", at=1_700_000_000.25)  # type: ignore[arg-type]


def config(**fields: object) -> WebhookConfig:
    return WebhookConfig(**{"url": "http://x/", "secret_file": "key", **fields})  # type: ignore[arg-type]


def test_the_signature_is_that_of_the_standard() -> None:
    # The example of the Standard Webhooks specification.
    id, stamp = "msg_p5jXN8AQM9LWM0D4loKWxJek", "1614265330"
    body = b'{"test": 2432232314}'
    made = signature(key_of(SECRET), id, stamp, body)
    assert made == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_receiver_can_check_a_message_with_its_secret() -> None:
    body = event_body("n", "t", "u", event("Failed", "Warning"))
    headers = signed_headers(webhook_of(config(), SECRET), Delivery("msg_1", body, 0), 12.9)
    key = base64.b64decode(SECRET.removeprefix("whsec_"))
    digest = hmac.new(key, b"msg_1.12." + body, hashlib.sha256).digest()
    assert headers["webhook-signature"] == "v1," + base64.b64encode(digest).decode()
    message = json.loads(body)
    assert (message["type"], message["timestamp"]) == ("Failed", "2023-11-14T22:13:20.250Z")
    assert message["data"]["training"] == "t"


def test_a_message_has_one_id_for_each_webhook_training_and_event() -> None:
    one, two = (webhook_of(config(url=url), SECRET) for url in ("http://x/", "http://y/"))
    assert message_id(one, "u", "1.1") == message_id(one, "u", "1.1")
    ids = {message_id(w, u, m) for w in (one, two) for u in ("u", "v") for m in ("1.1", "1.2")}
    assert len(ids) == 8


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
    webhook = webhook_of(config(events=chosen), SECRET)
    assert [e.reason for e in events if webhook.wants("n", e)] == reasons


def test_a_webhook_hears_of_the_namespaces_it_names_and_else_of_all() -> None:
    every, one = webhook_of(config(), SECRET), webhook_of(config(namespaces=["a"]), SECRET)
    assert [every.wants(n, event("Failed")) for n in ("a", "b")] == [True, True]
    assert [one.wants(n, event("Failed")) for n in ("a", "b")] == [True, False]


@pytest.mark.parametrize(
    ("table", "field"),
    [
        ("url = 'ftp://x/'", "webhooks[0].url"),
        ("url = 'http://'", "webhooks[0].url"),
        ("url = 'http:///path'", "webhooks[0].url"),
        ("url = 'http://x:99999/'", "webhooks[0].url"),
        ("url = 'http://x/a b'", "webhooks[0].url"),
        ('url = "http://x/\\r\\nHost: y"', "webhooks[0].url"),
        ("url = 'http://me:word@x/'", "webhooks[0].url"),
        ("url = 'file:///etc/passwd'", "webhooks[0].url"),
        ("url = 'http://x/'\nevents = ['failed']", "webhooks[0].events"),
        ("url = 'http://x/'\nevents = 'Failed'", "webhooks[0].events"),
        ("url = 'http://x/'\nnamespaces = ['Bad_']", "webhooks[0].namespaces"),
        ("url = 'http://x/'\nsecret_env = 'A'", "webhooks[0].secret_file"),
        ("url = 'http://x/'\nsecret = 'a word'", "webhooks.secret"),
        ("url = 'http://x/'\nsecrets_file = 'x'", "webhooks[0].secrets_file"),
        ("events = ['Failed']", "webhooks[0].url"),
        ("url = 'http://x/'\n[[webhooks]]\nurl = 'http://x/'\nsecret_env = 'A'", "webhooks[1].url"),
    ],
)
def test_what_is_wrong_in_the_file_is_named_and_no_secret_is_shown(table: str, field: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        parse(f"[[webhooks]]\nsecret_file = 'key'\n{table}", "a.toml")
    assert refusal.value.field == f"a.toml: {field}"
    assert "word" not in str(refusal.value)


@pytest.mark.parametrize("secret", ["whsec_c2hvcnQ=", "a" * 40, "whsec_é", ""])
def test_a_secret_that_is_none_is_refused_and_not_shown(secret: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        webhook_of(config(), secret)
    assert secret == "" or secret not in str(refusal.value)
    assert SECRET[10:] not in repr(webhook_of(config(), SECRET))
    assert "key" not in repr(webhook_of(config(), SECRET))
