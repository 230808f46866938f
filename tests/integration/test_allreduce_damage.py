"""Objects that are cut, changed or foreign, ranks claimed twice, layouts that differ."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.allreduce.world import FaultyStore, World, run_threads, tensor

from atoll import ObjectStoreAllReduce
from atoll.core.errors import BelowMinimumWorld, DistributedError, ValidationError
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

    def put(self, key: str, data: Any, **options: Any) -> None:
        super().put(key, self._spoilt(key, data), **options)

    def create(self, key: str, data: Any, **options: Any) -> bool:
        return super().create(key, self._spoilt(key, data), **options)

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
    """What is damaged altogether is not there, and so late; what can be read in part is left out
    where it cannot. Nobody has another mean in either case."""
    world = World(3, codec=codec)
    store = DamagedStore(world.store, "/upload/00000001/", damage, 1)

    def spoil() -> None:
        with ObjectStoreAllReduce(
            store, 1, 3, grace_s=3, keep_rounds=1000, codec=codec, min_replicas=2
        ) as replica:
            late: list[int] = []
            for turn in range(4):
                world.call(replica, turn, late)

    others = [lambda r=r: world.take_part(r, lambda n: n >= 3, grace_s=3) for r in (0, 2)]
    run_threads(spoil, *others)
    assert not world.errors
    for known in world.rounds.values():
        assert len({(each.mean, tuple(each.members)) for each in known}) == 1
    assert set(world.rounds[3][0].members) == {0, 1, 2}, (damage, codec)


def test_rubbish_in_the_place_of_a_mean_is_an_error_never_a_value() -> None:
    world = World(3)
    ObjectStore(world.store, "vandal").put("run/mean/00000000/00001.0", b"x" * 500)
    failures: list[str] = []

    def go(rank: int) -> None:
        with world.replica(rank, timeout_s=3, min_replicas=3) as replica:
            with pytest.raises(DistributedError) as caught:
                replica.allreduce([tensor(rank, 0)])
            failures.append(str(caught.value))

    run_threads(*(lambda r=r: go(r) for r in range(3)))
    assert len(failures) == 3
    assert all("mean/00000000/00001.0 is needed" in text for text in failures)


def test_rubbish_in_the_place_of_a_manifest_is_an_error_that_says_what_to_do() -> None:
    world = World(1)
    with world.replica(0) as replica:
        replica.allreduce([tensor(0, 0)])
        ObjectStore(world.store, "vandal").put("run/manifest/00000001", b"rubbish")
        with pytest.raises(DistributedError, match=r"manifest/00000001 .* damaged.*Restore it"):
            replica.allreduce([tensor(0, 0)])


def test_foreign_files_in_the_folder_are_no_matter(tmp_path: Path) -> None:
    for name in (
        "run/upload/notes.txt",
        "run/upload/²/00001",
        "run/upload/00000000/readme",
        f"run/upload/00000000/{'0' * 5}.{'a' * 16}-000001",
        f"run/upload/0000000１/{'0' * 5}.{'a' * 16}-000001",
        "run/checkpoint/00000009.zz",
        "run/mean/00000000/readme",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("hello")
    (tmp_path / "run/manifest").mkdir()
    (tmp_path / "run/manifest/.DS_Store").write_text("hello")
    with ObjectStoreAllReduce(tmp_path, 0, 1) as replica:
        assert replica.allreduce([tensor(0, 0)])[0].tobytes() == tensor(0, 0).tobytes()


def test_a_mean_of_another_round_copied_into_this_one_is_not_taken_for_good() -> None:
    """The same bytes under another name: the place that they say, not the checksum, is wrong."""
    world = World(3)
    run_threads(
        *(lambda r=r: world.take_part(r, lambda n: n >= 0, min_replicas=3) for r in range(3))
    )
    store = ObjectStore(world.store, "vandal")
    for info in store.list("run/mean/00000000"):
        store.put(info.key.replace("00000000/", "00000001/"), bytes(store.get(info.key)))
    values: list[Any] = []

    def go(rank: int) -> None:
        with world.replica(rank, timeout_s=2, min_replicas=3) as replica:
            try:
                values.append(replica.allreduce([tensor(rank, 5)]))
            except DistributedError:
                values.append(None)

    run_threads(*(lambda r=r: go(r) for r in range(3)))
    assert values == [None] * 3


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
        ([np.zeros(3, "f4"), np.zeros((4, 6), "f4")], r"tensor 1 is float32\[4, [56]\] there"),
        ([np.zeros(3, "f8"), np.zeros((4, 5), "f4")], r"tensor 0 is float(64|32)\[3\] there"),
        ([np.zeros(3, "f4")], r"\d tensors there and \d here"),
    ],
)
def test_a_layout_that_differs_is_an_error_that_names_the_tensor(
    other: list[Any], messages: str
) -> None:
    world = World(2)
    errors: dict[int, Exception] = {}
    brought = [[np.zeros(3, "f4"), np.zeros((4, 5), "f4")], other]

    def go(rank: int) -> None:
        with world.replica(rank, timeout_s=3, min_replicas=2) as replica:
            with pytest.raises((ValidationError, BelowMinimumWorld)) as caught:
                replica.allreduce(brought[rank])
            errors[rank] = caught.value

    run_threads(lambda: go(0), lambda: go(1))
    # Whoever comes second meets the layout of the first; that one is told who has not come.
    (named,) = [each for each in errors.values() if isinstance(each, ValidationError)]
    assert re.search(messages, str(named)), str(named)


def test_codecs_that_differ_are_an_error_of_both() -> None:
    world = World(2)
    errors: dict[int, ValidationError] = {}

    def go(rank: int) -> None:
        with world.replica(rank, codec=("fp32", "int8")[rank], min_replicas=2) as replica:
            with pytest.raises(ValidationError) as caught:
                replica.allreduce([tensor(rank, 0)])
            errors[rank] = caught.value

    run_threads(lambda: go(0), lambda: go(1))
    assert {each.field for each in errors.values()} == {"codec"}
    assert "codec is 'int8' there and 'fp32' here" in str(errors[0])


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
