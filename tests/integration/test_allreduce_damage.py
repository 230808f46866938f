"""Objects that are cut, changed or foreign, ranks claimed twice, layouts that differ."""

from __future__ import annotations

import itertools
import re
import threading
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.allreduce.world import SIZE, FaultyStore, World, run_threads, tensor

from atoll.core.errors import BelowMinimumWorld, DistributedError, Permanent, ValidationError
from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.objectstore import ObjectStore


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip(data: bytes) -> bytes:
    spoilt = bytearray(data)
    for at in range(0, len(spoilt), 7):
        spoilt[at] ^= 0x10
    return bytes(spoilt)


def replace(data: bytes) -> bytes:
    return b"hello, this is somebody else's file\n" * 40


DAMAGE = [cut, flip, replace, lambda data: b""]


class DamagedStore(FaultyStore):
    """What this replica puts at matching keys arrives damaged."""

    def __init__(self, store: Any, part: str, damage: Any, times: int) -> None:
        super().__init__(store)
        self.part, self.damage, self.times = part, damage, times

    def put(self, key: str, data: Any) -> None:
        super().put(key, self._spoilt(key, data))

    def create(self, key: str, data: Any) -> bool:
        return super().create(key, self._spoilt(key, data))

    def _spoilt(self, key: str, data: Any) -> Any:
        if self.part not in key or not self.times:
            return data
        self.times -= 1
        return self.damage(b"".join(data) if isinstance(data, list) else bytes(data))


def test_a_damaged_upload_is_left_out_and_everyone_agrees() -> None:
    """Each world waits for its grace: all of them at once."""
    cases = list(itertools.product(DAMAGE, ("fp32", "int8")))
    with ThreadPoolExecutor(len(cases)) as pool:
        for done in [pool.submit(leave_out, *case) for case in cases]:
            done.result()


def leave_out(damage: Any, codec: str) -> None:
    world = World(3, codec=codec)
    blobs = DamagedStore(world.store, "/up/00000001/", damage, 1)

    def spoil() -> None:
        with ObjectStoreAllReduce(
            blobs, 1, 3, grace_s=5, keep_rounds=1000, codec=codec, carries_late_work=False
        ) as replica:
            for turn in range(4):
                world.call(replica, turn)

    others = [lambda r=r: world.take_part(r, lambda n: n >= 3, grace_s=5) for r in (0, 2)]
    run_threads(spoil, *others)
    world.judge()
    manifests = [set(world.rounds[n][0].members) for n in range(4)]
    assert manifests == [{0, 1, 2}, {0, 2}, {0, 1, 2}, {0, 1, 2}], (damage, codec)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_where_everybody_is_needed_a_damaged_upload_is_made_again(codec: str) -> None:
    world = World(2, codec=codec)
    blobs = DamagedStore(world.store, "/up/00000000/", cut, 1)

    def spoil() -> None:
        with ObjectStoreAllReduce(
            blobs, 1, 2, grace_s=0.3, timeout_s=30, codec=codec, min_replicas=2
        ) as replica:
            world.call(replica, 0)

    run_threads(spoil, lambda: world.take_part(0, lambda n: n >= 0, min_replicas=2, timeout_s=30))
    world.judge()
    assert set(world.rounds[0][0].members) == {0, 1}


@pytest.mark.parametrize("damage", DAMAGE)
def test_rubbish_in_the_place_of_a_shard_is_replaced_by_its_owner(damage: Any) -> None:
    world = World(2)
    ObjectStore(world.store, "vandal").put("run/sum/00000000.0000/00001", damage(b"x" * 500))
    run_threads(*(lambda r=r: world.take_part(r, lambda n: n >= 2, grace_s=5) for r in range(2)))
    world.judge()


def test_a_mean_damaged_in_the_store_is_an_error_never_a_value() -> None:
    world = World(2)
    blobs = DamagedStore(world.store, "/sum/", flip, 1)
    failures: list[DistributedError] = []

    def owner() -> None:
        with ObjectStoreAllReduce(blobs, 1, 2, grace_s=0.2) as replica:
            world.call(replica, 0)

    def reader() -> None:
        with world.replica(0, timeout_s=1) as replica, pytest.raises(DistributedError) as caught:
            world.call(replica, 0)
        failures.append(caught.value)

    run_threads(owner, reader)
    assert "run/sum/00000000.0000/00001" in str(failures[0])
    assert "rank" in str(failures[0])


def test_rubbish_in_the_place_of_a_roster_is_an_error() -> None:
    world = World(1)
    ObjectStore(world.store, "vandal").put("run/manifest/00000000.0000", b"rubbish")
    with world.replica(0) as replica:
        replica._next = 0
        with pytest.raises(Permanent, match="not a manifest"):
            replica.allreduce([tensor(0, 0)])


