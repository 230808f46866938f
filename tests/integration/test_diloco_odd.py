"""DiLoCo off the straight path: counts that come and go, failed rounds, models it cannot take."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from obstore.store import MemoryStore
from tests.allreduce.world import FaultyStore

from atoll.core.errors import Temporary, ValidationError
from atoll.diloco import DiLoCo, saved
from atoll.diloco.allreduce import catchup
from atoll.objectstore import ObjectStore


def net(seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(5, 3)


def train(model: torch.nn.Module, inner: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 5)).pow(2).mean().backward()
        inner.step()
        inner.zero_grad()


def alone(state: Any = None, **more: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, DiLoCo]:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    uri = f"memory:///{uuid.uuid4()}"
    settings = {"sync_every": 5, "uri": uri, "rank": 0, "world_size": 1, "state": state, **more}
    return model, inner, DiLoCo(model, inner, **settings)


def test_a_replica_that_goes_on_from_a_state_weighs_by_what_it_counts_from_then_on() -> None:
    model, inner, loop = alone()
    with loop:
        train(model, inner, 50)
        state = loop.state_dict()
    model, inner, loop = alone(state)
    with loop:
        for _ in range(5):
            loop.count(3)
            train(model, inner, 1)
        assert loop.reports[-1].weight == 15


def test_counting_may_begin_late_and_a_round_without_a_count_weighs_next_to_nothing() -> None:
    model, inner, loop = alone()
    with loop:
        train(model, inner, 9)
        loop.count(2)
        train(model, inner, 1)
        train(model, inner, 5)
        loop.count(4)
        train(model, inner, 5)
        weights = [report.weight for report in loop.reports]
    assert weights == [5, 2, pytest.approx(0, abs=1e-9), 4]


def test_a_model_with_complex_parameters_is_refused_and_left_alone() -> None:
    model = torch.nn.Module()
    model.wave = torch.nn.Parameter(torch.full((2,), 1 + 2j))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValidationError, match=r"model\.wave"):
        DiLoCo(model, inner, sync_every=1)
    assert model.wave.tolist() == [1 + 2j, 1 + 2j]


class Replica:
    """One of two, driven step by step; each step ends a round."""

    def __init__(self, store: Any, rank: int) -> None:
        self.blobs = FaultyStore(store, patience_s=0.0)
        self.model = net()
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loop = DiLoCo(
            self.model,
            self.inner,
            sync_every=1,
            uri=self.blobs,
            rank=rank,
            world_size=2,
            min_replicas=1,
            grace_s=0.05,
        )

    def step(self, times: int = 1) -> None:
        train(self.model, self.inner, times)

    def is_where_the_run_is(self) -> bool:
        newest = Replica(self.blobs._reader, 0)
        with newest.loop:
            ours, theirs = self.loop.global_parameters(), newest.loop.global_parameters()
        is_same = all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)
        return is_same and self.loop.round == newest.loop.round


def departed(*_: object) -> None:
    raise Temporary("gone")


def test_a_replica_whose_round_failed_takes_the_steps_it_missed() -> None:
    store = MemoryStore()
    one, other = Replica(store, 0), Replica(store, 1)
    with one.loop, other.loop:
        one.step()
        other.step(2)
        one.step()  # takes the rounds it was not in
        one.step()  # and makes one
        other.blobs.fault = departed
        with pytest.raises(Temporary):
            other.step()
        other.blobs.fault = None
        other.step()
        assert other.loop.reports[-1].weight == 2  # of two steps
        assert other.is_where_the_run_is()


def test_a_replica_that_failed_to_catch_up_does_so_later(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    one, other = Replica(store, 0), Replica(store, 1)
    with one.loop, other.loop:
        one.step(3)
        with monkeypatch.context() as patch:
            patch.setattr(catchup, "read_since", departed)
            with pytest.raises(Temporary):
                other.step()
        other.step()
        assert other.loop.round == 5
        assert other.is_where_the_run_is()


def test_a_checkpoint_that_cannot_be_saved_is_no_reason_to_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, inner, loop = alone()
    monkeypatch.setattr(saved, "save", departed)
    with loop:
        train(model, inner, 10)
        assert loop.round == 2


def test_a_run_begun_from_a_state_can_be_joined_before_its_first_checkpoint() -> None:
    model, inner, loop = alone()
    with loop:
        train(model, inner, 15)
        state = loop.state_dict()
    blobs = ObjectStore(MemoryStore(), "store")
    model, inner, loop = alone(state, uri=blobs, sync_every=1)
    with loop:
        train(model, inner, 6)
        assert not blobs.list("run/checkpoint")
        late, _, joined = alone(None, uri=blobs, sync_every=1)
        with joined:
            assert joined.round == loop.round == 9
            for name, value in model.named_parameters():
                assert torch.equal(value, dict(late.named_parameters())[name])
