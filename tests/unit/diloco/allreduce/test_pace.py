"""A replica that joins waits as those do who know the run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from obstore.store import MemoryStore

from atoll.diloco.allreduce import settle
from atoll.diloco.allreduce.keys import Keys
from atoll.diloco.allreduce.layout import describe
from atoll.diloco.allreduce.manifest import Manifest
from atoll.diloco.allreduce.pace import FIRST_OWNER_GRACE_S, MIN_GRACE_S, History, poll_pause
from atoll.diloco.allreduce.settle import Decider, Decision, Me
from atoll.diloco.allreduce.start import Start
from atoll.diloco.codecs import get_codec
from atoll.objectstore import ObjectStore


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
    manifest = Manifest("run", 1, 0, b"", [], [], [], [], "me")
    assert msgspec.structs.replace(manifest, owner_grace_s=3.0).digest == manifest.digest


def test_a_look_that_costs_nothing_comes_soon_and_none_is_ever_skipped() -> None:
    pauses = [poll_pause(elapsed, 60.0, is_cheap=True) for elapsed in (0.0, 0.1, 1.0, 1000.0)]
    assert pauses == [0.005, pytest.approx(0.01), pytest.approx(0.1), 0.2]


def test_pauses_are_no_longer_than_was_asked_for() -> None:
    assert max(poll_pause(waited, 0.0) for waited in range(1000)) == 2.0
    history = History(poll_s=0.25)
    assert max(history.pause_s(waited, 0.0) for waited in range(1000)) == 0.25
    assert history.pause_s(1000.0, 0.0, is_cheap=True) == 0.2


@pytest.mark.parametrize(("lead_s", "slept"), [(0.0, [2.0]), (8.0, [1.0]), (10.0, [])])
def test_a_rank_whose_upload_took_long_looks_for_the_roster_sooner(
    lead_s: float, slept: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploads over one link are there at about the same time, whoever's took longest."""
    history, pauses = History(), list[float]()
    blobs, keys = ObjectStore(MemoryStore(), "memory"), Keys("run")
    layout = describe([np.ones(4)], shards=2, codec="fp32", down_codec="fp32", name="")
    decider = Decider(
        blobs, keys, Me(1, 2, 1, "me", 600.0), history, ThreadPoolExecutor(1), Start(1)
    )
    history.note_wait("manifest ", 10.0)
    decider.write(keys.manifest(3, 0), decider.void(3, 0, "decided"))
    monkeypatch.setattr(settle.time, "sleep", pauses.append)
    decision = Decision(3, 0, 1, {0, 1}, lead_s=lead_s)
    manifest = decider.settle(decision, layout, get_codec("fp32"))
    assert isinstance(manifest, Manifest)
    assert pauses == pytest.approx(slept)
