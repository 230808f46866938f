"""Rounds that are read look by look equal what the manifests hold, whenever it was looked."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec.structs import replace
from obstore.store import MemoryStore

from atoll.core.errors import Permanent
from atoll.core.rounds import RoundFacts
from atoll.diloco.round import objects
from atoll.diloco.round.objects import HistoryBlock, Manifest, Member
from atoll.objectstore import ObjectInfo, ObjectStore
from atoll.rounds.manifests import RunReader

BLOCK = 50


class CountedStore(ObjectStore):
    """Counts its LISTs and its reads."""

    def __init__(self, store: Any) -> None:
        super().__init__(store, "memory")
        self.lists = self.gets = 0

    def list(self, prefix: str, after: str | None = None) -> list[ObjectInfo]:
        self.lists += 1
        return super().list(prefix, after)

    def get_with_time(self, key: str, *, max_bytes: int) -> Any:
        self.gets += 1
        return super().get_with_time(key, max_bytes=max_bytes)


def upload(blobs: ObjectStore, number: int, rank: int) -> str:
    key = objects.upload_key(number, rank, f"{number * 100 + rank:016x}", 1)
    blobs.put(f"run/{key}", b"x" * 10)
    return key


def decide(
    blobs: ObjectStore, number: int, uploads: dict[int, str], missing: list[int]
) -> Manifest:
    members = [
        Member(rank=rank, upload=key, weight=float(rank + 1))
        for rank, key in sorted(uploads.items())
    ]
    manifest = Manifest(
        round=number,
        chain=objects.ZERO,
        layout=objects.ZERO,
        plan="flat",
        shards=8,
        cells=8,
        world=8,
        members=tuple(members),
        missing=tuple(missing),
        size=5,
    )
    blobs.put(f"run/{objects.manifest_key(number)}", objects.encode(manifest))
    return manifest


def fold(blobs: ObjectStore, until: int) -> None:
    """As the gc of a run does with whole blocks of old manifests."""
    for block in range(until // BLOCK):
        first = block * BLOCK
        names = [f"run/{objects.manifest_key(number)}" for number in range(first, first + BLOCK)]
        if {info.key for info in blobs.list("run/manifest")} >= set(names):
            known = [objects.read_manifest(n[4:], bytes(blobs.get(n))) for n in names]
            body = objects.encode(HistoryBlock(first, tuple(known)))
            blobs.create(f"run/{objects.history_key(block)}", body)
            blobs.delete(names)


def shown(facts: RoundFacts) -> tuple[Any, ...]:
    return facts.round, facts.members, facts.weights, facts.missing


def held(manifest: Manifest) -> tuple[Any, ...]:
    ranks = [member.rank for member in manifest.members]
    weights = [member.weight for member in manifest.members]
    return manifest.round, ranks, weights, list(manifest.missing)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_shown_is_what_the_manifests_hold(seed: int) -> None:
    """Rounds with ranks that die, come late and join; looks, restarts and folds between."""
    chance, store = random.Random(seed), MemoryStore()
    blobs = ObjectStore(store, "memory")
    truth: dict[int, Manifest] = {}
    kept: dict[int, RoundFacts] = {}
    reader = RunReader(blobs, "run")

    def observe() -> None:
        is_all = False
        while not is_all:
            found = reader.observe()
            kept.update({facts.round: facts for facts in found.rounds})
            is_all = found.is_all

    alive, number = set(range(4)), 0
    while number < 250:
        lost = {rank for rank in alive if chance.random() < 0.1 and len(alive) > 1}
        come = {rank for rank in range(8) if chance.random() < 0.05}
        uploads = {rank: upload(blobs, number, rank) for rank in (alive - lost) | come}
        truth[number] = decide(blobs, number, uploads, sorted(lost))
        alive = set(uploads) or {0}
        number += 1
        if chance.random() < 0.3:
            observe()
        if chance.random() < 0.05:  # the control plane is killed, and knows what it has kept
            reader = RunReader(blobs, "run", reader.following)
        if chance.random() < 0.1:
            old = [
                info.key
                for info in blobs.list("run/upload")
                if f"/{number - 1:08d}/" not in info.key
            ]
            blobs.delete(old)
            fold(blobs, max(0, number - 20))
    observe()
    assert blobs.list("run/history")
    assert [shown(kept[n]) for n in sorted(kept)] == [held(truth[n]) for n in sorted(truth)]


def test_the_rounds_of_fragments_are_one_sequence() -> None:
    blobs = ObjectStore(MemoryStore(), "memory")
    for number in range(5):
        manifest = decide(blobs, number, {0: upload(blobs, number, 0)}, [])
        key = f"run/{objects.manifest_key(number)}"
        blobs.put(key, objects.encode(replace(manifest, fragments=2)))
    upload(blobs, 5, 0)
    seen = RunReader(blobs, "run").observe()
    assert [(each.round, each.fragment) for each in seen.rounds] == [
        *((0, 0), (0, 1), (1, 0), (1, 1), (2, 0))
    ]
    assert seen.waiting is not None
    assert (seen.waiting.round, seen.waiting.fragment) == (2, 1)


def test_a_look_asks_for_one_list_and_few_objects() -> None:
    store: Any = MemoryStore()
    blobs = CountedStore(store)
    for number in range(20):
        decide(blobs, number, {0: upload(blobs, number, 0)}, [])
    reader = RunReader(blobs, "run")
    assert len(reader.observe().rounds) == 20
    blobs.lists = blobs.gets = 0
    assert reader.observe().rounds == []
    assert (blobs.lists, blobs.gets) == (1, 1)
    decide(blobs, 20, {0: upload(blobs, 20, 0)}, [])
    blobs.lists = blobs.gets = 0
    assert [facts.round for facts in reader.observe().rounds] == [20]
    assert blobs.lists == 1
    assert blobs.gets <= 5


def test_late_and_missing_are_told_apart_by_what_arrives() -> None:
    store: Any = MemoryStore()
    blobs = ObjectStore(store, "memory")
    reader = RunReader(blobs, "run")
    decide(blobs, 0, {rank: upload(blobs, 0, rank) for rank in range(4)}, [])
    decide(blobs, 1, {0: upload(blobs, 1, 0), 1: upload(blobs, 1, 1)}, [2, 3])
    first = {facts.round: facts for facts in reader.observe().rounds}
    assert (first[1].missing, first[1].late) == ([2, 3], [])
    assert first[1].sizes == [20, 20]
    upload(blobs, 1, 3)
    (later,) = reader.observe().rounds
    assert (later.round, later.missing, later.late) == (1, [2, 3], [3])


def test_who_is_waited_for_and_who_has_left_shows() -> None:
    store: Any = MemoryStore()
    blobs = ObjectStore(store, "memory")
    decide(blobs, 0, {rank: upload(blobs, 0, rank) for rank in range(3)}, [])
    upload(blobs, 1, 0)
    blobs.put(f"run/{objects.ended_key('launch', 2, 'left')}", b"left")
    observation = RunReader(blobs, "run").observe()
    assert observation.waiting is not None
    assert (observation.waiting.round, observation.waiting.uploaded) == (1, [0])
    assert observation.departures == {2: "left"}


def test_an_object_that_is_no_manifest_is_told_of() -> None:
    store: Any = MemoryStore()
    blobs = ObjectStore(store, "memory")
    decide(blobs, 0, {0: upload(blobs, 0, 0)}, [])
    reader = RunReader(blobs, "run")
    reader.observe()
    blobs.put(f"run/{objects.manifest_key(1)}", b"rubbish")
    with pytest.raises(Permanent, match="manifest/00000001 is damaged"):
        reader.observe()
