"""DiLoCo off the straight path: failed calls, late work, lost answers, rounds without work."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from obstore.store import MemoryStore
from tests.support.stores import FaultyStore, run_threads

from atoll import ObjectStoreAllReduce
from atoll.core.errors import BelowMinimumWorld, Temporary, ValidationError
from atoll.diloco import DiLoCo
from atoll.objectstore import ObjectStore


def net(seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(5, 3)


def train(model: torch.nn.Module, inner: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(4, 5)).pow(2).mean().backward()
        inner.step()
        inner.zero_grad()


def alone(**more: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer, DiLoCo]:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    uri = f"memory:///{uuid.uuid4()}"
    settings = {"sync_every": 5, "uri": uri, "rank": 0, "world_size": 1, **more}
    return model, inner, DiLoCo(model, inner, **settings)


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


@pytest.mark.parametrize(
    "odd",
    [torch.zeros(2).to(torch.float8_e4m3fn), torch.ones(2).to_sparse()],
    ids=["fp8", "sparse"],
)
def test_a_parameter_that_cannot_be_added_up_is_named(odd: torch.Tensor) -> None:
    model = net()
    model.odd = torch.nn.Parameter(odd)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValidationError, match=r"model\.odd.*expected"):
        DiLoCo(model, inner, sync_every=1)


def test_a_model_with_complex_parameters_is_refused_and_left_alone() -> None:
    model = torch.nn.Module()
    model.wave = torch.nn.Parameter(torch.full((2,), 1 + 2j))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValidationError, match=r"model\.wave"):
        DiLoCo(model, inner, sync_every=1)
    assert model.wave.tolist() == [1 + 2j, 1 + 2j]


class Replica:
    """Each of its steps moves each value by one, so the values say which steps count."""

    def __init__(self, store: Any, rank: int = 0, world_size: int = 1, **more: Any) -> None:
        self.store = FaultyStore(store, "memory", patience_s=0.0)
        self.model = torch.nn.ParameterList(torch.zeros(4) for _ in range(2))
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0)
        settings = {
            **{"sync_every": 1, "outer_lr": 1.0, "outer_momentum": 0.0, "min_replicas": 1},
            **{"grace_s": 0.05, "timeout": 20.0},
            **more,
        }
        self.loop = DiLoCo(
            self.model, self.inner, uri=self.store, rank=rank, world_size=world_size, **settings
        )

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            for value in self.model.parameters():
                value.grad = torch.full_like(value, -1.0)
            self.inner.step()

    @property
    def values(self) -> list[float]:
        found = self.loop.global_parameters().values()
        return [float(each) for row in found for each in row]

    @contextmanager
    def failing(self, what: str, part: str, *, is_after: bool) -> Iterator[None]:
        """Requests of a kind fail: before they are made, or their answer is lost."""
        has_failed = False

        def fault(made: str, key: str, after: bool) -> None:
            nonlocal has_failed
            # What follows a lost answer fails, too: nobody can ask what became of it.
            if (made, after) == (what, is_after) and f"/{part}/" in key:
                has_failed = True
            if has_failed:
                raise Temporary(f"no answer to {made} {key}")

        self.store.fault = fault
        try:
            yield
        finally:
            self.store.fault = None
        assert has_failed


@pytest.mark.parametrize(
    ("what", "part", "is_after"),
    [
        ("put", "upload", False),
        ("put", "upload", True),
        ("create", "manifest", False),
        ("create", "manifest", True),  # it is committed, and the call fails
        ("create", "receipt", True),
        ("get", "receipt", False),
    ],
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"codec": "int4"},
        {"sync_every": 4, "overlap_steps": 2, "mix": "keep"},
        {"sync_every": 2, "fragments": 2},
    ],
    ids=str,
)
def test_the_work_of_a_call_that_failed_counts_once(
    options: dict[str, Any], what: str, part: str, is_after: bool
) -> None:
    """A script catches the error and trains on."""
    store = MemoryStore()
    one = Replica(store, **options)
    period = options.get("sync_every", 1)
    with one.loop:
        one.step(period)
        with one.failing(what, part, is_after=is_after), pytest.raises(Temporary):
            one.step(period + options.get("overlap_steps", 0))
        one.step(3 * period - options.get("overlap_steps", 0))
        one.loop.sync()
        one.loop.sync()
        trained = one.loop.steps
        assert one.values == pytest.approx([trained] * 8, abs=0.05)
        assert one.loop.step == trained
    again = Replica(store, **options)
    with again.loop:
        assert again.values == pytest.approx([trained] * 8, abs=0.05)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"codec": "int4"},
        {"sync_every": 4, "overlap_steps": 3, "mix": "keep"},
        {"sync_every": 2, "fragments": 2},
    ],
    ids=str,
)
def test_late_work_is_in_the_parameters_once(options: dict[str, Any]) -> None:
    """The round is decided while the upload is on its way; the others do not train."""
    store = MemoryStore()
    slow, other = (Replica(store, rank, 2, **options) for rank in range(2))
    period = options.get("sync_every", 1)
    rounds: list[int] = []

    def decide_first(what: str, key: str, is_after: bool) -> None:
        if (what, is_after) == ("put", False) and "/upload/" in key and len(rounds) < 2:
            rounds.append(other.loop.round)
            other.loop.end_period()  # without work: it moves nothing

    with slow.loop, other.loop:
        slow.step(period)
        slow.store.fault = decide_first
        slow.step(3 * period)
        slow.loop.sync()
        slow.loop.sync()
        trained = slow.loop.steps
        assert len(rounds) == 2
        assert sum(0 not in report.members for report in slow.loop.reports) == 2
        assert slow.values == pytest.approx([trained] * 8, abs=0.05)
    assert other.values == slow.values  # who ends takes every round


@pytest.mark.parametrize("outer_momentum", [0.0, 0.9])
def test_a_round_in_which_nobody_trained_moves_nothing(outer_momentum: float) -> None:
    one = Replica(MemoryStore(), outer_momentum=outer_momentum)
    with one.loop:
        one.step(3)
        before = one.values
        for _ in range(4):
            one.loop.sync()
        assert one.values == before
        one.step()
        assert one.values != before


def test_a_replica_that_failed_to_catch_up_does_so_later() -> None:
    store = MemoryStore()
    one, other = Replica(store, 0, 2), Replica(store, 1, 2)
    with one.loop, other.loop:
        one.step(3)
        with other.failing("get", "manifest", is_after=False), pytest.raises(Temporary):
            other.step()
        other.step()
        assert other.loop.agreed_steps >= 4
        one.loop.sync()
        other.loop.sync()
        assert one.values == other.values


def test_a_checkpoint_that_cannot_be_saved_is_no_reason_to_stop() -> None:
    one = Replica(MemoryStore(), checkpoint_every=2)

    def fault(what: str, key: str, is_after: bool) -> None:
        if "/state/" in key or "/checkpoint/" in key:
            raise Temporary("full")

    with one.loop:
        one.store.fault = fault
        one.step(6)
        one.store.fault = None
        assert one.loop.round == 6


def test_a_lost_answer_to_the_first_checkpoint_does_not_lose_the_run() -> None:
    """The create has happened, and its second try is refused."""
    store = MemoryStore()

    class Retried(FaultyStore):
        def create(self, key: str, data: Any, **how: Any) -> bool:
            is_new = super().create(key, data, **how)
            return super().create(key, data, **how) if "/checkpoint/" in key else is_new

    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"sync_every": 1, "rank": 0, "world_size": 1, "timeout": 20.0}
    with DiLoCo(model, inner, uri=Retried(store, "memory"), **settings) as loop:
        train(model, inner, 7)
        values = loop.global_parameters()
    other = net(1)
    inner = torch.optim.SGD(other.parameters(), lr=0.1)
    with DiLoCo(other, inner, uri=ObjectStore(store, "memory"), **settings) as again:
        assert again.round == 7
        for name, value in again.global_parameters().items():
            assert np.array_equal(value, values[name])


@pytest.mark.parametrize("part", ["state", "checkpoint"])
def test_a_damaged_checkpoint_is_passed_over(part: str) -> None:
    store = MemoryStore()
    one = Replica(store, checkpoint_every=2)
    with one.loop:
        one.step(9)
        values = one.values
    blobs = ObjectStore(store, "memory")
    newest = max(info.key for info in blobs.list(f"run/{part}"))
    blobs.put(newest, damage(bytes(blobs.get(newest))))
    again = Replica(store, checkpoint_every=2)
    with again.loop:
        assert again.values == values
        again.step(3)
        assert again.values == [12.0] * 8


def test_an_object_in_the_place_of_a_checkpoint_may_be_of_any_size() -> None:
    store = MemoryStore()
    one = Replica(store)
    with one.loop:
        one.step(3)
    key = f"run/checkpoint/00000099.{'a' * 32}"
    ObjectStore(store, "memory").put(key, bytes(65 << 20))
    again = Replica(store)
    with again.loop:
        assert again.values == [3.0] * 8


def damage(body: bytes) -> bytes:
    at = len(body) // 2
    return body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]


def test_a_round_below_the_minimum_goes_on_when_others_come() -> None:
    store = MemoryStore()
    one = Replica(store, 0, 2, min_replicas=2, timeout=1.0)
    with one.loop:
        with pytest.raises(BelowMinimumWorld, match=r"1 of at least 2 ranks"):
            one.step()
        other = Replica(store, 1, 2, min_replicas=2, timeout=20.0)
        with other.loop:
            run_threads(one.step, lambda: other.step(2))  # one of them to the round that waits
            run_threads(one.loop.sync, other.loop.sync)
            assert one.values == other.values
            assert one.loop.agreed_steps == 2


def start_loop() -> None:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    DiLoCo(model, inner, sync_every=5, timeout=0.5, uri="s3://bucket/p", rank=0, world_size=2)


def start_all_reduce() -> None:
    ObjectStoreAllReduce("s3://bucket/p", 0, 2, timeout_s=0.5)


@pytest.mark.parametrize("start", [start_loop, start_all_reduce])
def test_a_store_that_does_not_answer_is_waited_for_no_longer_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch, start: Callable[[], None]
) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",  # nobody listens there
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Temporary, match=r"no answer for 0\.5 s"):
        start()
