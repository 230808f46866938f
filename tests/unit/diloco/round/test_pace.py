"""How long a replica waits."""

from __future__ import annotations

from atoll.diloco.round import objects
from atoll.diloco.round.objects import Manifest, Member
from atoll.diloco.round.pace import MAX_GRACE_S, Pace


def manifest(
    round: int, nonces: dict[int, str], missing: tuple[int, ...] = (), spread_s: float = 0.1
) -> Manifest:
    members = tuple(
        Member(rank, objects.upload_key(round, rank, nonce * 16, 1), 1.0)
        for rank, nonce in nonces.items()
    )
    return Manifest(
        round, "0" * 32, "flat", 3, 3, 3, members, missing, spread_s=spread_s, decided_by="a" * 16
    )


def test_the_graces_follow_what_rounds_took() -> None:
    pace = Pace(600)
    assert (pace.straggler_grace_s, pace.owner_grace_s) == (30, 10)
    pace.note_manifest(manifest(0, {0: "a", 1: "b"}, spread_s=5.0))
    pace.note_make(2.0)
    assert (pace.straggler_grace_s, pace.owner_grace_s) == (20, 8)
    pace.note_manifest(manifest(1, {0: "a", 1: "b"}, spread_s=100.0))
    assert pace.straggler_grace_s == MAX_GRACE_S
    for round in range(2, 12):
        pace.note_manifest(manifest(round, {0: "a", 1: "b"}, spread_s=0.0))
    assert pace.straggler_grace_s == 3


def test_no_grace_is_longer_than_half_of_the_timeout() -> None:
    assert Pace(20).straggler_grace_s == 10
    assert Pace(20, grace_s=60).owner_grace_s == 10
    assert Pace(600, grace_s=0.5).straggler_grace_s == 0.5


def test_a_rank_that_lived_but_was_left_out_doubles_the_grace() -> None:
    pace = Pace(600)
    graces = []
    for round in range(0, 12, 3):
        pace.note_manifest(manifest(round, {0: "a", 1: "b", 2: "c"}))
        graces.append(pace.straggler_grace_s)
        pace.note_manifest(manifest(round + 1, {0: "a", 1: "b"}, missing=(2,)))
        pace.note_manifest(manifest(round + 2, {0: "a", 1: "b"}))
    assert graces == [3, 6, 12, 24]


def test_a_rank_that_died_and_was_started_again_does_not() -> None:
    pace = Pace(600)
    for round, nonce in enumerate("cdefcdef"):
        pace.note_manifest(manifest(2 * round, {0: "a", 1: "b", 2: nonce}, spread_s=1.0))
        pace.note_manifest(manifest(2 * round + 1, {0: "a", 1: "b"}, missing=(2,)))
    assert pace.straggler_grace_s == 4


def test_the_first_look_comes_when_the_wait_is_usually_over() -> None:
    pace = Pace(600)
    for _ in range(3):
        assert pace.first_look_s("manifest") == 0
        pace.note_wait("manifest", 10.0, looks=3)
    assert pace.first_look_s("manifest") == 9
    assert pace.first_look_s("means") == 0
    pace.note_wait("manifest", 400.0, looks=2)
    assert pace.first_look_s("manifest") == 9, "one slow round changes nothing"


def test_waits_that_end_with_the_first_look_shrink() -> None:
    pace = Pace(600)
    for _ in range(3):
        pace.note_wait("manifest", 100.0, looks=2)
    for _ in range(12):
        pace.note_wait("manifest", pace.first_look_s("manifest"), looks=1)
    assert pace.first_look_s("manifest") < 30


def test_pauses_grow_with_the_wait_and_are_short_in_a_folder() -> None:
    far, near = Pace(600), Pace(600, is_folder=True)
    assert [far.pause_s(s) for s in (0, 1, 100)] == [0.03, 0.15, 2.0]
    assert [near.pause_s(s) for s in (0, 100)] == [0.005, 0.2]
    for _ in range(3):
        near.note_wait("manifest", 10.0, looks=3)
    assert near.first_look_s("manifest") == 0
