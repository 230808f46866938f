from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from atoll.core.clock import grown_s
from atoll.core.errors import ValidationError
from atoll.core.status import Event
from atoll.core.webhooks import (
    FIRST_RETRY_S,
    MAX_ATTEMPTS,
    MAX_RETRY_S,
    Delivery,
    Webhook,
    WebhookConfig,
)
from atoll.server.deliver import Deliverer, is_public, load_webhooks, pin_address, public_address
from atoll.store.sqlite import SQLiteStore


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
    assert pin_address("https://hook.example:8443/a?b=c", "2606:4700::1111") == (
        "https://[2606:4700::1111]:8443/a?b=c",
        "hook.example:8443",
        {"sni_hostname": "hook.example"},
    )
    assert pin_address("http://hook.example/a", "8.8.8.8")[0] == "http://8.8.8.8/a"


class Receiver:
    """An address that answers with `status`, to messages whose reason is in `refused` with 500."""

    def __init__(self) -> None:
        self.status = 200
        self.refused: set[str] = set()
        self.tried: list[str] = []
        self.accepted: list[str] = []
        self.headers: list[dict[str, str]] = []

    async def __aenter__(self) -> Receiver:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}/hook"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = [line.partition(": ") for line in head.splitlines()[1:] if line]
        headers = {name.lower(): value for name, _, value in lines}
        body = json.loads(await reader.readexactly(int(headers["content-length"])))
        reason = body["type"]
        status = 500 if reason in self.refused else self.status
        self.headers.append(headers)
        self.tried.append(reason)
        if status == 200:
            self.accepted.append(reason)
        location = "Location: /elsewhere\r\n" if status == 302 else ""
        writer.write(f"HTTP/1.1 {status} X\r\n{location}Content-Length: 0\r\n\r\n".encode())
        await writer.drain()
        writer.close()


def webhook_at(url: str, *, is_private: bool = True) -> Webhook:
    return Webhook("w", url, ["*"], None, b"k" * 16, is_private)


class Box:
    """A store whose events go to one webhook."""

    def __init__(self, folder: Path, url: str) -> None:
        self.store = SQLiteStore(folder / "db")
        self.webhook = webhook_at(url)
        self.outbox = self.store.outbox
        self.outbox.configure([self.webhook])

    def post(self, *reasons: str) -> None:
        with self.store._write():
            for reason in reasons:
                event = Event(type="Normal", reason=reason, message="m", at=1.0)
                self.outbox.post("n", "t", "u", event, reason)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


Story = Callable[[Box, Receiver], Coroutine[Any, Any, None]]


def played(folder: Path, story: Story) -> None:
    async def play() -> None:
        async with Receiver() as receiver:
            box = Box(folder, receiver.url)
            await story(box, receiver)
            box.store.close()

    asyncio.run(play())


