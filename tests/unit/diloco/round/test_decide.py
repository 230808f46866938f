"""Who is in a round: the decision on what one look has shown."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from atoll.diloco.data import ledger as ledgers
from atoll.diloco.round import decide, objects
from atoll.diloco.round.decide import Decision, Terms
from atoll.diloco.round.effects import RoundConfig
from atoll.diloco.round.objects import Manifest, Member, UploadHeader

LAYOUT = "1" * 32
TERMS = Terms(round=3, chain="c" * 32, layout=LAYOUT, world=4, ledger=None)


def header(rank: int, **changes: Any) -> UploadHeader:
    whole = UploadHeader(
        rank, f"{rank:016x}", TERMS.chain, 1.0, LAYOUT, TERMS.world, processes=1, steps=5
    )
    return msgspec.structs.replace(whole, **changes)


def key(rank: int, round: int = 3, serial: int = 1) -> str:
    return objects.upload_key(round, rank, f"{rank:016x}", serial)


def look(*headers: UploadHeader, more: tuple[str, ...] = ()) -> decide.Look:
    listing = [(key(each.rank), 10.0 + at) for at, each in enumerate(headers)]
    bodies = {key(each.rank): each for each in headers}
    return decide.examine(listing + [(k, 0.0) for k in more], bodies, TERMS, None, "launch")


def decided(there: set[int], expected: set[int], needs: int = 2, **named: Any) -> Decision:
    facts = {"is_grace_over": False, "ended": {}, "world": 4, **named}
    return decide.decide_manifest(there, expected, needs=needs, **facts)


def test_all_that_are_expected_are_there() -> None:
    assert decided({0, 1, 2}, {0, 1, 2}) == ((0, 1, 2), (), True, 2)


def test_a_missing_rank_is_waited_for_until_the_grace_is_over() -> None:
    assert decided({0, 1}, {0, 1, 2}) == (None, (2,), True, 2)
    assert decided({0, 1}, {0, 1, 2}, is_grace_over=True) == ((0, 1), (2,), True, 2)


def test_without_a_quorum_no_grace_helps() -> None:
    assert decided({0}, {0, 1}, is_grace_over=True, is_timeout=True).ranks is None


@pytest.mark.parametrize(("how", "is_enough"), [("done", True), ("failed", False), ("left", False)])
def test_ended_ranks_are_not_waited_for_and_only_done_ones_lower_the_quorum(
    how: str, is_enough: bool
) -> None:
    decision = decided({0}, {0, 1}, needs=2, world=2, ended={1: how})
    assert decision.missing == ()
    assert decision.has_quorum == is_enough


def test_the_first_round_waits_for_all_that_were_started_together() -> None:
    together = 4
    assert decided({0, 1, 2}, {0}, needs=1, together=together, is_grace_over=True).ranks is None
    late = decided({0, 1, 2}, {0}, needs=1, together=together, is_grace_over=True, is_timeout=True)
    assert late.ranks == (0, 1, 2)
    half = decided({0, 1}, {0}, needs=1, together=together, is_grace_over=True, is_timeout=True)
    assert half.ranks is None, "half is no majority"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"layout": "2" * 32}, "layout"),
        ({"world": 5}, "world"),
        ({"chain": "d" * 32}, "outdated"),
        ({"claim": ((5, 3),)}, "claims data"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(changes: dict[str, Any], word: str) -> None:
    seen = look(header(0), header(1, **changes))
    assert list(seen.there) == [0]
    assert [each.rank for each in seen.refused] == [1]
    assert word in seen.refused[0].reason


def test_a_claim_outside_the_hold_is_refused() -> None:
    terms = ledgers.Terms(None, 1, 0, False, "", 2, first=4, patience=2, shelf=16)
    good = TERMS._replace(ledger=ledgers.begin(terms), world=2)
    words = {"world": 2, "data": terms.digest}
    assert decide.find_fault(header(0, claim=((0, 4),), **words), good) == ""
    assert "claims" in decide.find_fault(header(0, claim=((2, 6),), **words), good)


def test_of_two_uploads_of_a_rank_the_newest_counts() -> None:
    listing = [(key(0, serial=1), 20.0), (key(0, serial=2), 10.0)]
    bodies = {key(0, serial=1): header(0, weight=1.0), key(0, serial=2): header(0, weight=2.0)}
    seen = decide.examine(listing, bodies, TERMS, None, "launch")
    assert seen.there[0].header.weight == 1.0


def test_uploads_to_a_later_round_and_marks_are_seen() -> None:
    mark = objects.ended_key("launch", 2, "failed")
    seen = look(header(0), more=(key(1, round=4), mark, objects.ended_key("other", 3, "done")))
    assert seen.later == [key(1, round=4)]
    assert seen.ended == {2: "failed"}
    assert not look(header(0), more=(key(1, round=2), "upload/²/x")).later


def test_a_weight_far_beyond_the_others_is_capped() -> None:
    assert decide.cap_weights({0: 1.0, 1: 2.0, 2: 1e9}) == {0: 1.0, 1: 2.0, 2: 200.0}
    assert decide.cap_weights({0: 0.0, 1: 3.0, 2: 1e9}) == {0: 0.0, 1: 3.0, 2: 300.0}
    assert decide.cap_weights({0: 0.0}) == {0: 0.0}


def make(seen: decide.Look, **changes: Any) -> Manifest:
    decision = Decision(tuple(sorted(seen.there)), (), True)
    config = RoundConfig(0, 4, "a" * 16, TERMS.layout, shards=4, cells=(8,))
    return decide.make_manifest(seen, decision, TERMS, replace(config, **changes))


def test_one_or_two_members_read_each_other_directly() -> None:
    assert make(look(header(0), header(1))).plan == "direct"
    assert make(look(header(0), header(1), header(2))).plan == "flat"
    assert make(look(header(0)), has_direct=False).plan == "flat"


def test_one_that_leaves_is_a_member_without_a_shard() -> None:
    manifest = make(look(header(0), header(1, is_leaving=True), header(2)))
    assert [member.has_left for member in manifest.members] == [False, True, False]
    assert {manifest.owner_of(name) for name in manifest.names} == {0, 2}


def test_the_spread_is_from_the_quorum_to_the_last() -> None:
    assert make(look(header(0), header(1), header(2)), quorum=2).spread_s == 1.0


def test_turns_follow_the_members_of_the_last_round_and_idle_ranks_come_last() -> None:
    last = Manifest(2, "0" * 32, "flat", 4, 4, 4, (Member(3, "u", 1.0), Member(1, "v", 1.0)))
    turns = [decide.find_turn(last, rank, 4, is_idle=False) for rank in range(4)]
    assert turns[3] == 0
    assert turns[1] == 1
    assert min(turns[0], turns[2]) > 1
    assert decide.find_turn(last, 3, 4, is_idle=True) > 1
    assert decide.find_turn(None, 2, 4, is_idle=False) == 2


def test_members_stand_in_for_an_owner_before_others_do() -> None:
    manifest = make(look(header(0), header(1), header(2)))
    name = "00000.0"
    owner = manifest.owner_of(name)
    places = {rank: decide.find_turn_after(manifest, name, rank) for rank in range(4)}
    assert places[owner or 0] == 0
    assert sorted(places[rank] for rank in range(3)) == [0, 1, 2]
    assert places[3] > 2


def test_a_failure_before_this_replica_was_opened_does_not_count_and_one_since_does() -> None:
    mark = objects.ended_key("launch", 2, "failed")
    for opened, ended in ((50.0, {}), (5.0, {2: "failed"})):
        terms = TERMS._replace(opened=opened)
        assert decide.examine([(mark, 10.0)], {}, terms, None, "launch").ended == ended
    terms = TERMS._replace(opened=50.0)
    known = objects.ended_key("abc", 2, "failed")
    assert decide.examine([(known, 10.0)], {}, terms, None, "abc").ended == {2: "failed"}


def test_who_shares_other_data_is_refused_but_for_an_offer_of_nothing() -> None:
    shared = TERMS._replace(
        ledger=ledgers.begin(ledgers.make_terms(9, period=1, world=4, fragments=1))
    )
    digest = shared.ledger.terms.digest if shared.ledger else ""
    assert decide.find_difference(header(0), shared) == "it shares other data"
    assert decide.find_difference(header(0, data=digest), TERMS) == "it shares other data"
    assert decide.find_difference(header(0, data=digest), shared) == ""
    assert decide.find_difference(header(0, weight=0.0), shared) == ""
