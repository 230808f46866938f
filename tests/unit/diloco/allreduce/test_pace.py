"""A replica that joins waits as those do who know the run."""

from __future__ import annotations

import msgspec
import pytest

from atoll.diloco.allreduce.pace import FIRST_OWNER_GRACE_S, MIN_GRACE_S, History, poll_pause
from atoll.diloco.allreduce.roster import Roster


def test_a_newcomer_waits_for_an_owner_as_long_as_the_others_do() -> None:
    old, new = History(), History()
    assert old.advice() == 0
    old.note_reduce(0.1)
    assert new.owner_grace(0.0) == FIRST_OWNER_GRACE_S
    new.note_advice(old.advice())
    assert new.owner_grace(0.0) == old.owner_grace(0.0) == MIN_GRACE_S


def test_a_newcomer_to_a_slow_run_is_as_patient_as_the_others() -> None:
    old, new = History(), History()
    old.note_reduce(20.0)
    new.note_advice(old.advice())
    assert new.owner_grace(0.0) == old.owner_grace(0.0) == 80.0
    assert new.advice() == 80.0


def test_what_a_replica_has_seen_itself_counts_more_than_advice() -> None:
    history = History()
    history.note_advice(80.0)
    history.note_reduce(1.0)
    assert history.owner_grace(0.0) == 4.0


def test_advice_is_no_part_of_what_a_roster_is() -> None:
    roster = Roster("run", 1, 0, b"", [], [], [], [], "me")
    assert msgspec.structs.replace(roster, owner_grace_s=3.0).digest == roster.digest


def test_a_look_that_costs_nothing_comes_soon_and_none_is_ever_skipped() -> None:
    pauses = [poll_pause(elapsed, 60.0, is_cheap=True) for elapsed in (0.0, 0.1, 1.0, 1000.0)]
    assert pauses == [0.005, pytest.approx(0.01), pytest.approx(0.1), 0.2]
