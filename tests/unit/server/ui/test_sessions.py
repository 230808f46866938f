"""Sessions: a code signs in once, a cookie is known by its hash alone, and both end."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.server.ui import sessions
from atoll.server.ui.sessions import CODE_S, IDLE_S, LONGEST_S, Sessions, csrf_of, is_csrf_of


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
    cookie = book.redeem(code)
    assert cookie is not None
    session = book.find(cookie)
    assert session is not None
    assert (session.namespace, session.token) == ("team", "hash")
    assert book.redeem(code) is None
    late = book.new_code("team", "hash")
    clock.now += CODE_S
    assert book.redeem(late) is None
    assert book.redeem("made up") is None


def test_a_session_ends_when_it_is_idle_and_after_a_week_in_any_case(clock: Clock) -> None:
    book = Sessions("plane", now=clock)
    cookie = book.begin("team", "hash")
    clock.now += IDLE_S
    assert book.find(cookie) is None
    used = book.begin("team", "hash")
    for _ in range(int(LONGEST_S / (IDLE_S / 2)) - 1):
        clock.now += IDLE_S / 2
        assert book.find(used) is not None
    clock.now += IDLE_S / 2
    assert book.find(used) is None


def test_sessions_outlive_the_process_and_the_file_holds_no_cookie(
    clock: Clock, tmp_path: Path
) -> None:
    path = tmp_path / "sessions.json"
    cookie = Sessions("plane", path, clock).begin("team", "hash")
    assert cookie not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    again = Sessions("plane", path, clock)
    assert again.find(cookie) is not None
    again.end(cookie)
    assert Sessions("plane", path, clock).find(cookie) is None


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', '{"x": ["a"]}'])
def test_a_file_that_is_damaged_signs_everybody_out_and_no_more(
    content: str, tmp_path: Path
) -> None:
    path = tmp_path / "sessions.json"
    path.write_text(content)
    book = Sessions("plane", path)
    assert book.find(book.begin("team", "hash")) is not None


def test_revoking_ends_the_sessions_of_one_namespace_only(clock: Clock) -> None:
    book = Sessions("plane", now=clock)
    mine, other = book.begin("team", "a"), book.begin("others", "b")
    assert book.end_all("team") == 1
    assert book.find(mine) is None
    assert book.find(other) is not None


def test_codes_and_sessions_are_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MOST", 3)
    book = Sessions("plane", now=clock)
    codes = [book.new_code("team", "a") for _ in range(5)]
    assert [book.redeem(code) is not None for code in codes] == [False, False, True, True, True]
    cookies = [book.begin("team", "a") for _ in range(5)]
    assert sum(book.find(cookie) is not None for cookie in cookies) == 3


def test_two_control_planes_have_cookies_of_their_own() -> None:
    assert Sessions("one").cookie != Sessions("two").cookie
    assert Sessions("one").host.endswith(".localhost")


def test_the_word_of_a_page_belongs_to_its_cookie() -> None:
    assert is_csrf_of("cookie", csrf_of("cookie"))
    assert not is_csrf_of("cookie", csrf_of("other"))
    assert not is_csrf_of("cookie", "")
