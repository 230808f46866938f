"""The clock of the run: the same in all replicas, whoever was killed and came again."""

from __future__ import annotations

import threading
import uuid
from typing import Any

import pytest
import torch
from tests.integration.test_diloco import net, world
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from atoll.core.errors import BelowMinimumWorld, DistributedError, ValidationError
from atoll.diloco import DiLoCo
from atoll.objectstore import ObjectStore

torch.set_num_threads(1)


def store() -> ObjectStore:
    return ObjectStore.open(f"memory://{uuid.uuid4().hex}")


class Replica:
    def __init__(self, blobs: Any, rank: int, size: int, **options: Any) -> None:
        self.model = net(0)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        make = options.pop("schedule", None)
        self.scheduler = make(self.inner) if make else None
        settings: dict[str, Any] = {"sync_every": 5, "grace_s": 5, "timeout": 60, **options}
        self.diloco = DiLoCo(
            self.model,
            self.inner,
            uri=blobs,
            rank=rank,
            world_size=size,
            scheduler=self.scheduler,
            **settings,
        )
        self.rank = rank

    def step(self, tokens: int = 0) -> float:
        """The learning rate with which a step was made."""
        rate: float = self.inner.param_groups[0]["lr"]
        x = torch.randn(4, 6) + self.rank
        (self.model(x) ** 2).mean().backward()
        if tokens:
            self.diloco.count(tokens)
        self.inner.step()
        self.inner.zero_grad()
        return rate


def test_step_tokens_and_round_are_those_of_the_run_after_a_restart() -> None:
    blobs = store()

    def first(rank: int) -> Any:
        each = Replica(blobs, rank, 2)
        with each.diloco:
            for _ in range(15):
                each.step(tokens=10 + rank)
            return each.diloco.step, each.diloco.tokens, each.diloco.round

    assert world(2, first) == [(15, 15 * 21, 3)] * 2

    def second(rank: int) -> Any:
        each = Replica(blobs, rank, 2)
        with each.diloco:
            before = each.diloco.step, each.diloco.tokens, each.diloco.round
            each.step(tokens=10)
            after = each.diloco.step, each.diloco.tokens
            for _ in range(4):
                each.step(tokens=10)
            return before, after, (each.diloco.step, each.diloco.tokens)

    assert world(2, second) == [((15, 315, 3), (16, 315), (20, 415))] * 2


@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("overlap", [0, 1])
def test_fragments_and_overlap_change_nothing_about_the_step(fragments: int, overlap: int) -> None:
    blobs = store()
    options = {"sync_every": 6, "fragments": fragments, "overlap_steps": overlap}
    each = Replica(blobs, 0, 1, **options)
    with each.diloco:
        for count in range(1, 25):
            each.step()
            assert each.diloco.step == count
    again = Replica(blobs, 0, 1, **options)
    with again.diloco:
        assert again.diloco.step == 24 - overlap  # what was trained after the last send is lost


