"""Sessions: a code signs in once, a cookie is known by its hash alone, and both end."""

from __future__ import annotations

import re

import pytest

from atoll.core.errors import Denied
from atoll.server.ui import sessions
from atoll.server.ui.sessions import CODE_S, IDLE_S, MAX_S, Sessions


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_code_signs_in_once_and_within_a_minute(clock: Clock) -> None:
    book = Sessions("plane", now=clock)
    code = book.new_code("team", "hash")
    session = book.find(book.redeem(code))
    assert session is not None
    assert (session.namespace, session.token) == ("team", "hash")
    late = book.new_code("team", "hash")
    clock.now += CODE_S
    for unknown in (late, "made up"):
        with pytest.raises(Denied, match="unknown here or older than a minute: run 'atoll ui'"):
            book.redeem(unknown)


def test_a_code_that_was_used_says_when_and_what_to_do(clock: Clock) -> None:
    book = Sessions("plane", now=clock)
    code = book.new_code("team", "hash")
    book.redeem(code)
    for seconds in (17, 4000):
        clock.now += seconds
        with pytest.raises(Denied) as refused:
            book.redeem(code)
        words = r"already used at \d\d:\d\d:\d\d UTC, \d+ s ago.*run 'atoll ui --revoke'"
        assert re.search(words, str(refused.value))
    assert "4017 s ago" in str(refused.value)


def test_revoking_ends_codes_that_wait_too(clock: Clock) -> None:
    book = Sessions("plane", now=clock)
    code = book.new_code("team", "hash")
    book.end_all("team")
    with pytest.raises(Denied):
        book.redeem(code)


def test_a_session_ends_when_it_is_idle_and_after_a_week_in_any_case(clock: Clock) -> None:
    book = Sessions("plane", now=clock)
    cookie = book.begin("team", "hash")
    clock.now += IDLE_S
    assert book.find(cookie) is None
    used = book.begin("team", "hash")
    for _ in range(int(MAX_S / (IDLE_S / 2)) - 1):
        clock.now += IDLE_S / 2
        assert book.find(used) is not None
    clock.now += IDLE_S / 2
    assert book.find(used) is None


def test_a_session_ends_with_its_control_plane(clock: Clock) -> None:
    cookie = Sessions("plane", now=clock).begin("team", "hash")
    assert Sessions("plane", now=clock).find(cookie) is None


def test_revoking_ends_the_sessions_of_one_namespace_only(clock: Clock) -> None:
    book = Sessions("plane", now=clock)
    mine, other = book.begin("team", "a"), book.begin("others", "b")
    assert book.end_all("team") == 1
    assert book.find(mine) is None
    assert book.find(other) is not None


def test_codes_and_sessions_are_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_ENTRIES", 3)
    book = Sessions("plane", now=clock)
    codes = [book.new_code("team", "a") for _ in range(5)]
    for code in codes[:2]:
        with pytest.raises(Denied):
            book.redeem(code)
    assert all(book.redeem(code) for code in codes[2:])
    cookies = [book.begin("team", "a") for _ in range(5)]
    assert sum(book.find(cookie) is not None for cookie in cookies) == 3


def test_a_control_plane_keeps_a_name_that_others_cannot_guess() -> None:
    assert Sessions("one").host == Sessions("one").host
    assert Sessions("one").host != Sessions("two").host
    assert Sessions("one").cookie != Sessions("two").cookie
    assert Sessions().host != Sessions().host
    assert Sessions("one").host.endswith(".localhost")
    assert "one" not in Sessions("one").host


def test_the_word_of_a_page_is_not_made_from_its_cookie(clock: Clock) -> None:
    book = Sessions("plane", now=clock)
    sessions = [book.find(book.begin("team", "hash")) for _ in range(2)]
    words = {session.csrf for session in sessions if session is not None}
    assert len(words) == 2
    assert all(len(word) >= 32 for word in words)
