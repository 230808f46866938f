"""A store that does not answer is warned of after 3 s, and again; one that answers never."""

from __future__ import annotations

import socket
import threading

import pytest

from atoll.core.errors import Temporary
from atoll.objectstore import ObjectStore, idle
from atoll.objectstore.idle import IdleTracker

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


def test_a_silent_store_is_warned_of_after_3_s_and_again() -> None:
    store = IdleTracker("s3://bucket/run", KEYS)
    request = store.begin(0, now=100.0)
    assert store.warning(102.9) == ""
    assert store.warning(103.0) == "s3://bucket/run: no answer for 3 s; still trying"
    assert store.warning(105.9) == ""
    store.fail("Connection refused")
    assert "no answer for 6 s: Connection refused; still trying" in store.warning(106.0)
    assert [at for at in range(107, 161) if store.warning(float(at))] == [112, 124, 148]
    words = store.end(request, 163.0, is_answer=True)
    assert words == "s3://bucket/run: answers again, after 63 s"
    assert store.warning(500.0) == ""


def test_many_requests_that_wait_are_one_line() -> None:
    store = IdleTracker("s3://b", KEYS)
    for _ in range(50):
        store.begin(0, now=0.0)
    assert sum(bool(store.warning(at / 10)) for at in range(59)) == 1


def test_a_store_that_answers_others_is_not_silent() -> None:
    store = IdleTracker("s3://b", KEYS)
    store.begin(0, now=0.0)
    for at in range(1, 60):
        other = store.begin(0, now=float(at))
        assert store.warning(at + 0.9) == ""
        assert store.end(other, at + 0.9, is_answer=True) == ""


def test_a_large_upload_has_the_time_it_needs() -> None:
    store = IdleTracker("s3://b", KEYS)
    store.begin(2_560_000, now=0.0)
    assert store.warning(12.9) == ""
    assert store.warning(13.0)


def test_a_download_that_makes_progress_is_not_idle() -> None:
    store = IdleTracker("s3://b", KEYS)
    store.begin(0, now=0.0)
    for at in range(60):
        assert store.progress(float(at)) == ""
        assert store.warning(at + 0.9) == ""
    assert store.warning(62.0)
    assert store.progress(70.0) == "s3://b: answers again, after 11 s"


def test_keys_that_are_missing_are_named() -> None:
    store = IdleTracker("s3://b", {"AWS_ACCESS_KEY_ID": "a"})
    store.begin(0, now=0.0)
    assert "not set: AWS_SECRET_ACCESS_KEY; still trying" in store.warning(3.0)


def test_a_request_that_hangs_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that accepts and says nothing: nothing is raised while it is waited for."""
    monkeypatch.setattr(idle, "FIRST_WARNING_S", 0.01)
    monkeypatch.setattr(idle, "CHECK_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for name, value in KEYS.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{mute.getsockname()[1]}")
        objects = ObjectStore.open("s3://bucket/run", patience_s=0.0)
        warned = threading.Event()
        monkeypatch.setattr(idle.log, "warning", lambda *words: warned.set())

        def ask() -> None:
            with pytest.raises(Temporary):
                objects.list("x")

        asking = threading.Thread(target=ask)
        asking.start()
        assert warned.wait(60)
        connection, _ = mute.accept()
        connection.close()
    asking.join(60)


def test_an_error_of_the_store_is_one_line_without_its_debug_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(Temporary) as raised:
        ObjectStore.open("s3://bucket/run", patience_s=0.0).list("x")
    assert "\n" not in str(raised.value)
    assert str(raised.value).endswith("Connection refused")
    assert raised.value.__suppress_context__
    assert raised.value.__cause__ is None
