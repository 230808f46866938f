"""`ObjectStoreAllReduce` takes the arguments that scripts for composer give it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.allreduce.world import run_threads

from atoll import ObjectStoreAllReduce
from atoll.core.errors import ValidationError

FIRST = {"round_id": None, "timeout_s": 1800.0, "poll_interval_s": 1.0}


def test_the_signature_begins_as_composers() -> None:
    own = list(inspect.signature(ObjectStoreAllReduce).parameters.values())
    assert [p.name for p in own[:3]] == ["uri", "rank", "world_size"]
    assert {p.name: p.default for p in own[3:6]} == FIRST
    assert {p.kind for p in own[3:]} == {inspect.Parameter.KEYWORD_ONLY}


def both(uri: Path, values: list[Any], *messages: Any, **options: Any) -> list[Any]:
    """What two replicas get for theirs, and the round they did."""
    means: list[Any] = [None, None]

    def take_part(rank: int) -> None:
        with ObjectStoreAllReduce(
            str(uri), rank, 2, min_replicas=2, timeout_s=60, poll_interval_s=0.05, **options
        ) as store:
            mean = store.allreduce(values[rank], *messages)
            means[rank] = mean, store.round

    run_threads(lambda: take_part(0), lambda: take_part(1))
    return means


def test_one_tensor_gives_one_tensor(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    values = [torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)]
    for mean, _ in both(tmp_path, values, "grad"):
        assert isinstance(mean, torch.Tensor)
        assert torch.equal(mean, (values[0] + values[1]) / 2)


def test_an_array_a_scalar_and_lists_are_what_they_were(tmp_path: Path) -> None:
    arrays = [np.arange(4, dtype=np.float32), np.zeros(4, dtype=np.float32)]
    for mean, _ in both(tmp_path / "array", arrays):
        assert isinstance(mean, np.ndarray)
        assert mean.tolist() == [0.0, 0.5, 1.0, 1.5]
    for mean, _ in both(tmp_path / "scalar", [np.float32(1.0).reshape(()), np.zeros((), "f4")]):
        assert mean.shape == ()
        assert float(mean) == 0.5
    for mean, _ in both(tmp_path / "list", [[arrays[0]], [arrays[1]]]):
        assert isinstance(mean, list)
        assert mean[0].tolist() == [0.0, 0.5, 1.0, 1.5]


def test_one_tensor_is_written_to_one_out(tmp_path: Path) -> None:
    value, out = np.ones(3, dtype=np.float32), np.zeros(3, dtype=np.float32)
    with ObjectStoreAllReduce(str(tmp_path), 0, 1) as store:
        assert store.allreduce(value, out=out) is out
        assert out.tolist() == [1.0, 1.0, 1.0]
        for odd in ([out], (out,)):
            with pytest.raises(ValidationError, match="out: 'list' is not|out: 'tuple' is not"):
                store.allreduce(value, out=odd)
        with pytest.raises(ValidationError, match="out: 'ndarray' is not valid"):
            store.allreduce([value], out=out)


def test_rounds_begin_with_the_one_that_is_given(tmp_path: Path) -> None:
    value = np.ones(3, dtype=np.float32)
    for mean, following in both(tmp_path, [value, value], round_id=7):
        assert mean.tolist() == [1.0, 1.0, 1.0]
        assert following == 8


@pytest.mark.parametrize(
    "bad", [{"round_id": -1}, {"round_id": "a"}, {"timeout_s": 0}, {"poll_interval_s": 0}]
)
def test_bad_arguments_are_named(tmp_path: Path, bad: dict[str, Any]) -> None:
    (field,) = bad
    with pytest.raises(ValidationError, match=f"^{field}: "):
        ObjectStoreAllReduce(str(tmp_path), 0, 2, **bad)
