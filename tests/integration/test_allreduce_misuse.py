"""Odd tensors, odd arguments, calls that fail: a clear refusal or the right answer, never less."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from obstore.store import MemoryStore
from tests.allreduce.s3server import S3Server
from tests.allreduce.world import FaultyStore, run_threads

from atoll import ObjectStoreAllReduce
from atoll.core.errors import Permanent, ValidationError
from atoll.objectstore import ObjectStore

ONES = np.ones(4, np.float32)


def pair(store: Any = None, **options: Any) -> tuple[ObjectStoreAllReduce, ObjectStoreAllReduce]:
    store = store or MemoryStore()
    options = {"grace_s": 0.1, "min_replicas": 1, "timeout_s": 20, **options}
    one, other = (ObjectStoreAllReduce(FaultyStore(store), rank, 2, **options) for rank in range(2))
    return one, other


def both(
    one: ObjectStoreAllReduce, other: ObjectStoreAllReduce, bring: Callable[[int], Any]
) -> Any:
    matches: list[Any] = [None, None]

    def go(at: int, replica: ObjectStoreAllReduce) -> None:
        matches[at] = replica.allreduce(bring(at))

    run_threads(lambda: go(0, one), lambda: go(1, other))
    return matches


def test_a_replica_whose_tensors_differ_gets_no_mean_of_others() -> None:
    one, other = pair()
    with one, other:
        both(one, other, lambda rank: [ONES])
        one.allreduce([7 * ONES], name="weights")
        with pytest.raises(ValidationError, match=r"float32\[4\] there and float16\[2, 2\] here"):
            other.allreduce([np.ones((2, 2), np.float16)], name="weights")
        with pytest.raises(ValidationError, match=r"float32\[4\] here|float32\[4\] there"):
            one.allreduce([np.ones(3, np.float32)])


def test_a_call_that_failed_is_told_of_as_skipped_and_its_values_are_not_lost() -> None:
    one, other = pair()

    def broken(index: int, is_after: bool) -> None:
        raise KeyboardInterrupt

    with one, other:
        both(one, other, lambda rank: [ONES])
        other.store.fault = broken  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            other.allreduce([ONES])
        other.store.fault = None  # type: ignore[attr-defined]
        one.allreduce([2 * ONES])
        one.allreduce([3 * ONES])
        mean = other.allreduce([10 * ONES])
        assert other.last_round is not None
        assert (other.last_round.round, other.last_round.skipped) == (3, [1, 2])
        assert mean[0].tolist() == (11 * ONES).tolist()


@pytest.mark.parametrize("grace_s", [None, 60])
def test_a_round_with_a_quorum_goes_on_however_short_the_timeout(grace_s: float | None) -> None:
    one, other = pair(timeout_s=1, grace_s=grace_s)
    with one, other:
        assert one.allreduce([ONES])[0].tolist() == ONES.tolist()
        assert one.last_round is not None
        assert one.last_round.missing == [1]


def test_infinity_through_bf16_is_gone_with_its_round() -> None:
    one, other = pair(codec="bf16", grace_s=20)
    bad = np.array([np.inf, np.nan, -np.inf, 1], np.float32)
    with one, other:
        both(one, other, lambda rank: [bad])
        for mean in both(one, other, lambda rank: [ONES]):
            assert mean[0].tolist() == [1, 1, 1, 1]


@pytest.mark.filterwarnings("error")
def test_opposite_infinities_are_nan_for_everyone() -> None:
    one, other = pair(grace_s=20)
    with one, other:
        means = both(one, other, lambda rank: [ONES * [np.inf, -np.inf][rank]])
    assert all(np.isnan(mean[0]).all() for mean in means)


@pytest.mark.parametrize("at", [0, 3], ids=["in its own share", "in the other's share"])
def test_what_a_codec_cannot_hold_is_refused_before_anything_is_uploaded(at: int) -> None:
    blobs = ObjectStore(MemoryStore(), "store")
    with ObjectStoreAllReduce(blobs, 0, 2, codec="int8") as replica:
        spoilt = ONES.copy()
        spoilt[at] = np.nan
        with pytest.raises(ValidationError, match=r"tensors\[1\]: nan .*'int8'"):
            replica.allreduce([np.zeros(0, np.float32), spoilt])
        assert not blobs.list("run/upload")


@pytest.mark.parametrize(
    ("tensor", "messages"),
    [
        (np.array([1.0, 1e300]), r"tensors\[0\]: 1e\+300 .*float32"),
        (torch.tensor([1e300], dtype=torch.float64), r"tensors\[0\]: 1e\+300 .*float32"),
        (torch.zeros(3, device="meta"), r"tensors\[0\]: 'on the meta device'"),
        (torch.eye(3).to_sparse(), r"tensors\[0\]: 'torch.sparse_coo'"),
    ],
    ids=["float64", "torch float64", "meta", "sparse"],
)
def test_a_tensor_that_cannot_travel_is_named(tensor: Any, messages: str) -> None:
    with ObjectStoreAllReduce(ObjectStore(MemoryStore(), "store"), 0, 1) as replica:
        with pytest.raises(ValidationError, match=messages):
            replica.allreduce([tensor])
        assert replica.allreduce([ONES])[0].tolist() == ONES.tolist()


def test_arrays_of_another_byte_order_are_floats_too() -> None:
    one, other = pair(grace_s=20)
    with one, other:
        orders = [">f4", "<f4"]
        swapped, plain = both(one, other, lambda rank: [np.array([1.5 + rank], orders[rank])])
    assert swapped[0].tolist() == plain[0].tolist() == [2.0]
    assert swapped[0].dtype == ">f4"


@pytest.mark.parametrize(
    "bad",
    [
        {"rank": "0"},
        {"rank": True},
        {"rank": 0.5},
        {"world_size": "2"},
        {"min_replicas": "1"},
        {"timeout_s": None},
        {"timeout_s": "5"},
        {"grace_s": "5"},
        {"keep_rounds": 1.5},
        {"run_id": 5},
        {"codec": None},
        {"uri": ""},
        {"uri": None},
        {"uri": "file:///tmp/run?x=1"},
        {"uri": "/etc/passwd/run"},
        {"uri": "s3://bucket//x//y"},
    ],
    ids=str,
)
def test_arguments_of_the_wrong_kind_are_named(
    bad: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValidationError, match=next(iter(bad))):
        ObjectStoreAllReduce(**{"uri": tmp_path / "x", "rank": 0, "world_size": 2, **bad})
    assert not os.listdir(tmp_path)


def test_numbers_of_numpy_and_torch_are_numbers(tmp_path: Path) -> None:
    rank, size = np.int64(0), torch.tensor(1)
    with ObjectStoreAllReduce(tmp_path, rank, size) as replica:  # type: ignore[arg-type]
        for weight in (np.float32(2), torch.tensor(0.5)):
            assert replica.allreduce([ONES], weight=weight)[0].tolist() == ONES.tolist()  # type: ignore[arg-type]
        for bad in ("1", None, np.ones(2)):
            with pytest.raises(ValidationError, match="weight"):
                replica.allreduce([ONES], weight=bad)  # type: ignore[arg-type]


def test_a_bucket_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    server = S3Server()
    try:
        server.use(monkeypatch, "bucket")
        with pytest.raises(Permanent, match="s3://other/run: there is no such bucket"):
            ObjectStoreAllReduce("s3://other/run", 0, 1).allreduce([ONES])
        blobs = ObjectStore.open("s3://other/run")
        asked = (lambda: blobs.list("x"), blobs.list_folders, lambda: blobs.put("x", b""))
        for ask in asked:  # at once, not after a minute of trying
            with pytest.raises(Permanent, match="s3://other/run: there is no such bucket"):
                ask()
    finally:
        server.stop()
