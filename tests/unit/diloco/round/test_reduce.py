"""Values of replicas in one round: the same bits for all, work counts once, damage is excluded."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import Temporary
from atoll.diloco.codecs import get_codec
from atoll.diloco.packing import Vector
from atoll.diloco.round import objects
from atoll.diloco.round.cells import Cut, Share
from atoll.diloco.round.effects import FOREIGN
from atoll.diloco.round.objects import DIRECT, FLAT, Manifest, Member, Outcome, UploadHeader
from atoll.diloco.round.reduce import Fragment, ReplicaValues, WeightedMean, add_to_row
from atoll.objectstore import ObjectStore

SIZE = 50_000
ZERO = "0" * 32


class Sum:
    """An outer rule that adds the means up, and counts how often each value was stepped."""

    def __init__(self, size: int) -> None:
        self.values = np.zeros(size, np.float32)
        self.count = np.zeros(size, np.float32)

    is_wanted = True

    @property
    def rows(self) -> Mapping[str, Vector]:
        return {"values": self.values, "count": self.count}

    def room(self, start: int, size: int) -> None:
        return None

    def step(self, round: int, start: int, mean: Vector) -> None:
        self.values[start : start + mean.size] += mean
        self.count[start : start + mean.size] += 1


class World:
    """Replicas of one process or more over one store, driven by hand."""

    def __init__(
        self, pool: ThreadPoolExecutor, codec: str = "fp32", mean_codec: str = "", **options: Any
    ) -> None:
        counts: list[int] = options.get("processes", [1, 1, 1])
        self.store = options.get("store") or ObjectStore.open(f"memory:///{uuid.uuid4()}")
        codecs = get_codec(codec), get_codec(mean_codec or codec)
        self.codecs = {"codec": codecs[0].name, "mean_codec": codecs[1].name}
        self.cut = Cut.of(options.get("size", SIZE), len(counts), codecs)
        self.weights = options.get("weights") or [1.0] * len(counts)
        self.replicas = [
            [
                ReplicaValues(
                    *(self.store, "run/", rank, f"{rank:016x}"),
                    [Fragment(share, Sum(share.size))],
                    *codecs,
                    pool,
                )
                for share in (Share(self.cut, process, count) for process in range(count))
            ]
            for rank, count in enumerate(counts)
        ]
        self.members: list[Member] = []

    def bring(self, rank: int, values: Vector) -> None:
        for process in self.replicas[rank]:
            share = process.fragments[0].share
            process.fragments[0].add(0, values[share.start : share.stop])

    def upload(self, rank: int, round: int = 0) -> Member:
        replica, nonce = self.replicas[rank], f"{rank:016x}"
        key = objects.upload_key(round, rank, nonce, round)
        weight, count = self.weights[rank], len(replica)
        header = UploadHeader(rank, nonce, ZERO, weight, ZERO, len(self.replicas), count, 1)
        if count == 1:
            header = replica[0].put_upload(key, round, header)
        else:
            sections = [process.put_part(key, round, header) for process in replica]
            header = replica[0].put_header(key, header, sections)
        return Member(rank, key, weight, count, 1, sections=header.sections)

    def manifest(self, members: list[Member], round: int = 0, plan: str = FLAT) -> Manifest:
        cut = self.cut
        world = len(self.replicas)
        manifest = Manifest(
            *(round, ZERO, plan, cut.shards, cut.cells, world, tuple(members)),  # type: ignore[arg-type]
            **self.codecs,
        )
        for process in (each for replica in self.replicas for each in replica):
            process.begin(manifest)
        return manifest

    def make(
        self, manifest: Manifest, rank: int, names: list[str], **options: Any
    ) -> dict[str, Any]:
        replica = self.replicas[rank]
        made: dict[str, Any] = {}
        options.setdefault("exclude_missing", False)
        for number, process in enumerate(replica):
            own = [name for name in names if objects.part_of(name) % len(replica) == number]
            made |= process.make_means(manifest, own, **options)
        return made

    def make_all(self, manifest: Manifest) -> None:
        for rank in range(len(self.replicas)):
            own = [name for name in manifest.names if manifest.owner_of(name) == rank]
            assert all(self.make(manifest, rank, own).values())

    def apply(self, manifest: Manifest, rank: int) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        for process in self.replicas[rank]:
            for name, outcome in process.apply_means(manifest, manifest.names).items():
                assert outcome is not None
                assert outcomes.setdefault(name, outcome) == outcome
        return outcomes

    def end(self, manifest: Manifest, rank: int, outcomes: dict[str, Outcome]) -> None:
        for process in self.replicas[rank]:
            if manifest.member(rank) is not None:
                process.settle(manifest, outcomes)
            process.end()

    def values(self, rank: int) -> Vector:
        return np.concatenate(
            [each.fragments[0].outer.rows["values"] for each in self.replicas[rank]]
        )

    def steps(self, rank: int) -> Vector:
        return np.concatenate(
            [each.fragments[0].outer.rows["count"] for each in self.replicas[rank]]
        )

    def row(self, rank: int) -> Vector:
        return np.concatenate([each.fragments[0].row for each in self.replicas[rank]])

    def damage(self, key: str, at: int) -> None:
        data = bytearray(self.store.get(f"run/{key}"))
        data[at] ^= 1
        self.store.put(f"run/{key}", data)


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def rows(count: int, turn: int = 0) -> list[Vector]:
    return [
        np.random.default_rng([rank, turn]).standard_normal(SIZE).astype(np.float32)
        for rank in range(count)
    ]


def mean_of(brought: list[Vector], weights: list[float] | None = None) -> Vector:
    out = np.empty(SIZE, np.float32)
    WeightedMean(weights or [1.0] * len(brought)).write(iter(brought), out)
    return out


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("processes", [[1, 1, 1], [2, 1, 3], [4, 2, 1]])
def test_replicas_of_any_number_of_processes_get_the_exact_mean(
    pool: ThreadPoolExecutor, tmp_path: Any, processes: list[int], is_folder: bool
) -> None:
    store = ObjectStore.open(tmp_path) if is_folder else None
    world = World(pool, processes=processes, weights=[1.0, 2.5, 0.25], store=store)
    brought = rows(3)
    for rank, row in enumerate(brought):
        world.bring(rank, row)
    manifest = world.manifest([world.upload(rank) for rank in range(3)])
    world.make_all(manifest)
    for rank in range(3):
        world.end(manifest, rank, world.apply(manifest, rank))
        assert np.array_equal(world.values(rank), mean_of(brought, world.weights))
        assert (world.steps(rank) == 1).all()
        assert not world.row(rank).any()


@pytest.mark.parametrize("processes", [[1, 1, 1], [2, 1, 3]])
@pytest.mark.parametrize("codecs", [("int8", "int4"), ("fp32", "int8"), ("int4", "fp32")])
def test_what_codecs_lose_is_owed_so_that_sums_stay_exact(
    pool: ThreadPoolExecutor, codecs: tuple[str, str], processes: list[int]
) -> None:
    """brought = committed + owed: after many rounds the sum of the means is that of what was
    brought, but for what is still in the rows."""
    weights = [1.0, 3.0, 0.5]
    world = World(pool, *codecs, processes=processes, weights=weights)
    total = np.zeros(SIZE, np.float64)
    for round in range(6):
        brought = rows(3, round)
        total += np.average(np.array(brought, np.float64), axis=0, weights=weights)
        for rank, row in enumerate(brought):
            world.bring(rank, row)
        members = [world.upload(rank, round) for rank in range(3)]
        manifest = world.manifest(members, round)
        world.make_all(manifest)
        for rank in range(3):
            world.end(manifest, rank, world.apply(manifest, rank))
    assert all(np.array_equal(world.values(0), world.values(rank)) for rank in (1, 2))
    owed = np.average(
        np.array([world.row(rank) for rank in range(3)], np.float64), axis=0, weights=weights
    )
    assert np.abs(owed).max() > 1e-3
    assert np.abs(world.values(0) + owed - total).max() < 1e-4


def test_anybody_makes_the_same_mean(pool: ThreadPoolExecutor) -> None:
    """A stand-in with another number of processes, and one that is no member."""
    found = []
    for maker in (0, 1, 3):
        world = World(pool, "int8", processes=[1, 3, 1, 2])
        for rank, row in enumerate(rows(3)):
            world.bring(rank, row)
        manifest = world.manifest([world.upload(rank) for rank in range(3)])
        world.make(manifest, maker, list(manifest.names))
        outcomes = world.apply(manifest, 3)
        assert {outcome.made_by for outcome in outcomes.values()} == {f"{maker:016x}"}
        found.append(world.values(3))
    assert all(np.array_equal(values, found[0]) for values in found)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_damaged_upload_is_excluded_where_it_is_damaged_and_its_work_stays(
    pool: ThreadPoolExecutor, codec: str
) -> None:
    world = World(pool, codec, "fp32")
    brought = rows(3)
    for rank, row in enumerate(brought):
        world.bring(rank, row)
    members = [world.upload(rank) for rank in range(3)]
    world.damage(members[1].upload, 300)  # the first cell of shard 0
    manifest = world.manifest(members)
    world.make_all(manifest)
    for rank in range(3):
        outcomes = world.apply(manifest, rank)
        assert [outcomes[f"{shard:05d}.0"].excluded for shard in range(3)] == [(1,), (), ()]
        world.end(manifest, rank, outcomes)
    in_shard = np.zeros(SIZE, bool)
    for cell in Share(world.cut).cells_of(0):
        in_shard[world.cut.bounds[cell] : world.cut.bounds[cell + 1]] = True
    if codec == "fp32":
        without = mean_of([brought[0], brought[2]])
        assert np.array_equal(world.values(2)[in_shard], without[in_shard])
        assert np.array_equal(world.values(2)[~in_shard], mean_of(brought)[~in_shard])
        assert not world.row(1)[~in_shard].any()
    assert np.array_equal(world.row(1)[in_shard], brought[1][in_shard])
    assert not np.array_equal(world.row(1)[~in_shard], brought[1][~in_shard])


def test_an_upload_that_is_gone_is_waited_for_unless_it_is_to_be_excluded(
    pool: ThreadPoolExecutor,
) -> None:
    world = World(pool)
    for rank, row in enumerate(rows(3)):
        world.bring(rank, row)
    members = [world.upload(rank) for rank in range(3)]
    world.store.delete([f"run/{members[2].upload}"])
    manifest = world.manifest(members)
    names = [name for name in manifest.names if manifest.owner_of(name) == 0]
    assert world.make(manifest, 0, names) == dict.fromkeys(names)
    assert world.make(manifest, 0, names, exclude_missing=True) == dict.fromkeys(names, True)
    assert {
        outcome.excluded
        for outcome in world.replicas[0][0].apply_means(manifest, names).values()
        if outcome
    } == {(2,)}


def test_the_stored_mean_counts_though_another_was_made_here(pool: ThreadPoolExecutor) -> None:
    """The own mean lies in the row; the stand-in was first and excluded its owner."""
    world = World(pool)
    brought = rows(3)
    for rank, row in enumerate(brought):
        world.bring(rank, row)
    members = [world.upload(rank) for rank in range(3)]
    manifest = world.manifest(members)
    (name,) = [name for name in manifest.names if manifest.owner_of(name) == 0]
    upload = bytes(world.store.get(f"run/{members[0].upload}"))
    world.store.delete([f"run/{members[0].upload}"])
    world.make(manifest, 1, [name], exclude_missing=True)
    world.store.put(f"run/{members[0].upload}", upload)
    world.make_all(manifest)
    outcomes = {rank: world.apply(manifest, rank) for rank in range(3)}
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0][name] == Outcome(f"{1:016x}", (0,))
    for rank in range(3):
        world.end(manifest, rank, outcomes[rank])
        assert np.array_equal(world.values(rank), world.values(0))
    shard = [slice(*world.cut.bounds[cell : cell + 2]) for cell in Share(world.cut).cells_of(0)]
    for part in shard:
        assert np.array_equal(world.row(0)[part], brought[0][part])
        world.row(0)[part] = 0


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_a_rounding_is_owed_once_by_whoever_stored_the_mean(
    pool: ThreadPoolExecutor, codec: str
) -> None:
    world = World(pool, codec, "int4")
    for rank, row in enumerate(rows(3)):
        world.bring(rank, row)
    manifest = world.manifest([world.upload(rank) for rank in range(3)])
    world.make_all(manifest)
    for rank in range(3):  # everybody makes every mean; all but the first are refused
        world.make(manifest, rank, list(manifest.names))
    owed = []
    for rank in range(3):
        world.end(manifest, rank, world.apply(manifest, rank))
        owed.append(world.row(rank))
    if codec == "fp32":
        assert ((np.array(owed) != 0).sum(axis=0) <= 1).all()
        assert (np.array(owed) != 0).any(axis=0).mean() > 0.9


class Flaky(ObjectStore):
    """Fails reads once the given number of bytes were read."""

    left = -1

    def reader(self, key: str, start: int = 0, end: int | None = None) -> Any:
        if self.left == 0 and "mean/" in key:
            raise Temporary("no answer")
        self.left -= "mean/" in key
        return super().reader(key, start, end)


def test_a_mean_is_not_applied_twice_when_a_call_fails(
    pool: ThreadPoolExecutor, tmp_path: Any
) -> None:
    store = Flaky.open(tmp_path)
    world = World(pool, store=store)
    brought = rows(3)
    for rank, row in enumerate(brought):
        world.bring(rank, row)
    manifest = world.manifest([world.upload(rank) for rank in range(3)])
    world.make_all(manifest)
    store.left = 1
    with pytest.raises(Temporary):
        world.apply(manifest, 0)
    store.left = -1
    world.end(manifest, 0, world.apply(manifest, 0))
    assert (world.steps(0) == 1).all()
    assert np.array_equal(world.values(0), mean_of(brought))


def test_a_damaged_mean_is_not_there_and_goes_on_behind_its_last_good_cell(
    pool: ThreadPoolExecutor,
) -> None:
    world = World(pool)
    brought = rows(3)
    for rank, row in enumerate(brought):
        world.bring(rank, row)
    manifest = world.manifest([world.upload(rank) for rank in range(3)])
    world.make_all(manifest)
    (name,) = [name for name in manifest.names if manifest.owner_of(name) == 1]
    key = objects.mean_key(0, name)
    world.damage(key, -1)
    found = world.replicas[0][0].apply_means(manifest, manifest.names)
    assert found[name] is None
    assert 0 < (world.steps(0) == 0).sum() < world.cut.size // 3
    world.damage(key, -1)
    world.end(manifest, 0, world.apply(manifest, 0))
    assert (world.steps(0) == 1).all()
    assert np.array_equal(world.values(0), mean_of(brought))


def test_every_byte_of_a_means_head_is_checked(pool: ThreadPoolExecutor) -> None:
    world = World(pool)
    for rank, row in enumerate(rows(3)):
        world.bring(rank, row)
    manifest = world.manifest([world.upload(rank) for rank in range(3)])
    world.make_all(manifest)
    (name,) = [name for name in manifest.names if manifest.owner_of(name) == 1]
    for at in range(0, 150):
        world.damage(objects.mean_key(0, name), at)
        found = world.replicas[0][0].apply_means(manifest, [name])[name]
        assert found is None or found == FOREIGN, at
        assert not world.steps(0).any()
        world.damage(objects.mean_key(0, name), at)


def test_a_mean_of_another_manifest_is_foreign(pool: ThreadPoolExecutor) -> None:
    world = World(pool)
    for rank, row in enumerate(rows(3)):
        world.bring(rank, row)
    members = [world.upload(rank) for rank in range(3)]
    world.make_all(world.manifest(members))
    other = world.manifest(members[:2])
    found = world.replicas[2][0].apply_means(other, other.names)
    assert set(found.values()) == {FOREIGN}
    assert not world.steps(2).any()


def test_late_work_stays_and_dropped_work_goes(pool: ThreadPoolExecutor) -> None:
    world = World(pool)
    brought = rows(3)
    for rank, row in enumerate(brought):
        world.bring(rank, row)
    members = [world.upload(rank) for rank in range(3)]
    manifest = world.manifest(members[:2])
    world.make_all(manifest)
    world.end(manifest, 2, world.apply(manifest, 2))
    assert np.array_equal(world.row(2), brought[2])
    world.bring(2, brought[0])
    assert np.array_equal(world.row(2), brought[2] + brought[0])
    world.replicas[2][0].drop()
    assert not world.row(2).any()


def test_a_member_of_weight_0_is_read_by_nobody_and_keeps_its_row(
    pool: ThreadPoolExecutor,
) -> None:
    world = World(pool, weights=[1.0, 0.0, 1.0])
    brought = rows(3)
    for rank, row in enumerate(brought):
        world.bring(rank, row)
    manifest = world.manifest([world.upload(rank) for rank in range(3)])
    world.make_all(manifest)
    for rank in range(3):
        world.end(manifest, rank, world.apply(manifest, rank))
    assert np.array_equal(world.values(1), mean_of([brought[0], brought[2]]))
    assert np.array_equal(world.row(1), brought[1])


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("processes", [[1, 1], [2, 3]])
def test_a_direct_round_reads_the_other_upload_once(
    pool: ThreadPoolExecutor, codec: str, processes: list[int]
) -> None:
    world = World(pool, codec, processes=processes)
    brought = rows(2)
    for rank, row in enumerate(brought):
        world.bring(rank, row)
    manifest = world.manifest([world.upload(rank) for rank in range(2)], plan=DIRECT)
    before = world.store.traffic
    receipts = {}
    for rank, name in ((0, "00001"), (1, "00000")):
        assert all(each.read_upload(manifest, name) for each in world.replicas[rank])
        receipts[name] = Outcome(f"{rank:016x}")
    read = world.store.traffic.since(before).bytes_down
    for rank, name in ((0, "00001"), (1, "00000")):  # asked again, as a stand-in may be
        assert all(each.read_upload(manifest, name) for each in world.replicas[rank])
    for rank in range(2):
        for process in world.replicas[rank]:
            assert process.apply_direct(manifest, receipts) == receipts
        world.end(manifest, rank, receipts)
    assert world.store.traffic.since(before).bytes_down == read
    assert np.array_equal(world.values(0), world.values(1))
    assert (world.steps(0) == 1).all()
    if codec == "fp32":
        assert np.array_equal(world.values(0), mean_of(brought))
        assert not world.row(0).any()


def test_a_direct_round_leaves_out_what_a_receipt_calls_unreadable(
    pool: ThreadPoolExecutor,
) -> None:
    world = World(pool, processes=[1, 1, 1])
    brought = rows(2)
    for rank, row in enumerate(brought):
        world.bring(rank, row)
    members = [world.upload(rank) for rank in range(2)]
    world.damage(members[1].upload, -600)
    manifest = world.manifest(members, plan=DIRECT)
    assert world.replicas[0][0].read_upload(manifest, "00001") is False
    assert world.replicas[1][0].read_upload(manifest, "00000") is True
    receipts = {"00000": Outcome(f"{1:016x}"), "00001": Outcome(f"{0:016x}", (1,))}
    # Both have stepped with what they had: they take the round again, from a checkpoint.
    for rank in range(2):
        found = world.replicas[rank][0].apply_direct(manifest, receipts)
        assert set(found.values()) == {FOREIGN}
    assert world.replicas[2][0].apply_direct(manifest, receipts) == receipts
    assert np.array_equal(world.values(2), brought[0])


def test_sums_beyond_the_largest_float_stay_finite() -> None:
    row = np.full(3, 3e38, np.float32)
    add_to_row(row, np.full(3, 3e38, np.float32))
    assert np.isfinite(row).all()
    assert row[0] == np.finfo(np.float32).max
