"""Means of tensors through a store: exact, in the caller's kinds, and counted once."""

from __future__ import annotations

import json
import os
import threading
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.core.errors import BelowMinimumWorld, ValidationError
from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.objectstore import ObjectStore


def memory() -> str:
    return f"memory:///{uuid.uuid4()}"


def run_all(world: int, work: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(world) as pool:
        return [job.result(120) for job in [pool.submit(work, rank) for rank in range(world)]]


def tensor(rank: int, turn: int = 0, size: int = 3000) -> np.ndarray:
    return np.random.default_rng([rank, turn]).standard_normal(size).astype(np.float32)


def opened(uri: Any, rank: int, world: int, **options: Any) -> ObjectStoreAllReduce:
    options = {"timeout_s": 60, "min_replicas": world, "poll_interval_s": 0.05} | options
    return ObjectStoreAllReduce(uri, rank, world, **options)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("is_folder", [False, True])
def test_all_get_the_exact_weighted_mean(tmp_path: Path, world: int, is_folder: bool) -> None:
    uri = tmp_path if is_folder else memory()
    weights = [1.0, 3.0, 0.125, 7.0, 2.0][:world]

    def work(rank: int) -> list[np.ndarray]:
        with opened(uri, rank, world) as reduce:
            return [reduce.allreduce(tensor(rank, turn), weight=weights[rank]) for turn in range(4)]

    means = run_all(world, work)
    for turn in range(4):
        total = sum(weights[rank] * tensor(rank, turn).astype(np.float64) for rank in range(world))
        exact = (total / sum(weights)).astype(np.float32)
        for rank in range(world):
            assert np.array_equal(means[rank][turn], means[0][turn])
            np.testing.assert_array_max_ulp(means[rank][turn], exact, maxulp=1)


@pytest.mark.parametrize("world", [2, 3])
def test_what_a_manifest_names_survives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    durable = set[Path]()  # contents and names that were synced
    unsafe = list[Path]()
    sync, link = os.fsync, os.link

    def note(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        names = [path / "name" / each.name for each in path.iterdir()] if path.is_dir() else []
        sync(handle)
        durable.update([*names, path.with_name(path.name.partition("#")[0])])

    def note_commit(draft: str, path: str) -> None:
        if Path(path).parent.name == "manifest":
            before = f"{int(Path(path).name) - 1:08d}"
            means = [*tmp_path.rglob(f"mean/{before}/*"), *tmp_path.rglob(f"receipt/{before}/*")]
            members = json.loads(Path(draft).read_bytes())["members"]
            uploads = [next(tmp_path.rglob(member["upload"])) for member in members]
            named = [each for each in (*means, *uploads) if "#" not in each.name]
            unsafe.extend(
                each for each in named if not {each, each.parent / "name" / each.name} <= durable
            )
            assert len(uploads) == world
            assert means or before < "0"
        link(draft, path)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "link", note_commit)

    def work(rank: int) -> None:
        with opened(tmp_path, rank, world) as reduce:
            for _ in range(3):
                reduce.allreduce(tensor(rank))

    run_all(world, work)
    assert not unsafe


def test_rounds_go_on_while_old_uploads_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, delete = threading.Event(), ObjectStore.delete

    def delete_late(store: ObjectStore, keys: Iterable[str]) -> None:
        keys = [*keys]
        if any("/upload/0" in key for key in keys):
            assert goes_on.wait(60)
        delete(store, keys)

    monkeypatch.setattr(ObjectStore, "delete", delete_late)

    def work(rank: int) -> None:
        with opened(tmp_path, rank, 3) as reduce:
            for _ in range(8):
                reduce.allreduce(tensor(rank))
            goes_on.set()

    run_all(3, work)
    assert not [*tmp_path.rglob("upload/00000000/*")]


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4", "sparse"])
def test_what_a_codec_leaves_out_comes_later(codec: str) -> None:
    uri, rounds = memory(), 12

    def work(rank: int) -> tuple[np.ndarray, np.ndarray]:
        with opened(uri, rank, 3, codec=codec) as reduce:
            total = np.zeros(3000)
            for _ in range(rounds):
                total += reduce.allreduce(tensor(rank))
            return total, reduce.state_dict()[""]

    found = run_all(3, work)
    mean = sum(tensor(rank).astype(np.float64) for rank in range(3)) / 3
    owed = sum(row.astype(np.float64) for _, row in found) / 3
    assert all(np.array_equal(total, found[0][0]) for total, _ in found)
    assert np.abs(found[0][0] + owed - rounds * mean).max() < 1e-3


def test_streams_have_rounds_of_their_own() -> None:
    uri = memory()

    def work(rank: int) -> list[Any]:
        with opened(uri, rank, 2) as reduce:
            first = reduce.allreduce(tensor(rank, 0, 10), "layer.0/weight")
            second = reduce.allreduce([tensor(rank, 1, 7)], "layer.0/bias")
            return [first, second[0]]

    for first, second in run_all(2, work):
        assert np.array_equal(first, (tensor(0, 0, 10) + tensor(1, 0, 10)) / 2)
        assert np.array_equal(second, (tensor(0, 1, 7) + tensor(1, 1, 7)) / 2)


def test_kinds_types_and_shapes_are_those_of_the_tensors() -> None:
    torch = pytest.importorskip("torch")
    uri = memory()
    values = [torch.ones(2, 3, dtype=torch.bfloat16), np.zeros((4, 1), np.float64), torch.ones(())]

    def work(rank: int) -> list[Any]:
        with opened(uri, rank, 2) as reduce:
            return list(reduce.allreduce([value * (rank + 1) for value in values]))

    for found in run_all(2, work):
        assert [type(each) for each in found] == [type(value) for value in values]
        assert [each.dtype for each in found] == [value.dtype for value in values]
        assert [each.shape for each in found] == [value.shape for value in values]
        assert found[0].float().unique().tolist() == [1.5]


def test_out_holds_the_mean_and_may_be_the_tensors_themselves() -> None:
    uri = memory()

    def work(rank: int) -> bool:
        with opened(uri, rank, 2) as reduce:
            value, out = tensor(rank), np.empty(3000, np.float32)
            assert reduce.allreduce(value, out=out) is out
            assert np.array_equal(out, (tensor(0) + tensor(1)) / 2)
            assert reduce.allreduce(value, out=value) is value
            return np.array_equal(out, value)

    assert run_all(2, work) == [True, True]


def test_a_replica_that_differs_is_told_the_first_difference() -> None:
    uri = memory()
    with opened(uri, 0, 2, min_replicas=1, grace_s=0.01) as reduce:
        reduce.allreduce([tensor(0, size=4), tensor(0, size=5)])
    with opened(uri, 1, 2) as other:
        with pytest.raises(
            ValidationError, match=r"tensor 1 is float32\[5\] there and float32\[6\]"
        ):
            other.allreduce([tensor(0, size=4), tensor(0, size=6)])


def test_no_quorum_is_an_error_and_the_same_call_goes_on_with_its_upload(tmp_path: Path) -> None:
    with opened(tmp_path, 0, 2, timeout_s=0.4) as first:
        with pytest.raises(BelowMinimumWorld) as raised:
            first.allreduce(tensor(0))
        assert (raised.value.ready, raised.value.required_min) == (1, 2)
        first_uploads = list((tmp_path / "run" / "upload" / "00000000").iterdir())
        assert len(first_uploads) == 1
        machine = first._streams[""].driver.machine
        machine.config = replace(machine.config, timeout_s=60)

        def work(rank: int) -> np.ndarray:
            if rank == 0:
                return first.allreduce(tensor(0))
            with opened(tmp_path, 1, 2) as second:
                return second.allreduce(tensor(1))

        means = run_all(2, work)
        assert np.array_equal(means[0], (tensor(0) + tensor(1)) / 2)
        assert np.array_equal(means[0], means[1])
        assert first.round == 1


def test_late_values_come_with_the_next_call() -> None:
    """Rank 2 misses a round: what it brought is in the next mean, once."""
    uri, decided = memory(), threading.Event()

    def work(rank: int) -> list[np.ndarray]:
        with opened(uri, rank, 3, min_replicas=2, grace_s=0.2) as reduce:
            means = [reduce.allreduce(np.full(5, 8.0**rank, np.float32))]
            if rank == 2:
                # Its upload stays out of sight until the others have decided.
                driver = reduce._streams[""].driver
                put = driver.values.put_upload
                driver.values.put_upload = lambda *args: (decided.wait(60), put(*args))[1]  # type: ignore[method-assign]
            means.append(reduce.allreduce(np.full(5, 8.0**rank, np.float32)))
            decided.set()
            if rank == 2:
                driver.values.put_upload = put  # type: ignore[method-assign]
                assert reduce.last_round is not None
                assert not reduce.last_round.is_member
            means.append(reduce.allreduce(np.full(5, 8.0**rank, np.float32)))
            return means

    found = run_all(3, work)
    for means in found:
        assert [mean[0] for mean in means[:2]] == [np.float32(73 / 3), np.float32(4.5)]
        assert means[2][0] in (np.float32((73 + 64) / 3), np.float32(4.5))
    assert len({means[2][0] for means in found}) == 1


def test_numbers_that_a_codec_cannot_take_are_named() -> None:
    with opened(memory(), 0, 1, codec="int8") as reduce:
        with pytest.raises(ValidationError, match=r"^tensors\[1\]: nan"):
            reduce.allreduce([np.ones(3, np.float32), np.array([1, np.nan], np.float32)])
    with opened(memory(), 0, 1) as reduce:
        mean = reduce.allreduce(np.array([1, np.nan, np.inf], np.float32))
        assert np.array_equal(mean, [1, np.nan, np.inf], equal_nan=True)


def test_rounds_have_the_numbers_of_the_caller() -> None:
    uri = memory()

    def work(rank: int) -> Any:
        with opened(uri, rank, 2, round_id=7) as reduce:
            reduce.allreduce(tensor(rank))
            assert reduce.last_round is not None
            return reduce.last_round.round, reduce.round

    assert run_all(2, work) == [(7, 8), (7, 8)]


def test_a_joiner_reads_of_old_means_only_what_they_say_of_themselves() -> None:
    uri, size, has_gone_on = memory(), 400_000, threading.Event()

    def work(rank: int) -> int:
        with opened(uri, rank, 3, min_replicas=2, grace_s=0.2) as reduce:
            if rank == 2:
                assert has_gone_on.wait(60)
            while True:
                reduce.allreduce(tensor(rank, 0, size))
                report = reduce.last_round
                assert report is not None
                if report.round == 8:  # the checkpoint is of 5 rounds: four means are not covered
                    has_gone_on.set()
                if 2 in report.members:
                    return report.bytes_down

    assert run_all(3, work)[2] < 2.5 * 4 * size
