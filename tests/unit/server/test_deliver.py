from __future__ import annotations

import asyncio

import pytest

from atoll.core.webhooks import Delivery, new_secret
from atoll.server.deliver import Deliverer, Sent, is_public, pinned, public_address


@pytest.mark.parametrize(
    ("address", "is_right"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("192.168.0.1", False),
        ("172.16.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::", False),
        ("fd00::1", False),
        ("fe80::1%eth0", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("2002:7f00:1::", False),
        ("64:ff9b:1::1", False),
    ],
)
def test_which_addresses_are_on_the_public_internet(address: str, is_right: bool) -> None:
    assert is_public(address) is is_right


@pytest.mark.parametrize(
    "url", ["http://localhost/", "http://127.1/", "http://0x7f000001/", "http://[::1]:80/"]
)
def test_names_and_odd_spellings_of_this_machine_are_not(url: str) -> None:
    try:
        assert asyncio.run(public_address(url)) is None
    except OSError:
        pass  # this system does not know that spelling: nothing is reached either


def test_the_address_that_was_checked_is_the_one_that_is_connected_to() -> None:
    assert pinned("https://hook.example:8443/a?b=c", "2606:4700::1111") == (
        "https://[2606:4700::1111]:8443/a?b=c",
        "hook.example:8443",
        {"sni_hostname": "hook.example"},
    )
    assert pinned("http://hook.example/a", "8.8.8.8")[0] == "http://8.8.8.8/a"


class NoBox:
    """An outbox that notes what became of deliveries."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, float | None]] = []

    def delivered(self, delivery: Delivery, now: float) -> None:
        self.notes.append(("delivered", None))

    def given_up(self, delivery: Delivery, error: str, now: float) -> None:
        self.notes.append((error, None))

    def postponed(self, delivery: Delivery, error: str, now: float, due_at: float) -> None:
        self.notes.append((error, due_at - now))


def test_pauses_grow_and_after_days_it_is_given_up() -> None:
    box = NoBox()
    now = 0.0
    deliverer = Deliverer(box, clock=lambda: now, jitter=lambda: 1.0)  # type: ignore[arg-type]
    one = Delivery("m", "w", "n", "http://x/", new_secret(), b"", 0.0, 0)
    deliverer._settle(one, Sent(204))
    for attempts in (0, 1, 2, 50):
        deliverer._settle(one._replace(attempts=attempts), Sent(500))
    now = 3 * 86_400 + 1
    deliverer._settle(one, Sent(None, "no answer"))
    assert box.notes == [
        ("delivered", None),
        ("it answered 500", 5.0),
        ("it answered 500", 10.0),
        ("it answered 500", 20.0),
        ("it answered 500", 3600.0),
        ("no answer", None),
    ]


def test_a_tenant_reaches_nothing_that_only_the_server_can() -> None:
    deliverer = Deliverer(NoBox(), trusted=["default"])  # type: ignore[arg-type]
    one = Delivery("m", "w", "team", "http://127.0.0.1:9/", new_secret(), b"", 0.0, 0)
    sent = asyncio.run(deliverer.send(one))
    assert sent == Sent(None, "its host has no address on the public internet")
    own = asyncio.run(deliverer.send(one._replace(namespace="default")))
    assert own.status is None
    assert "public" not in own.error