@contextlib.asynccontextmanager
async def delivering(deliverer: Deliverer) -> AsyncIterator[None]:
    task = asyncio.create_task(deliverer.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def test_messages_arrive_in_the_order_of_their_events(tmp_path: Path) -> None:
    async def story(box: Box, receiver: Receiver) -> None:
        box.post("One", "Two", "Three")
        async with delivering(Deliverer(box.outbox)):
            await until(lambda: len(receiver.accepted) == 3)
            box.post("Four")
            await until(lambda: box.outbox.waiting(box.webhook) == [])
        assert receiver.accepted == ["One", "Two", "Three", "Four"]

    played(tmp_path, story)


def test_a_message_that_is_refused_is_tried_again_and_holds_up_no_other(tmp_path: Path) -> None:
    async def story(box: Box, receiver: Receiver) -> None:
        receiver.refused = {"One"}
        box.post("One", "Two")
        async with delivering(Deliverer(box.outbox, first_retry_s=0.01)):
            await until(lambda: receiver.tried.count("One") >= 3)
            assert receiver.accepted == ["Two"]
            receiver.refused = set()
            await until(lambda: box.outbox.waiting(box.webhook) == [])
        assert receiver.accepted == ["Two", "One"]
        assert len({h["webhook-id"] for h in receiver.headers}) == 2, "the id stays the same"

    played(tmp_path, story)


def test_a_clock_that_is_set_back_does_not_stop_what_is_tried_again(tmp_path: Path) -> None:
    async def story(box: Box, receiver: Receiver) -> None:
        def clock() -> float:
            return 1_700_000_000.0 - (10 * 365 * 86_400 if receiver.tried else 0)

        receiver.status = 503
        box.post("One")
        async with delivering(Deliverer(box.outbox, clock=clock, first_retry_s=0.01)):
            await until(lambda: len(receiver.tried) >= 1)
            receiver.status = 200
            await until(lambda: box.outbox.waiting(box.webhook) == [])
        assert receiver.accepted == ["One"]
        stamps = [headers["webhook-timestamp"] for headers in receiver.headers]
        assert (stamps[0], stamps[-1]) == ("1700000000", "1384640000")

    played(tmp_path, story)


def test_what_was_not_delivered_is_tried_at_once_after_a_restart(tmp_path: Path) -> None:
    async def story(box: Box, receiver: Receiver) -> None:
        receiver.status = 503
        box.post("One")
        async with delivering(Deliverer(box.outbox)):
            await until(lambda: len(receiver.tried) == 1)
            (id,) = box.outbox.waiting(box.webhook)
            await until(lambda: (box.outbox.get(id) or Delivery("", b"", 0)).attempts == 1)
        receiver.status = 200
        async with delivering(
            Deliverer(box.outbox)
        ):  # the pause is an hour at the most, and 5 s now
            await until(lambda: box.outbox.waiting(box.webhook) == [])
        assert receiver.tried == ["One", "One"]

    played(tmp_path, story)


def test_after_so_many_attempts_a_message_is_given_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(box: Box, receiver: Receiver) -> None:
        receiver.status = 302  # no redirect is followed
        box.post("One")
        (id,) = box.outbox.waiting(box.webhook)
        for _ in range(MAX_ATTEMPTS - 1):
            box.outbox.count_attempt(id)
        async with delivering(Deliverer(box.outbox)):
            await until(lambda: box.outbox.waiting(box.webhook) == [])
        assert receiver.tried == ["One"]
        assert f"message {id} is given up: it answered 302" in caplog.text

    played(tmp_path, story)


def test_pauses_grow_to_an_hour_and_last_about_three_days() -> None:
    pauses = [grown_s(FIRST_RETRY_S, MAX_RETRY_S, n) for n in range(MAX_ATTEMPTS)]
    assert pauses[:3] == [5.0, 10.0, 20.0]
    assert pauses[-1] == 3600.0
    assert 2.5 < sum(pauses) / 86_400 < 3.5


def test_only_a_private_webhook_reaches_what_the_public_internet_cannot(tmp_path: Path) -> None:
    async def story(box: Box, receiver: Receiver) -> None:
        deliverer, message = Deliverer(box.outbox), Delivery("m", b'{"type": "x"}', 0)
        public = await deliverer.send(webhook_at(receiver.url, is_private=False), message)
        assert (public.status, "private = true" in public.error) == (None, True)
        assert receiver.tried == []
        assert (await deliverer.send(box.webhook, message)).is_accepted

    played(tmp_path, story)


SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"


def test_secrets_are_in_files_that_others_cannot_read_or_in_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "atoll.toml")
    by_file = WebhookConfig(url="http://x/", secret_file="key")
    by_variable = WebhookConfig(url="http://y/", secret_env="HOOK_SECRET", private=True)
    (tmp_path / "key").write_text(SECRET + "\n")
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("HOOK_SECRET", SECRET)
    one, two = load_webhooks([by_file, by_variable], path)
    assert (one.key, one.is_private) == (two.key, False)
    assert two.is_private
    for mode in (0o604, 0o644, 0o620):
        (tmp_path / "key").chmod(mode)
        with pytest.raises(ValidationError, match=r"webhooks\[0\]\.secret_file: .*chmod 600"):
            load_webhooks([by_file], path)
    (tmp_path / "key").chmod(0o440)  # as a cluster mounts a Secret
    load_webhooks([by_file], path)
    (tmp_path / "key").unlink()
    with pytest.raises(ValidationError, match=r"webhooks\[0\]\.secret_file: .*No such file"):
        load_webhooks([by_file], path)
    monkeypatch.delenv("HOOK_SECRET")
    with pytest.raises(ValidationError, match=r"webhooks\[0\]\.secret_env: 'HOOK_SECRET'"):
        load_webhooks([by_variable], path)