def test_foreign_files_in_the_folder_are_no_matter(tmp_path: Path) -> None:
    for name in ("run/up/notes.txt", "run/up/00000000/readme", "run/up/00000000/00001.zz.1.q"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("hello")
    (tmp_path / "run/manifest").mkdir()
    (tmp_path / "run/manifest/.DS_Store").write_text("hello")
    with ObjectStoreAllReduce(tmp_path, 0, 1) as replica:
        assert replica.allreduce([tensor(0, 0)])[0].tobytes() == tensor(0, 0).tobytes()


def test_an_object_of_another_round_copied_into_this_one_is_not_taken_for_good() -> None:
    """The same bytes under another name: the fence, not the checksum, must refuse them."""
    world = World(2)
    run_threads(*(lambda r=r: world.take_part(r, lambda n: n >= 0) for r in range(2)))
    blobs = ObjectStore(world.store, "vandal")
    for blob in blobs.list("run/sum/00000000.0000"):
        blobs.put(blob.key.replace("00000000.", "00000001."), bytes(blobs.get(blob.key)))
    run_threads(
        *(lambda r=r: world.take_part(r, lambda n: n >= 2, first_turn=5, grace_s=5) for r in (0, 1))
    )
    world.judge()


def test_two_processes_claiming_one_rank_never_mix() -> None:
    world = World(3)
    jobs = [lambda r=r: world.take_part(r, lambda n: n >= 8) for r in range(3)]
    twin = lambda: world.take_part(1, lambda n: n >= 8, first_turn=500)  # noqa: E731
    run_threads(*jobs, twin)
    world.judge()
    for known in world.rounds.values():
        assert sum(s.is_member for s in known if s.rank == 1) <= 1


@pytest.mark.parametrize(
    ("other", "messages"),
    [
        ([np.zeros(3, "f4"), np.zeros((4, 6), "f4")], r"tensor 1 is float32\[4, 6\]"),
        ([np.zeros(3, "f8"), np.zeros((4, 5), "f4")], r"tensor 0 is float64\[3\]"),
        ([np.zeros(3, "f4")], r"tensor 1 \(float32\[4, 5\]\) exists only here"),
    ],
)
def test_differing_layouts_are_an_error_for_all_that_names_the_tensor(
    other: list[Any], messages: str
) -> None:
    world = World(2)
    errors: dict[int, ValidationError] = {}
    brought = [[np.zeros(3, "f4"), np.zeros((4, 5), "f4")], other]

    def go(rank: int) -> None:
        with world.replica(rank, grace_s=20) as replica:
            with pytest.raises(ValidationError) as caught:
                replica.allreduce(brought[rank])
            errors[rank] = caught.value
            # After the mistake is mended, the same replicas go on.
            assert replica.allreduce([np.full(2, rank, "f4")])[0].tolist() == [0.5, 0.5]

    run_threads(lambda: go(0), lambda: go(1))
    assert str(errors[0]) == str(errors[1]).replace("of rank 1'", "of rank 0'", 1)
    assert re.search(messages, str(errors[0])), str(errors[0])


def test_no_quorum_is_an_error_that_names_the_missing() -> None:
    world = World(4)

    def go(rank: int) -> None:
        with world.replica(rank, min_replicas=3, timeout_s=1) as replica:
            with pytest.raises(BelowMinimumWorld, match=r"2 of at least 3.*\[1, 3\]") as caught:
                replica.allreduce([tensor(rank, 0)])
            assert (caught.value.ready, caught.value.required_min) == (2, 3)

    run_threads(lambda: go(0), lambda: go(2))
    # It was not decided, so it can still be done when the others have come.
    run_threads(*(lambda r=r: world.take_part(r, lambda n: n >= 0, grace_s=5) for r in range(4)))
    world.judge()
    assert set(world.rounds) == {0}


def test_bad_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for bad in (
        {"rank": 2},
        {"rank": -1},
        {"world_size": 0},
        {"min_replicas": 3},
        {"timeout_s": 0},
        {"grace_s": -1},
        {"keep_rounds": 0},
        {"run_id": "../other"},
        {"codec": "fp31"},
    ):
        with pytest.raises(ValidationError, match=next(iter(bad))):
            ObjectStoreAllReduce(tmp_path / "x", **{"rank": 0, "world_size": 2, **bad})  # type: ignore[arg-type]
    assert not (tmp_path / "x").exists()
    with ObjectStoreAllReduce(tmp_path, 0, 1) as replica:
        with pytest.raises(ValidationError, match=r"tensors\[1\]"):
            replica.allreduce([tensor(0, 0), np.zeros(3, int)])
        with pytest.raises(ValidationError, match="weight"):
            replica.allreduce([tensor(0, 0)], weight=float("nan"))


def test_a_joiner_catches_up_from_the_checkpoint_and_the_means() -> None:
    """Also while rounds go on; it ends up with the state that the others have."""
    world = World(3)
    history: dict[int, set[bytes]] = defaultdict(set)  # the state after each round
    is_saved, is_over = threading.Event(), threading.Event()

    def follow(replica: ObjectStoreAllReduce, state: Any, turn: int) -> Any:
        mean = replica.allreduce([tensor(replica.rank, turn)])[0]
        report = replica.last_round
        assert report is not None
        if report.skipped:
            joined = replica.join()
            assert joined.checkpoint is not None
            state, number = joined.checkpoint.state[0], joined.round - 1
            for mean in joined.means:
                state = state + mean.tensors[0]
        else:
            state, number = state + mean, report.round
        history[number].add(state.tobytes())
        return state

    def lead(rank: int) -> None:
        with world.replica(rank, keep_rounds=1) as replica:
            state = np.zeros(SIZE, "f4")
            replica.save_checkpoint([state])
            for turn in range(500):
                state = follow(replica, state, turn)
                if turn == 5 and replica.save_checkpoint([state]):
                    is_saved.set()
                if is_over.is_set():
                    break

    def join() -> None:
        assert is_saved.wait(50)
        with world.replica(2, keep_rounds=1) as replica:
            joined = replica.join()
            assert joined.checkpoint is not None
            assert joined.checkpoint.round == 5
            assert [m.round for m in joined.means] == list(range(6, joined.round))
            state = joined.checkpoint.state[0]
            for mean in joined.means:
                state = state + mean.tensors[0]
            memberships = 0
            for turn in range(1000, 1300):
                state = follow(replica, state, turn)
                memberships += replica.last_round is not None and replica.last_round.is_member
                if memberships == 3:
                    break
            is_over.set()
            assert memberships == 3

    run_threads(lambda: lead(0), lambda: lead(1), join)
    assert all(len(states) == 1 for states in history.values())
