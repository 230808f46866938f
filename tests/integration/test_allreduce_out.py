"""`out=`: the mean comes into memory that the caller has."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.allreduce.world import run_threads

from atoll import ObjectStoreAllReduce
from atoll.core.errors import BelowMinimumWorld, DistributedError, ValidationError

SHAPES = ((40, 3), (0,), (), (5,))


def bring(rank: int, turn: int, dtype: str = "f4") -> list[Any]:
    chance = np.random.default_rng([rank, turn])
    return [np.asarray(chance.standard_normal(shape), dtype) for shape in SHAPES]


def as_torch(arrays: list[Any]) -> list[Any]:
    return [torch.from_numpy(array.copy()) for array in arrays]


def in_one_piece(arrays: list[Any]) -> list[Any]:
    flat = np.concatenate([array.reshape(-1) for array in arrays])
    ends = np.cumsum([array.size for array in arrays])
    return [p.reshape(a.shape) for p, a in zip(np.split(flat, ends[:-1]), arrays, strict=True)]


def rooms(tensors: list[Any]) -> list[Any]:
    like = torch.zeros_like if isinstance(tensors[0], torch.Tensor) else np.zeros_like
    return [like(tensor) for tensor in tensors]


def reduce_all(call: Callable[[ObjectStoreAllReduce, int], Any], **options: Any) -> list[Any]:
    uri, results = f"memory://{uuid.uuid4()}", [None, None]

    def go(rank: int) -> None:
        with ObjectStoreAllReduce(uri, rank, 2, **options) as replica:
            results[rank] = call(replica, rank)

    run_threads(*(lambda r=r: go(r) for r in range(2)))
    return results


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize(
    ("make", "dtype"),
    [(list, "f4"), (in_one_piece, "f4"), (as_torch, "f4"), (as_torch, "f2")],
)
@pytest.mark.parametrize("where", ["apart", "in one piece", "the result before", "themselves"])
def test_the_mean_is_in_out_with_the_bits_it_would_have_without(
    codec: str, make: Any, dtype: str, where: str
) -> None:
    options = {"codec": codec}

    def plain(replica: ObjectStoreAllReduce, rank: int) -> list[list[Any]]:
        return [replica.allreduce(make(bring(rank, turn, dtype))) for turn in range(3)]

    def into_out(replica: ObjectStoreAllReduce, rank: int) -> list[list[Any]]:
        means, out = [], None
        for turn in range(3):
            tensors = make(bring(rank, turn, dtype))
            if where == "apart":
                out = rooms(tensors)
            elif where == "in one piece":
                out = make(in_one_piece(bring(9, 9, dtype)))
            elif where == "themselves":
                out = tensors
            before = None if out is None else [id(each) for each in out]
            result = replica.allreduce(tensors, out=out)
            assert before is None or [id(each) for each in result] == before
            if where != "themselves":
                for now, brought in zip(tensors, bring(rank, turn, dtype), strict=True):
                    np.testing.assert_array_equal(np.asarray(now), brought)
            means.append([np.asarray(each).copy() for each in result])
            out = result if where == "the result before" else None
        return means

    expected = reduce_all(plain, **options)
    for rank, means in enumerate(reduce_all(into_out, **options)):
        for turn, mean in enumerate(means):
            for got, right in zip(mean, expected[rank][turn], strict=True):
                assert got.tobytes() == np.asarray(right).tobytes()
                assert got.shape == tuple(right.shape)


def test_the_result_of_an_earlier_call_needs_no_other_memory() -> None:
    def call(replica: ObjectStoreAllReduce, rank: int) -> bool:
        out = replica.allreduce(bring(rank, 0))
        again = replica.allreduce(bring(rank, 1), out=out)
        vector = again[0].base
        return all(each.base is vector for each in again if each.size)

    assert reduce_all(call) == [True, True]


def test_a_call_that_fails_leaves_the_tensors_as_they_were() -> None:
    tensors = bring(0, 0)
    uri = f"memory://{uuid.uuid4()}"
    with ObjectStoreAllReduce(uri, 0, 2, min_replicas=2, timeout_s=0.3) as replica:
        with pytest.raises(BelowMinimumWorld):
            replica.allreduce(tensors, out=tensors)
    for now, brought in zip(tensors, bring(0, 0), strict=True):
        assert now.tobytes() == brought.tobytes()


def read_only() -> list[Any]:
    out = rooms(bring(0, 0))
    out[3].flags.writeable = False
    return out


def overlapping() -> list[Any]:
    out = rooms(bring(0, 0))
    out[3] = out[0].reshape(-1)[2:7]
    return out


@pytest.mark.parametrize(
    ("out", "field", "messages"),
    [
        (bring(0, 0)[:3], "out", "expected 4 tensors"),
        (np.float32(3), "out", "expected a list of tensors"),
        ("abcd", "out", "expected a list of tensors"),
        (bring(0, 0, "f8"), "out[0]", "expected float32[40, 3]"),
        ([*bring(0, 0)[:3], np.ones(6, "f4")], "out[3]", "expected float32[5]"),
        ([*bring(0, 0)[:3], [1.0] * 5], "out[3]", "expected a tensor"),
        ([*bring(0, 0)[:2], np.float32(1), *bring(0, 0)[3:]], "out[2]", "expected a tensor"),
        ([*bring(0, 0)[:3], torch.ones(5)], "out[3]", "expected a ndarray"),
        (read_only(), "out[3]", "expected memory to write to"),
        (overlapping(), "out[3]", "in memory of out[0]"),
    ],
)
def test_a_bad_out_is_named_before_anything_has_happened(
    out: Any, field: str, messages: str
) -> None:
    with ObjectStoreAllReduce(f"memory://{uuid.uuid4()}", 0, 2) as replica:
        before = replica.store.traffic.requests
        with pytest.raises(ValidationError) as error:
            replica.allreduce(bring(0, 0), out=out)
        assert replica.store.traffic.requests == before
    assert error.value.field == field
    assert messages in str(error.value)


def test_an_expanded_out_is_refused_and_one_between_the_values_of_another_is_filled() -> None:
    with ObjectStoreAllReduce(f"memory://{uuid.uuid4()}", 0, 1) as replica:
        with pytest.raises(ValidationError, match=r"out\[0\]: 'expanded'"):
            replica.allreduce([torch.ones(4, 3)], out=[torch.zeros(3).expand(4, 3)])
        both = np.zeros((5, 2), "f4")
        values = [np.arange(5, dtype="f4"), np.arange(5, dtype="f4") + 7]
        replica.allreduce(values, out=[both[:, 0], both[:, 1]])
        assert both.T.tolist() == [each.tolist() for each in values]


def test_a_closed_replica_says_so() -> None:
    replica = ObjectStoreAllReduce(f"memory://{uuid.uuid4()}", 0, 1)
    replica.close()
    with pytest.raises(DistributedError, match="is closed"):
        replica.allreduce([np.ones(3, "f4")])
