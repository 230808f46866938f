"""Waits over a real network that breaks, and servers that go away and come back."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator

import pytest
from tests.proxy import Proxy

import atoll
from atoll import BelowMinimumWorld
from atoll.core.errors import Denied, NotFound, Temporary
from atoll.sdk import effects

from .conftest import Served


@pytest.fixture
def proxy(served: Served) -> Iterator[Proxy]:
    found = Proxy(served.url)
    yield found
    found.close()


def waiting(
    training: atoll.DistributedTraining, is_async: bool, timeout: float
) -> threading.Thread:
    """A wait in the background; its outcome is an attribute of the thread."""

    class Wait(threading.Thread):
        outcome: object = None

        def run(self) -> None:
            try:
                if is_async:
                    self.outcome = asyncio.run(training.wait_until_complete_async(timeout))
                else:
                    self.outcome = training.wait_until_complete(timeout)
            except Exception as error:
                self.outcome = error

    thread = Wait()
    thread.start()
    return thread


@pytest.mark.parametrize("is_async", [False, True])
def test_a_wait_survives_cut_connections(served: Served, proxy: Proxy, is_async: bool) -> None:
    served.create("a")
    with atoll.Client(proxy.url, "token-one") as client:
        wait = waiting(client.get("a"), is_async, 60)
        for _ in range(3):
            served.wait_for(lambda: len(served.streams) == 1)
            proxy.is_refusing = True
            proxy.cut()
            before = proxy.connections
            served.wait_for(lambda b=before: proxy.connections > b)  # type: ignore[misc]
            proxy.is_refusing = False
            served.wait_for(lambda: len(served.streams) == 1)
        served.see("a", "succeeded", 2)
        wait.join(30)
        assert wait.outcome.ready == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failure_while_the_line_was_cut_is_seen(
    served: Served, proxy: Proxy, is_async: bool
) -> None:
    served.create("a")
    with atoll.Client(proxy.url, "token-one") as client:
        wait = waiting(client.get("a"), is_async, 60)
        served.wait_for(lambda: len(served.streams) == 1)
        proxy.is_refusing = True
        proxy.cut()
        served.see("a", "failed")
        proxy.is_refusing = False
        wait.join(30)
        assert isinstance(wait.outcome, BelowMinimumWorld)  # type: ignore[attr-defined]
        assert wait.outcome.timeout == 60  # type: ignore[attr-defined]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_silent_line_does_not_hold_a_wait_past_its_deadline(
    served: Served, proxy: Proxy, is_async: bool
) -> None:
    """The heartbeats stop in the middle; the last read goes unanswered too."""
    served.create("a")
    with atoll.Client(proxy.url, "token-one") as client:
        wait = waiting(client.get("a"), is_async, 2)
        served.wait_for(lambda: len(served.streams) == 1)
        proxy.is_silent = True
        wait.join(30)
        assert isinstance(wait.outcome, BelowMinimumWorld)  # type: ignore[attr-defined]
        assert wait.outcome.timeout == 2  # type: ignore[attr-defined]


def test_nobody_there_is_said_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "PATIENCE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with atoll.Client(f"http://127.0.0.1:{port}", "t") as client:
        with pytest.raises(Temporary, match=f"cannot reach 127.0.0.1:{port}"):
            client.get("a")


def test_a_token_that_is_not_known_is_denied(served: Served) -> None:
    for token in (None, "wrong"):
        with atoll.Client(served.url, token) as client, pytest.raises(Denied):
            client.list()


def test_a_training_removed_while_waited_for(served: Served) -> None:
    served.create("a")
    with served.sdk() as client:
        wait = waiting(client.get("a"), False, 60)
        served.wait_for(lambda: len(served.streams) == 1)
        served.remove("a")
        wait.join(30)
        assert isinstance(wait.outcome, NotFound)  # type: ignore[attr-defined]


def test_followed_logs_go_on_over_a_restart_without_a_line_lost_or_repeated(
    served: Served, proxy: Proxy
) -> None:
    served.create("a")
    with atoll.Client(proxy.url, "token-one") as client:
        lines: list[str] = []
        reader = threading.Thread(
            target=lambda: lines.extend(line.text for line in client.get("a").stream_logs())
        )
        reader.start()
        served.wait_for(lambda: len(served.streams) == 1)
        proxy.cut()
        served.wait_for(lambda: len(served.streams) == 1)
        served.see("a", "succeeded", 2)
        reader.join(30)
        assert sorted(lines) == sorted(["line 0", "line 1", "line 2"] * 2)


def test_a_wait_that_fails_leaves_a_training_that_can_be_found(served: Served) -> None:
    with served.sdk() as client:
        with pytest.raises(BelowMinimumWorld) as caught:
            client.deploy_distributed("f", command=["true"], wait="target", timeout=0.1)
        assert caught.value.required_min == 1
        assert "client.get('f')" in caught.value.__notes__[0]
        assert client.get("f").phase == ""
