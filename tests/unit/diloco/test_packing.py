"""Tensors of any kind as one vector, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from atoll.diloco.packing import are_apart, as_vector, flatten, unflatten


def test_arrays_survive_being_one_vector() -> None:
    arrays = [
        np.arange(5.0, dtype="f4"),
        np.zeros((0, 3), "f4"),
        np.ones((2, 2), "f2"),
        np.asarray(np.float64(7)),
    ]
    flat = np.empty(10, "f4")
    flatten(arrays, flat)
    for got, gave in zip(unflatten(flat, arrays), arrays, strict=True):
        assert got.dtype == gave.dtype
        np.testing.assert_array_equal(got, gave)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_of_torch_come_back_as_they_were(dtype: torch.dtype) -> None:
    tensors = [
        torch.nn.Parameter(torch.arange(6.0).reshape(2, 3).to(dtype)),
        torch.zeros(0, 3, dtype=dtype),
        torch.tensor(7.0, dtype=dtype),
        torch.arange(6.0).reshape(2, 3).t().to(dtype),
        torch.arange(4.0, dtype=dtype)._neg_view(),
    ]
    flat = np.empty(17, "f4")
    flatten(tensors, flat)
    assert flat.tolist() == [0, 1, 2, 3, 4, 5, 7, 0, 3, 1, 4, 2, 5, 0, -1, -2, -3]
    got = unflatten(flat, tensors)
    for mine, theirs in zip(got, tensors, strict=True):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(mine, theirs)
    # What was used in a graph is not changed by a step that is made with another of them.
    weight = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    loss = (weight * got[0]).sum()
    got[3].add_(1)
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, got[0])


def test_tensors_of_two_kinds_are_one_vector() -> None:
    tensors = [np.ones(2, "f2"), torch.full((2,), 2.0), np.float64(3), torch.ones(1).bfloat16()]
    flat = np.empty(6, "f4")
    flatten(tensors, flat)
    assert flat.tolist() == [1, 1, 2, 2, 3, 1]
    assert [type(each) for each in unflatten(flat, tensors)] == [
        *(np.ndarray, torch.Tensor, np.ndarray, torch.Tensor)
    ]


def test_memory_is_one_vector_if_the_tensors_follow_each_other() -> None:
    complete = np.arange(12, dtype="f4")
    pieces = [complete[:3], complete[3:9].reshape(2, 3), complete[9:]]
    for cut in (pieces, [torch.from_numpy(piece) for piece in pieces]):
        vector = as_vector(cut)
        assert vector is not None
        assert vector.tolist() == complete.tolist()
        assert not are_apart(vector, cut)
        assert not are_apart(vector[:3], cut)
        assert are_apart(vector[3:9], [cut[0], cut[2]])
        assert as_vector([cut[0], cut[2]]) is None
        assert as_vector([cut[1], cut[0]]) is None
        assert as_vector([cut[0], cut[1], cut[1]]) is None
    assert as_vector([complete[::2]]) is None
    assert as_vector([complete.astype("f8")]) is None
    assert as_vector([]) is None
    assert are_apart(complete, [np.ones(4, "f8"), np.ones((2, 2), "f4")])
