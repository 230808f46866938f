"""Watches: every change, in order, from any version, until the server says goodbye."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from msgspec.structs import replace

from atoll.core.ports import Change
from atoll.sdk.wire import Parser
from atoll.server.http import operations

from .conftest import Served


def changes(http: httpx2.Client, path: str) -> Iterator[Change]:
    parser = Parser()
    with http.stream("GET", path) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for chunk in answer.iter_bytes():
            yield from parser.feed(chunk)


def test_every_change_comes_once_and_in_order_while_they_are_written(served: Served) -> None:
    made = served.create("a")
    start = made["resourceVersion"]

    def write() -> None:
        for number in range(200):
            served.see("a", "ready" if number % 2 else "pending", number % 3)
        served.see("a", "succeeded", 2)

    writer = threading.Thread(target=write)
    writer.start()
    versions = []
    for change in changes(served.http, f"/v1/trainings/a?watch&after={start}"):
        versions.append(change.version)
        if change.training.status.phase == "succeeded":
            break
    writer.join()
    assert versions == list(range(start + 1, start + 202))


def test_a_watch_can_be_taken_up_where_it_was_left(served: Served) -> None:
    start = served.create("a")["resourceVersion"]
    for number in range(20):
        served.see("a", "ready", number % 3)
    seen: list[int] = []
    at = start
    while len(seen) < 20:
        for change in changes(served.http, f"/v1/trainings/a?watch&after={at}"):
            seen.append(change.version)
            at = change.version
            if len(seen) % 7 == 0:
                break  # the connection is dropped here
            if len(seen) == 20:
                break
    assert seen == list(range(start + 1, start + 21))


def test_last_event_id_is_honoured_as_browsers_send_it(served: Served) -> None:
    served.create("a")
    second = served.see("a", "ready", 1)
    served.see("a", "ready", 2)
    headers = {"Last-Event-ID": str(second.resource_version)}
    with served.http.stream("GET", "/v1/trainings/a?watch&timeout=0.3", headers=headers) as answer:
        found = list(Parser().feed(b"".join(answer.iter_bytes())))
    assert [change.training.status.world.ready for change in found] == [2]


def test_without_a_version_what_is_there_comes_first(served: Served) -> None:
    served.create("a")
    served.create("b")
    served.see("b", "ready", 1)
    found = list(changes(served.http, "/v1/trainings?watch&timeout=0.3"))
    assert [change.training.name for change in found] == ["a", "b"]
    one = list(changes(served.http, "/v1/trainings/b?watch&timeout=0.3"))
    assert [change.training.status.world.ready for change in one] == [1]


def test_a_list_then_a_watch_from_its_version_has_no_gap(served: Served) -> None:
    served.create("a")
    version = served.http.get("/v1/trainings").json()["resourceVersion"]
    served.create("b")
    served.see("a", "ready", 1)
    found = list(changes(served.http, f"/v1/trainings?watch&after={version}&timeout=0.3"))
    assert [change.training.name for change in found] == ["b", "a"]


def test_removal_is_told_with_the_last_state(served: Served) -> None:
    start = served.create("a")["resourceVersion"]
    served.see("a", "succeeded", 2)
    served.remove("a")
    found = list(changes(served.http, f"/v1/trainings/a?watch&after={start}&timeout=0.3"))
    assert [(c.is_removed, c.training.status.phase.value) for c in found] == [
        (False, "succeeded"),
        (True, "succeeded"),
    ]


def test_a_version_that_is_no_longer_kept_is_gone(tmp_path: Path) -> None:
    served = Served(tmp_path, log_bytes=2000)
    try:
        start = served.create("a")["resourceVersion"]
        for number in range(40):
            served.see("a", "ready", number % 3)
        for path in ("/v1/trainings/a", "/v1/trainings"):
            answer = served.http.get(f"{path}?watch&after={start}")
            told = answer.json()
            assert (answer.status_code, told["type"]) == (410, "urn:atoll:Gone")
            assert told["version"] == start
            assert told["oldest"] > start
            url = f"{path}?watch&after={told['oldest']}&timeout=0.2"
            assert list(changes(served.http, url))
    finally:
        served.close()


def test_an_idle_watch_beats_and_ends_at_its_timeout(served: Served) -> None:
    served.create("a")
    with served.http.stream("GET", "/v1/trainings/a?watch&timeout=1") as answer:
        text = b"".join(answer.iter_bytes()).decode()
    assert text.count(": heartbeat") >= 3


def test_a_watcher_that_goes_away_is_forgotten(served: Served) -> None:
    served.create("a")
    with served.http.stream("GET", "/v1/trainings/a?watch") as answer:
        chunks = answer.iter_bytes()  # dropped, it would close the connection
        next(chunks)
        assert len(served.streams) == 1
    served.wait_for(lambda: len(served.streams) == 0)


@pytest.mark.parametrize("path", ["/v1/trainings/a?watch", "/v1/trainings/a/logs?follow=true"])
def test_shutdown_ends_open_streams_at_once(served: Served, path: str) -> None:
    served.create("a")
    ended = threading.Event()
    text: list[bytes] = []

    def read(ready: Any) -> None:
        with served.http.stream("GET", path) as answer:
            for chunk in answer.iter_bytes():
                text.append(chunk)
                ready.set()
        ended.set()

    ready = threading.Event()
    reader = threading.Thread(target=read, args=(ready,))
    reader.start()
    assert ready.wait(60)
    served.loop.call_soon_threadsafe(served.streams.close)
    assert ended.wait(60)
    reader.join()
    if "logs" in path:
        assert b"".join(text).endswith(b'{"cut":true}\n')


def test_followed_logs_end_with_the_training(served: Served) -> None:
    served.create("a")
    lines: list[str] = []

    def read() -> None:
        with served.http.stream("GET", "/v1/trainings/a/logs?follow=true") as answer:
            lines.extend(line for line in answer.iter_lines() if line)

    reader = threading.Thread(target=read)
    reader.start()
    served.wait_for(lambda: len(served.streams) == 1)
    served.see("a", "succeeded", 2)
    reader.join(60)
    assert not reader.is_alive()
    assert len(lines) == 6


def test_a_change_is_encoded_once_however_many_watch(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    real = operations.event_bytes

    def counting(change: Change) -> bytes:
        encoded.append(change.version)
        return real(change)

    monkeypatch.setattr(operations, "event_bytes", counting)
    start = served.create("a")["resourceVersion"]
    seen: list[list[int]] = []

    def follow() -> None:
        found = changes(served.http, f"/v1/trainings/a?watch&after={start}")
        seen.append([next(found).version for _ in range(3)])

    watchers = [threading.Thread(target=follow) for _ in range(10)]
    for watcher in watchers:
        watcher.start()
    served.wait_for(lambda: len(served.streams) == 10)
    for number in range(3):
        served.see("a", "ready", number)
    for watcher in watchers:
        watcher.join(30)
    assert seen == [[start + 1, start + 2, start + 3]] * 10
    assert encoded == [start + 1, start + 2, start + 3]


def test_a_quiet_training_is_watched_though_its_version_is_no_longer_in_the_log(
    tmp_path: Path,
) -> None:
    served = Served(tmp_path, log_bytes=2000)
    try:
        start = served.create("quiet")["resourceVersion"]
        served.create("busy")
        for number in range(60):
            served.see("busy", "ready", number % 3)
        watch = changes(served.http, f"/v1/trainings/quiet?watch&after={start}")
        timer = threading.Timer(0.2, served.see, ["quiet", "ready", 2])
        timer.start()
        assert next(watch).training.status.world.ready == 2
        timer.join()
        gone = served.http.get(f"/v1/trainings/quiet?watch&after={start}")
        assert gone.status_code == 410
    finally:
        served.close()


def test_the_present_comes_page_by_page_and_nothing_goes_back_in_time(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        served.create(name)
    real = served.store.page
    pages = []

    async def page(namespace: str, **options: Any) -> Any:
        """One training a page; what is written between two pages is read on the second."""
        if pages:
            one = await served.store.get(("one", "c"))
            await served.store.update_status(one, replace(one.status, message=f"{len(pages)}"))
        pages.append(options["after"])
        return await real(namespace, **{**options, "limit": 1})

    monkeypatch.setattr(served.store, "page", page)
    found = list(changes(served.http, "/v1/trainings?watch&timeout=0.5"))
    assert pages == ["", "a", "b"]
    assert [(c.training.name, c.training.status.message) for c in found] == [
        ("a", ""),
        ("b", ""),
        ("c", "2"),
    ]
