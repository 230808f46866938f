"""The all-reduce on every kind of store there is here, good ones and bad ones."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.allreduce.s3server import S3Server
from tests.allreduce.world import World, run_threads

import atoll
from atoll.core.errors import AtollError


@pytest.fixture
def server() -> Iterator[S3Server]:
    server = S3Server()
    yield server
    server.stop()


@pytest.fixture(params=["memory", "file", "path", "s3"])
def uri(request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param != "s3":
        locations = {
            "memory": f"memory://{uuid.uuid4().hex}/run",
            "file": f"file://{tmp_path}/run",
            "path": str(tmp_path / "run"),
        }
        yield locations[request.param]
        return
    server = S3Server()
    yield server.use(monkeypatch, "bucket")
    server.stop()


def all_reduce(uri: str, brought: list[list[Any]], **options: Any) -> list[list[Any]]:
    """One call of every replica, each in a thread of its own."""
    size = len(brought)
    results: list[list[Any]] = [[] for _ in brought]

    def go(rank: int) -> None:
        with atoll.ObjectStoreAllReduce(uri, rank, size, **options) as replica:
            results[rank] = replica.allreduce(brought[rank], weight=rank + 1.0)

    run_threads(*(lambda r=r: go(r) for r in range(size)))
    return results


def test_everyone_gets_the_weighted_mean_with_the_same_bits(uri: str) -> None:
    rng = np.random.default_rng(3)
    brought = [[rng.standard_normal((7, 5)).astype("f4"), rng.standard_normal(3)] for _ in range(3)]
    results = all_reduce(uri, brought)
    for index in range(2):
        mean = np.average([b[index] for b in brought], axis=0, weights=[1, 2, 3])
        for result in results:
            assert result[index].dtype == brought[0][index].dtype
            assert result[index].tobytes() == results[0][index].tobytes()
            np.testing.assert_allclose(result[index], mean, rtol=1e-6)


def test_torch_tensors_of_any_float_type_come_back_as_they_went() -> None:
    def tensors(rank: int) -> list[torch.Tensor]:
        return [
            torch.full((2, 3), float(rank), dtype=torch.bfloat16),
            torch.tensor(float(rank), dtype=torch.float64),
            torch.ones(4, dtype=torch.float16, requires_grad=True),
            torch.empty(0),
            torch.arange(12.0).reshape(3, 4).t(),
        ]

    results = all_reduce(f"memory://{uuid.uuid4()}", [tensors(1), tensors(4)])
    for result in results:
        for got, gave in zip(result, tensors(0), strict=True):
            assert (got.dtype, got.shape, got.requires_grad) == (gave.dtype, gave.shape, False)
        assert result[0][0, 0] == 3.0
        assert result[1].item() == 3.0
        assert torch.equal(result[4], torch.arange(12.0).reshape(3, 4).t())


@pytest.mark.parametrize("codec", ["bf16", "int8", "e3m0", "sparse"])
def test_a_lossy_codec_loses_nothing_in_the_long_run(codec: str) -> None:
    """Error feedback in both directions: the sum of the means approaches the sum of the truth."""
    world = World(3)
    sums: dict[int, Any] = {}
    value = [np.random.default_rng(r).standard_normal(9000).astype("f4") for r in range(3)]
    rounds = 60 if codec != "sparse" else 400

    def go(rank: int) -> None:
        with world.replica(rank, codec=codec, grace_s=20) as replica:
            total = np.zeros(9000)
            for _ in range(rounds):
                total += replica.allreduce([value[rank]])[0]
            sums[rank] = total / rounds

    run_threads(*(lambda r=r: go(r) for r in range(3)))
    assert sums[0].tobytes() == sums[1].tobytes() == sums[2].tobytes()
    mean = np.mean(value, axis=0)
    assert np.abs(sums[0] - mean).mean() < 0.1 * np.abs(mean).mean()


def test_a_store_that_ignores_conditions_is_refused_at_the_start(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = server.use(monkeypatch, "bucket")
    server.strips_conditions = True
    for _ in range(2):  # also when the probe is there already
        with pytest.raises(AtollError, match="ignores conditional writes"):
            atoll.ObjectStoreAllReduce(uri, 0, 2).allreduce([np.zeros(3, "f4")])


def test_a_store_that_fails_a_fifth_of_all_requests_is_only_slower(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = server.use(monkeypatch, "bucket")
    server.fail_share = 0.2
    rng = np.random.default_rng(1)
    for _ in range(3):
        brought = [[rng.standard_normal(100).astype("f4")] for _ in range(3)]
        results = all_reduce(uri, brought)
        mean = np.average([b[0] for b in brought], axis=0, weights=[1, 2, 3])
        assert all(r[0].tobytes() == results[0][0].tobytes() for r in results)
        np.testing.assert_allclose(results[0][0], mean, rtol=1e-6)
    assert server.failed > 10


def test_a_store_that_is_gone_for_a_while_is_waited_for(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = server.use(monkeypatch, "bucket")
    done = []

    def go(rank: int) -> None:
        with atoll.ObjectStoreAllReduce(uri, rank, 2) as replica:
            for turn in range(12):
                done.append(float(replica.allreduce([np.array([rank + turn], "f4")])[0][0]))
                if len(done) == 8:
                    server.has_left = True
                    threading.Timer(1.0, lambda: setattr(server, "has_left", False)).start()

    run_threads(lambda: go(0), lambda: go(1))
    assert sorted(done) == sorted(2 * [turn + 0.5 for turn in range(12)])
    assert server.failed > 0


def test_a_second_run_at_the_same_place_never_reads_the_first(tmp_path: Path) -> None:
    """The same URI, one run after the other and with leftovers of a crash in between."""
    for run in range(3):
        brought = [[np.full(5, 10.0 * run + rank, "f4")] for rank in range(2)]
        results = all_reduce(str(tmp_path), brought)
        mean = np.average([b[0] for b in brought], axis=0, weights=[1, 2])
        np.testing.assert_allclose(results[0][0], mean, rtol=1e-6)


def test_old_rounds_are_collected_but_the_journal_stays(tmp_path: Path) -> None:
    def go(rank: int) -> None:
        with atoll.ObjectStoreAllReduce(tmp_path, rank, 2) as replica:
            for _ in range(40):
                replica.allreduce([np.zeros(10, "f4")])

    run_threads(lambda: go(0), lambda: go(1))
    run = tmp_path / "run"
    assert len(list((run / "manifest").iterdir())) == 40
    assert len(list((run / "upload").iterdir())) < 30  # one sweeps beside the rounds
    assert len(list((run / "checkpoint").iterdir())) < 10


def test_runs_with_different_ids_share_a_place(tmp_path: Path) -> None:
    results: dict[str, Any] = {}

    def go(run: str) -> None:
        with atoll.ObjectStoreAllReduce(tmp_path, 0, 1, run_id=run) as replica:
            results[run] = replica.allreduce([np.array([ord(run)], "f4")])[0][0]

    run_threads(lambda: go("a"), lambda: go("b"))
    assert results == {"a": 97.0, "b": 98.0}
