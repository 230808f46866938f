"""Trainings that train wrong are told so: in the first rounds, and whenever a number is not one."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from atoll.core.errors import ValidationError
from atoll.diloco import DiLoCo
from atoll.diloco.allreduce import ObjectStoreAllReduce

torch.set_num_threads(1)


def net(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2)
    )


def world(size: int, replica: Callable[[int], Any]) -> list[Any]:
    out: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            out[rank] = replica(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return out


def train(
    model: torch.nn.Module, inner: torch.optim.Optimizer, steps: int, seed: int, *, noise: int = 0
) -> None:
    """`noise`: another number gives other movements from the same data."""
    dice = torch.Generator().manual_seed(seed)
    for step in range(steps):
        x = torch.randn(8, 6, generator=dice)
        loss = torch.nn.functional.mse_loss(model(x), x[:, :2])
        (loss * (1 + noise * 0.01 * step)).backward()
        inner.step()
        inner.zero_grad()


def run(
    size: int,
    body: Callable[[int, torch.nn.Module, torch.optim.Optimizer, DiLoCo], None],
    model: Callable[[], torch.nn.Module] = lambda: net().eval().train(),
    **options: Any,
) -> list[tuple[DiLoCo, dict[str, np.ndarray]]]:
    uri, one_at_a_time = f"memory:///{uuid.uuid4()}", threading.Lock()

    def replica(rank: int) -> tuple[DiLoCo, dict[str, np.ndarray]]:
        with one_at_a_time:
            own = model()
        own.apply(lambda part: part.eval() if isinstance(part, torch.nn.Dropout) else None)
        inner = torch.optim.AdamW(own.parameters(), lr=1e-2)
        settings = {"sync_every": 2, "min_replicas": size, "timeout": 60, **options}
        with DiLoCo(own, inner, uri=uri, rank=rank, world_size=size, **settings) as diloco:
            body(rank, own, inner, diloco)
        return diloco, diloco.global_parameters()

    return world(size, replica)


def test_replicas_that_move_identically_are_told_by_all() -> None:
    done = run(3, lambda rank, model, inner, _: train(model, inner, 4, seed=min(rank, 1)))
    for diloco, _ in done:
        (messages,) = diloco.warnings
        assert "round 0: ranks 1 and 2 have identical pseudo-gradients" in messages


def test_replicas_that_read_the_same_data_are_told_though_they_move_apart() -> None:
    done = run(2, lambda rank, model, inner, _: train(model, inner, 4, seed=0, noise=rank))
    for diloco, _ in done:
        (messages,) = diloco.warnings
        assert "ranks 0 and 1 were given the same batches" in messages


def test_replicas_with_data_of_their_own_are_told_nothing() -> None:
    done = run(2, lambda rank, model, inner, _: train(model, inner, 4, seed=rank))
    assert [diloco.warnings for diloco, _ in done] == [[], []]


def test_a_step_as_long_whatever_the_data_is_no_word_of_the_same_data() -> None:
    def body(rank: int, model: torch.nn.Module, inner: Any, _: DiLoCo) -> None:
        for _step in range(4):
            sum(p.sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
            model(torch.full((8, 6), rank + 1.0))
            inner.step()
            inner.zero_grad()

    done = run(2, body, sync_every=1, warmup=None)
    assert [diloco.warnings for diloco, _ in done] == [[], []]


@pytest.mark.parametrize("is_unlike", [True, False])
def test_parameters_that_are_not_trained_and_differ_are_told_once(is_unlike: bool) -> None:
    seeds = iter([1, 2] if is_unlike else [1, 1])

    def model() -> torch.nn.Module:
        torch.manual_seed(next(seeds))
        layers = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 2))
        layers[0].requires_grad_(False)
        return layers

    done = run(2, lambda rank, model, inner, _: train(model, inner, 8, seed=rank), model)
    is_reported = [
        w for diloco, _ in done for w in diloco.warnings if "differ between replicas (" in w
    ]
    assert len(is_reported) == 2 * is_unlike
    assert all(
        "not trained differ between replicas (0.weight, 0.bias)" in each for each in is_reported
    )


def test_buffers_that_differ_are_told_once() -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 2), torch.nn.BatchNorm1d(2))

    done = run(2, lambda rank, model, inner, _: train(model, inner, 8, seed=rank), model)
    for diloco, _ in done:
        (messages,) = diloco.warnings
        assert (
            "buffers of the model differ between replicas (1.running_mean, 1.running_var"
            in messages
        )


@pytest.mark.parametrize(
    "options",
    [{"codec": "fp32"}, {"codec": "int4"}, {"fragments": 2, "overlap_steps": 0, "mix": 0.5}],
    ids=str,
)
def test_a_movement_that_is_not_finite_is_left_out_by_all_and_its_replica_goes_on(
    options: dict[str, Any],
) -> None:
    def body(
        rank: int, model: torch.nn.Module, inner: torch.optim.Optimizer, diloco: DiLoCo
    ) -> None:
        train(model, inner, 2, seed=rank)
        if rank == 1:  # in the parameters and in the state of AdamW
            train(model, inner, 1, seed=7)
            model[3].weight.grad = torch.full((2, 8), torch.nan)  # type: ignore[index,union-attr]
            inner.step()
            inner.zero_grad()
        else:
            train(model, inner, 2, seed=8)
        train(model, inner, 4, seed=rank + 20)
        assert all(torch.isfinite(value).all() for value in model.parameters())

    (one, its), (other, theirs) = run(2, body, **options)
    assert all(np.isfinite(its[name]).all() for name in its)
    assert all(np.array_equal(its[name], theirs[name]) for name in its)
    for diloco in (one, other):
        messages = [each for each in diloco.warnings if "leaves out" in each]
        assert messages, diloco.warnings
        assert all("leaves out rank 1: its " in each for each in messages)
        manifests = [report.members for report in diloco.reports]
        assert (0,) in manifests
        assert manifests[-1] == (0, 1)
    if "fragments" not in options:
        assert any("3.weight is not finite" in each for each in one.warnings)
    assert any("starts over" in each for each in other.warnings)


def test_a_replica_alone_that_is_not_finite_goes_back_to_where_it_was() -> None:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(model, inner, sync_every=1) as diloco:
        before = diloco.global_parameters()
        model[0].weight.grad = torch.full((8, 6), torch.inf)
        inner.step()
        after = diloco.global_parameters()
        assert all(np.array_equal(before[name], after[name]) for name in before)
        assert "leaves out rank 0: its 0.weight is not finite" in diloco.warnings[0]


def test_a_codec_that_does_not_exist_is_refused_also_alone() -> None:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    for settings in ({"codec": "int17"}, {"codec": "int4", "down_codec": "int17"}):
        with pytest.raises(ValidationError, match="codec: 'int17'.*'int4'"):
            DiLoCo(model, inner, sync_every=1, **settings)  # type: ignore[arg-type]


def test_steps_after_the_last_whole_round_are_told_of_or_synchronised() -> None:
    def body(sync: bool) -> DiLoCo:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, inner, sync_every=4) as diloco:
            train(model, inner, 7, seed=0)
            if sync:
                diloco.sync()
        return diloco

    assert "steps after round 1 are not synchronised (3)" in body(sync=False).warnings[0]
    synced = body(sync=True)
    assert synced.warnings == []
    assert (synced.round, synced.reports[-1].weight) == (2, 3)


def test_one_weight_cannot_own_the_mean() -> None:
    uri = f"memory:///{uuid.uuid4()}"

    def replica(rank: int) -> tuple[float, dict[int, float]]:
        with ObjectStoreAllReduce(uri, rank, 3, min_replicas=3, timeout_s=20) as reduce:
            with pytest.raises(ValidationError, match="weight: 1e"):
                reduce.allreduce([np.zeros(4, np.float32)], weight=1e300)
            values = np.full(4, float(rank == 2), np.float32)
            (mean,) = reduce.allreduce([values], weight=1e17 if rank == 2 else 1.0)
            assert reduce.last_round is not None
            return float(mean[0]), reduce.last_round.members

    for mean, manifest in world(3, replica):
        assert manifest == {0: 1.0, 1: 1.0, 2: 100.0}
        assert mean == pytest.approx(100 / 102)


def test_a_replica_that_counts_something_else_is_named_by_all() -> None:
    uri = f"memory:///{uuid.uuid4()}"

    def replica(rank: int) -> list[str]:
        model = net()
        inner = torch.optim.SGD(model.parameters(), lr=0.01)
        home: dict[str, Any] = {"uri": uri, "rank": rank, "world_size": 3, "min_replicas": 3}
        with DiLoCo(model, inner, sync_every=1, **home) as diloco:
            for step in range(2):
                diloco.count(1e9 if rank == 1 else 8)
                train(model, inner, 1, 10 * rank + step)
        return diloco.warnings

    messages = "round 0: rank 1 weighs 1e+09 and counts as 800, 100 times the median"
    for warnings in world(3, replica):
        assert [each.startswith(messages) for each in warnings] == [True]


def test_values_near_the_largest_float_do_not_overflow_with_what_was_left_out() -> None:
    uri = f"memory:///{uuid.uuid4()}"

    def replica(rank: int) -> list[float]:
        values = np.linspace(1e38, 3.4e38, 64, dtype=np.float32)
        with ObjectStoreAllReduce(
            uri, rank, 2, min_replicas=2, codec="int4", timeout_s=20
        ) as reduce:
            return [float(np.abs(reduce.allreduce([values])[0]).max()) for _ in range(3)]

    assert all(np.isfinite(tops).all() and min(tops) > 1e38 for tops in world(2, replica))
