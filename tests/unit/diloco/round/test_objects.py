"""Keys and small objects of a round, with what a stranger may write into the bucket."""

from __future__ import annotations

import pytest

from atoll.diloco.round import objects
from atoll.diloco.round.objects import DamagedObject, Manifest, Member, Outcome, UploadHeader

NONCE = "0123456789abcdef"


def manifest(**changes: object) -> Manifest:
    facts: dict[str, object] = {
        "round": 7,
        "chain": objects.ZERO,
        "plan": "flat",
        "shards": 3,
        "cells": 7,
        "world": 3,
        "members": tuple(
            Member(rank, objects.upload_key(7, rank, NONCE, 1), 1.0, processes, steps=1)
            for rank, processes in ((0, 1), (1, 2), (2, 3))
        ),
    }
    return Manifest(**(facts | changes))  # type: ignore[arg-type]


def test_keys_are_parsed_as_they_are_made() -> None:
    key = objects.upload_key(12, 3, NONCE, 4)
    assert objects.parse_upload(key) == (12, 3, NONCE, 4)
    assert objects.parse_ended(objects.ended_key("a-1", 3, "left"), "a-1") == (3, "left")
    assert objects.parse_ended(objects.ended_key("a-1", 3, "left"), "other") is None
    assert objects.parse_checkpoint(objects.checkpoint_key(9, objects.ZERO)) == (9, objects.ZERO)
    for made in (
        key,
        objects.part_key(key, 2),
        objects.manifest_key(12),
        objects.mean_key(12, "00001.0"),
        objects.receipt_key(12, "00001"),
        objects.checkpoint_key(12, objects.ZERO),
        objects.piece_key(12, NONCE, 3),
    ):
        assert objects.parse_round(made) == 12


@pytest.mark.parametrize(
    "key",
    [
        "upload/²2222222/00003.0123456789abcdef-000001",
        "upload/00000012/٣٣٣٣٣.0123456789abcdef-000001",
        "upload/123/00003.0123456789abcdef-000001",
        "upload/00000012/00003.0123456789ABCDEF-000001",
        "upload/00000012/00003.0123456789abcdef-000001\n",
        "upload/00000012/",
        "manifest/²",
    ],
)
def test_keys_that_no_replica_makes_are_passed_over(key: str) -> None:
    assert objects.parse_upload(key) is None
    assert objects.parse_checkpoint(key) is None


def test_a_round_is_eight_ascii_digits() -> None:
    for key in ("manifest/²2222222", "manifest/7", "mean/٠٠٠٠٠٠٠٧/00000.0", "history/00000001"):
        assert objects.parse_round(key) is None


def test_a_list_from_a_round_on_shows_that_round_and_no_earlier_one() -> None:
    for folder, make in (
        ("upload", lambda r: objects.upload_key(r, 0, NONCE, 0)),
        ("manifest", objects.manifest_key),
        ("mean", lambda r: objects.mean_key(r, "00000.0")),
    ):
        after = objects.from_round(folder, 8)
        assert [r for r in range(6, 11) if make(r) > after] == [8, 9, 10]


def test_the_parts_of_all_means_cover_each_cell_once() -> None:
    for cells in range(1, 12):
        one = manifest(cells=cells)
        spans = [
            one.span(shard, part, one.parts_of(shard))
            for shard, part in (
                (objects.shard_of(name), objects.part_of(name)) for name in one.names
            )
        ]
        assert all(spans)
        assert sorted(cell for span in spans for cell in span) == list(range(cells))


def test_owners_are_the_members_that_have_not_left_in_turn() -> None:
    members = manifest().members
    left = (members[0], Member(1, members[1].upload, 1.0, 2, steps=1, has_left=True), members[2])
    assert [manifest().owner_of(f"{shard:05d}.0") for shard in range(3)] == [1, 2, 0]
    assert [manifest(members=left).owner_of(f"{shard:05d}.0") for shard in range(3)] == [2, 0, 2]


def test_in_a_direct_round_the_other_member_makes_the_receipt() -> None:
    direct = manifest(plan="direct", members=manifest().members[:2])
    assert direct.names == ("00000", "00001")
    assert [direct.owner_of(name) for name in direct.names] == [1, 0]
    alone = manifest(plan="direct", members=manifest().members[:1])
    assert alone.owner_of("00000") == 0


def test_a_round_in_which_nobody_trained_has_no_means() -> None:
    idle = manifest(members=(Member(0, "u", 0.0, steps=0), Member(1, "v", 0.0, steps=5)))
    assert idle.names == ()
    assert idle.names == ()


def test_the_digest_is_that_of_the_stored_bytes() -> None:
    body = objects.encode(manifest())
    stored = objects.read_manifest(objects.manifest_key(7), body)
    assert stored.digest == manifest().digest == objects.digest(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[" * 100_000,
        objects.encode(manifest(round=8)),
        objects.encode(manifest()) + b" ",
        objects.encode(manifest()).replace(b'"cells":7', b'"cells":-7'),
        objects.encode(manifest()).replace(b'"format":2', b'"format":1'),
        objects.encode(manifest()).replace(b'"world":3', b'"world":3,"more":1'),
        objects.encode(manifest()).replace(b'"codec":"fp', b'"codec":"\xc9p'),
    ],
)
def test_a_damaged_manifest_is_an_error_that_names_it(body: bytes) -> None:
    with pytest.raises(DamagedObject, match="manifest/00000007"):
        objects.read_manifest(objects.manifest_key(7), body)


def test_a_header_under_the_key_of_another_rank_is_damaged() -> None:
    header = UploadHeader(3, NONCE, objects.ZERO, 1.0, objects.ZERO, 4, 1, 5)
    body = objects.encode(header)
    assert objects.read_header(objects.upload_key(7, 3, NONCE, 1), body) == header
    with pytest.raises(DamagedObject, match="rank 3"):
        objects.read_header(objects.upload_key(7, 2, NONCE, 1), body)


def test_the_chain_holds_who_made_each_mean_and_whom_it_excludes() -> None:
    chains = {
        objects.extend_chain(manifest(), {"00000.0": Outcome(maker, excluded)})
        for maker in (NONCE, "f" * 16)
        for excluded in ((), (1,))
    }
    assert len(chains) == 4
    assert objects.extend_chain(manifest(cells=8), {}) != objects.extend_chain(manifest(), {})