SCHEDULES = {
    "lambda": lambda inner: LambdaLR(inner, lambda at: 1 / (1 + at)),
    "cosine": lambda inner: CosineAnnealingLR(inner, 50),
    "exponential": lambda inner: ExponentialLR(inner, 0.9),
    "sequential": lambda inner: SequentialLR(
        inner, [LinearLR(inner, 0.1, total_iters=8), CosineAnnealingLR(inner, 40)], [8]
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rates_after_a_kill_are_those_of_a_run_without_one(schedule: str) -> None:
    make = SCHEDULES[schedule]
    inner = torch.optim.SGD(net(0).parameters(), lr=0.1)
    plain, expected = make(inner), []
    for _ in range(20):
        expected.append(inner.param_groups[0]["lr"])
        inner.step()
        plain.step()
    blobs = store()

    def life(rank: int, steps: int) -> list[float]:
        each = Replica(blobs, rank, 2, schedule=make)
        with each.diloco:
            rates = []
            for _ in range(steps):
                rates.append(each.step())
                each.scheduler.step()  # as the script did before: it does nothing
            return rates

    first = world(2, lambda rank: life(rank, 10))
    second = world(2, lambda rank: life(rank, 10))
    for rank in range(2):
        assert first[rank] + second[rank] == pytest.approx(expected, rel=1e-9)


def test_a_late_joiner_has_the_learning_rate_of_its_peers() -> None:
    blobs = store()
    make = SCHEDULES["cosine"]
    one = Replica(blobs, 0, 2, schedule=make, min_replicas=1, grace_s=0.1)
    with one.diloco:
        for _ in range(10):
            one.step()
        two = Replica(blobs, 1, 2, schedule=make, min_replicas=1, grace_s=0.1)
        with two.diloco:
            assert two.diloco.step == one.diloco.step == 10
            assert two.step() == one.step()


def test_a_scheduler_of_another_optimiser_is_refused() -> None:
    other = torch.optim.SGD(net(1).parameters(), lr=0.1)
    with pytest.raises(ValidationError, match="another optimiser"):
        Replica(None, 0, 1, schedule=lambda _: CosineAnnealingLR(other, 10))
    with pytest.raises(ValidationError, match="follows steps"):
        Replica(None, 0, 1, schedule=ReduceLROnPlateau)
    with pytest.raises(ValidationError, match="lr_scheduler"):
        Replica(None, 0, 1, schedule=lambda _: 3)


@pytest.mark.parametrize(
    ("goal", "steps", "rounds"),
    [({"rounds": 3}, 15, 3), ({"steps": 12}, 12, 3), ({"tokens": 101}, 30, 6)],
    ids=str,
)
def test_replicas_end_together(goal: dict[str, int], steps: int, rounds: int) -> None:
    blobs = store()

    def replica(rank: int) -> Any:
        each = Replica(blobs, rank, 2)
        with each.diloco:
            known = []
            for at in each.diloco.until(**goal):
                known.append(at)
                each.step(tokens=2)
            return known, each.diloco.step, each.diloco.round, each.diloco.warnings

    for known, step, done, warnings in world(2, replica):
        assert known == list(range(steps))
        assert (step, done) == (steps, rounds)
        assert not any("not synchronised" in messages for messages in warnings)
    late = Replica(blobs, 1, 2)
    with late.diloco:  # nothing is left to do, and nobody is waited for
        assert list(late.diloco.until(**goal)) == []


def test_a_sync_behind_the_loop_brings_the_last_steps_of_all_fragments() -> None:
    blobs = store()

    def replica(rank: int) -> Any:
        model = torch.nn.ParameterList([torch.zeros(20) for _ in range(3)])
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        outer: dict[str, Any] = {"outer": "sgd", "outer_lr": 1.0, "outer_momentum": 0.0}
        rounds = {"sync_every": 6, "fragments": 3, "warmup": "none", **outer}
        with DiLoCo(model, inner, uri=blobs, rank=rank, world_size=2, timeout=60, **rounds) as run:
            for step in run.until(steps=20):
                for values in model:  # each step moves one value of every fragment
                    values.grad = torch.zeros(20)
                    values.grad[step] = -1.0
                inner.step()
            run.sync()
            return run.global_parameters().values()

    for fragments in world(2, replica):
        for values in fragments:
            assert values.tolist() == [1.0] * 20


def test_until_goes_on_where_a_killed_replica_was() -> None:
    """A replica is gone after 7 steps, without a word. Its next life makes the run whole."""
    blobs = store()
    each = Replica(blobs, 0, 1)
    for count, _ in enumerate(each.diloco.until(steps=20), 1):
        each.step()
        if count == 7:
            break
    again = Replica(blobs, 0, 1)
    with again.diloco:
        known = []
        for at in again.diloco.until(steps=20):
            known.append(at)
            again.step()
    assert known == list(range(5, 20))
    assert again.diloco.round == 4


def test_until_gives_batches_and_begins_them_again() -> None:
    each = Replica(None, 0, 1)
    with each.diloco:
        known = []
        for batch in each.diloco.until(["a", "b", "c"], rounds=1):
            known.append(batch)
            each.step()
    assert known == ["a", "b", "c", "a", "b"]


def test_until_epochs_ends_with_the_data() -> None:
    each = Replica(None, 0, 1)
    with each.diloco:
        data = each.diloco.data(30, epochs=2, batch=4)
        count = 0
        for batch in each.diloco.until(data, epochs=2):
            count += len(batch)
            each.step()
        assert (count, data.epoch, data.left) == (60, 2, 0)
        with pytest.raises(ValidationError, match="the data has 2"):
            each.diloco.until(epochs=3)


@pytest.mark.parametrize(
    ("goal", "messages"),
    [
        ({}, "expected rounds=, steps=, tokens= or epochs="),
        ({"rounds": -1}, "rounds"),
        ({"steps": 1.5}, "steps"),
        ({"epochs": 1}, "diloco.data(n)"),
        ({"tokens": float("nan")}, "tokens"),
    ],
    ids=str,
)
def test_a_goal_that_cannot_be_reached_is_named(goal: dict[str, Any], messages: str) -> None:
    each = Replica(None, 0, 1)
    with each.diloco, pytest.raises(ValidationError) as raised:
        each.diloco.until(**goal)
    assert messages in str(raised.value)


def test_tokens_that_nobody_counts_are_named_after_the_first_round() -> None:
    each = Replica(None, 0, 1)
    with each.diloco, pytest.raises(ValidationError, match=r"diloco\.count"):
        [each.step() for _ in each.diloco.until(tokens=100)]


def test_an_error_says_that_a_rank_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures do not lower what a round needs, and neither of them is missing."""
    monkeypatch.setenv("ATOLL_STARTED_TOGETHER", "3")
    monkeypatch.setenv("ATOLL_UID", "launch-of-three")
    blobs = store()

    def replica(rank: int) -> str:
        each = Replica(blobs, rank, 3, timeout=20, grace_s=20, min_replicas=2)
        try:
            with each.diloco:
                for _ in each.diloco.until(rounds=1 if rank == 0 else 9):
                    if rank == 2 and each.diloco.round == 1:
                        raise RuntimeError("broken")
                    each.step()
        except (BelowMinimumWorld, RuntimeError) as error:
            return str(error)
        return "fine"

    messages = world(3, replica)
    assert messages[0] == "fine"
    assert "finished: ranks [0]; failed: ranks [2]" in messages[1]
    assert "missing" not in messages[1]


@pytest.mark.parametrize("is_launched", [True, False], ids=["atoll", "srun"])
def test_the_last_replicas_end_without_those_that_are_done(
    monkeypatch: pytest.MonkeyPatch, is_launched: bool
) -> None:
    """They can do their rounds alone; that their model is another one at the end is an error."""
    if is_launched:
        monkeypatch.setenv("ATOLL_STARTED_TOGETHER", "2")
        monkeypatch.setenv("ATOLL_UID", "launch-of-two")
    blobs = store()

    def replica(rank: int) -> tuple[int, str]:
        each = Replica(blobs, rank, 2, timeout=20, grace_s=0.2, min_replicas=2)
        try:
            with each.diloco:
                for _ in each.diloco.until(rounds=1 + rank):
                    each.step()
        except DistributedError as error:
            return each.diloco.round, str(error)
        return each.diloco.round, ""

    (first, nothing), (second, messages) = world(2, replica)
    assert (first, nothing, second) == (1, "", 2)
    assert "replicas end apart: this one ends with round 2, rank 0 with round 1" in messages


@pytest.mark.parametrize(
    ("goal", "options"),
    [
        ({"rounds": 5}, {}),
        ({"steps": 10}, {"codec": "int4"}),
        ({"rounds": 5}, {"overlap_steps": 1, "mix": "keep"}),
        ({"tokens": 80}, {"sync_every": 1}),  # so many rounds that it joins again
        ({"rounds": 4}, {"fragments": 2}),
        (None, {}),
    ],
    ids=["rounds", "steps", "overlap", "joins again", "fragments", "data"],
)
def test_a_slow_replica_ends_where_the_others_have_ended(
    goal: dict[str, Any] | None, options: dict[str, Any]
) -> None:
    """It was still training when the last round was decided, and makes no other one alone."""
    blobs = store()
    is_over = threading.Event()

    def replica(rank: int) -> tuple[int, int, bytes]:
        settings = {"sync_every": 2, "warmup": "none", "grace_s": 0.1, "min_replicas": 1, **options}
        each = Replica(blobs, rank, 2, **settings)
        diloco = each.diloco
        try:
            with diloco:
                steps = iter(diloco.data(80, batch=4)) if goal is None else diloco.until(**goal)
                for _ in steps:
                    if rank and diloco.round:
                        assert is_over.wait(50)
                    each.step(tokens=4)
                if "fragments" in options:
                    diloco.sync()
                left = diloco.step
        finally:
            if not rank:
                is_over.set()
        values = torch.cat([value.detach().flatten() for value in each.model.parameters()])
        return diloco.round, left - diloco.agreed_steps, values.numpy().tobytes()

    first, second = world(2, replica)
    assert first[0] == second[0]
    assert second[1] == 0
    if "overlap_steps" not in options:  # the first one has made a step since its last upload
        assert first == second


def test_one_that_starts_again_when_the_others_are_done_makes_no_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where all call sync() behind the loop, as with fragments."""
    monkeypatch.setenv("ATOLL_UID", "launch-of-two")
    blobs = store()
    how: dict[str, Any] = {"sync_every": 2, "fragments": 2, "grace_s": 0.1, "min_replicas": 1}

    def run(rank: int) -> int:
        each = Replica(blobs, rank, 2, **how)
        with each.diloco:
            for _ in each.diloco.until(rounds=3):
                each.step()
            each.diloco.sync()
        return each.diloco.round

    first = world(2, run)
    assert first[0] == first[1]
    assert run(1) == first[0]


def test_replicas_that_end_with_the_same_round_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was late for the last round: it takes that round when it ends."""
    monkeypatch.setenv("ATOLL_STARTED_TOGETHER", "2")
    monkeypatch.setenv("ATOLL_UID", "launch-of-two")
    blobs = store()
    one, two = (Replica(blobs, rank, 2, grace_s=0.1, min_replicas=1) for rank in range(2))
    for _ in one.diloco.until(rounds=3):
        one.step()
    one.diloco.close()
    two.diloco.close()
    ours, theirs = one.diloco.global_parameters(), two.diloco.global_parameters()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    assert torch.equal(one.model[0].weight, two.model[0].weight)
