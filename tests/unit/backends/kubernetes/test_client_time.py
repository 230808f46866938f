"""The API server's time, whatever the clock here says."""

from __future__ import annotations

from email.utils import formatdate

import pytest

from atoll.backends.kubernetes.client import ServerTime

SERVER = 1_800_000_000.0


class Here:
    """A machine whose wall clock is two hours ahead."""

    def __init__(self) -> None:
        self.passed = 0.0
        self.time = ServerTime(lambda: SERVER + self.passed + 7200, lambda: 77.0 + self.passed)

    def update(self, after_s: float, server_ahead_s: float = 0.0) -> None:
        self.passed += after_s
        self.time.update(formatdate(SERVER + self.passed + server_ahead_s, usegmt=True))


def test_the_servers_clock_counts_from_the_first_answer_on() -> None:
    here = Here()
    assert here.time() == SERVER + 7200
    here.update(10.0)
    assert here.time() == pytest.approx(SERVER + 10, abs=1)
    here.passed += 1000
    assert here.time() == pytest.approx(SERVER + 1010, abs=1)


def test_more_answers_make_it_exact() -> None:
    here = Here()
    for _ in range(30):
        here.update(0.37)
    assert here.time() == pytest.approx(SERVER + here.passed, abs=0.1)


def test_time_never_goes_back_for_an_answer_that_was_long_on_its_way() -> None:
    here = Here()
    here.update(10.0)
    before = here.time()
    here.time.update(formatdate(SERVER + 7, usegmt=True))
    assert here.time() == before


def test_a_server_whose_clock_was_set_back_is_believed() -> None:
    here = Here()
    here.update(10.0)
    here.update(0.0, server_ahead_s=-3600)
    assert here.time() == pytest.approx(SERVER + 10 - 3600, abs=1)


@pytest.mark.parametrize("date", [None, "", "yesterday"])
def test_no_date_changes_nothing(date: str | None) -> None:
    here = Here()
    here.time.update(date)
    assert here.time() == SERVER + 7200
