"""Webhooks over HTTP: a namespace has its own, and tells which of its events go where."""

from __future__ import annotations

import time
import uuid

from msgspec.structs import replace

from atoll.core.errors import Conflict, ValidationError
from atoll.core.status import Event
from atoll.core.webhooks import (
    Delivery,
    WebhookList,
    WebhookRequest,
    WebhookTest,
    event_body,
    new_secret,
)
from atoll.server.deliver import Deliverer, public_address
from atoll.server.operations import Answer, ApiCall, json_answer
from atoll.store.outbox import Outbox


async def add_webhook(call: ApiCall) -> Answer:
    wanted: WebhookRequest = call.body
    outbox, deliverer = _of(call)
    if deliverer.is_tenant(call.namespace):
        await _check_public(wanted.url)
    secret = wanted.secret or new_secret()
    now = call.plane.clock().wall
    id = outbox.add(call.namespace, wanted.url, wanted.events, secret, now)
    try:
        await call.plane.keep_webhooks()
    except BaseException:  # it would be forgotten, though somebody was told its secret
        outbox.remove(call.namespace, id)
        raise
    return json_answer(outbox.get(call.namespace, id), 201)


async def _check_public(url: str) -> None:
    try:
        address = await public_address(url)
    except OSError as error:
        raise ValidationError("url", url, f"its host cannot be found: {error.strerror}") from error
    if address is None:
        raise ValidationError("url", url, "expected a host on the public internet")


async def read_webhooks(call: ApiCall) -> Answer:
    outbox, _ = _of(call)
    items = [replace(webhook, secret=None) for webhook in outbox.all(call.namespace)]
    return json_answer(WebhookList(items=items))


async def remove_webhook(call: ApiCall) -> Answer:
    outbox, _ = _of(call)
    webhook = outbox.get(call.namespace, call.name)
    outbox.remove(call.namespace, call.name)
    await call.plane.keep_webhooks()
    return json_answer(replace(webhook, secret=None))


async def test_webhook(call: ApiCall) -> Answer:
    """Sends one message now, and says how it was answered."""
    outbox, deliverer = _of(call)
    webhook, now = outbox.get(call.namespace, call.name), call.plane.clock().wall
    event = Event(type="Normal", reason="Test", message="a test of this webhook", at=now)
    body = event_body(call.namespace, "", "", event)
    delivery = Delivery(
        id=f"msg_{uuid.uuid4().hex}",
        webhook=webhook.id,
        namespace=call.namespace,
        url=webhook.url,
        secret=webhook.secret or "",
        body=body,
        created_at=now,
        attempts=0,
    )
    began = time.perf_counter()
    sent = await deliverer.send(delivery)
    return json_answer(
        WebhookTest(
            id=webhook.id,
            url=webhook.url,
            is_accepted=sent.is_accepted,
            status=sent.status,
            error=sent.words,
            seconds=round(time.perf_counter() - began, 3),
        )
    )


def _of(call: ApiCall) -> tuple[Outbox, Deliverer]:
    plane = call.plane
    if plane.outbox is None or plane.deliverer is None:
        raise Conflict("this control plane keeps no webhooks: 'atoll serve' does")
    return plane.outbox, plane.deliverer
