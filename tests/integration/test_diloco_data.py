"""Data that is used once: replicas as threads, and as processes that are killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import threading
import time
import uuid
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tests.integration.test_diloco import net, world
from tests.support.forked import Forked
from torch.utils.data import DataLoader, TensorDataset

from atoll.core.errors import ValidationError
from atoll.diloco import DiLoCo
from atoll.diloco.data import ranges
from atoll.diloco.data.permutation import indexes
from atoll.objectstore import ObjectStore

torch.set_num_threads(1)
SCRIPT = Path(__file__).with_name("data_replica.py")


def store() -> ObjectStore:
    return ObjectStore.open(f"memory://{uuid.uuid4().hex}")


def outer(uri: Any, rank: int, size: int, **options: Any) -> tuple[Any, Any, DiLoCo]:
    model = net(0)
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    settings: dict[str, Any] = {"sync_every": 4, "grace_s": 5, "timeout": 60, **options}
    return model, inner, DiLoCo(model, inner, uri=uri, rank=rank, world_size=size, **settings)


def step(model: Any, inner: Any, indices: Any, rank: int) -> None:
    x = torch.as_tensor(list(indices), dtype=torch.float32)[:, None].expand(-1, 6)
    (model(x / 100 + rank) ** 2).mean().backward()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fragments": 2},
        {"codec": "int8"},
        {"fragments": 2, "overlap_steps": 1, "mix": 0.5},
        {"overlap_steps": 2},
    ],
    ids=str,
)
def test_two_replicas_use_all_data_once(options: dict[str, Any]) -> None:
    blobs = store()

    def replica(rank: int) -> Any:
        model, inner, diloco = outer(blobs, rank, 2, **options)
        with diloco:
            data = diloco.data(150, batch=4, seed=2)
            for batch in data:
                step(model, inner, batch, rank)
                inner.step()
                inner.zero_grad()
            return diloco.data_report(), data.left, data.epoch, diloco.step

    (report, left, epoch, run_step), other = world(2, replica)
    assert (report.used, left, epoch) == (150, 0, 1)
    assert report.rounds == other[0].rounds
    assert run_step == other[3]
    used = [at for use in report.rounds for at in ranges.positions(use.ranges)]
    assert sorted(used) == list(range(150))
    assert set(report.by_rank) == {0, 1}


@pytest.mark.parametrize("workers", [0, 2, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_what_a_loader_fetched_ahead_is_not_committed(workers: int, accumulation: int) -> None:
    """The loop stops in the middle, with batches under way: only what was stepped on counts."""
    model, inner, diloco = outer(None, 0, 1)
    dataset = TensorDataset(torch.arange(400))
    stepped: list[int] = []
    with diloco:
        data = diloco.data(dataset, batch=4, seed=1)
        loader = data.loader(DataLoader(dataset, batch_sampler=data.sampler, num_workers=workers))
        unfinished: list[int] = []
        for count, (batch,) in enumerate(loader, 1):
            step(model, inner, batch, 0)
            unfinished += batch.tolist()
            if count % accumulation == 0:
                stepped += unfinished
                unfinished = []
                inner.step()
                inner.zero_grad()
            if count == 40:
                break
        diloco.sync()
        report = diloco.data_report()
        used = [at for use in report.rounds for at in ranges.positions(use.ranges)]
        assert sorted(indexes(used, 400, 1, is_shuffled=True).tolist()) == sorted(stepped)
        # What was fetched, or only accumulated, is handed out again.
        again = [at for batch in data for at in _train(model, inner, batch)]
    fetched = set(range(400)) - set(stepped) - set(unfinished)
    assert set(again) == fetched
    assert not set(again) & set(stepped)


def test_loaders_whose_batches_cannot_be_counted_are_refused() -> None:
    dataset = TensorDataset(torch.arange(40))
    _, _, diloco = outer(None, 0, 1)
    with diloco:
        data = diloco.data(dataset, batch=4)
        with pytest.raises(ValidationError, match="batch_sampler=data.sampler"):
            data.loader(DataLoader(dataset, batch_size=4))
        # A slow batch would be counted as the quick one that came in its place.
        loader = DataLoader(dataset, batch_sampler=data.sampler, num_workers=2, in_order=False)
        with pytest.raises(ValidationError, match="in_order: False"):
            data.loader(loader)


def _train(model: Any, inner: Any, batch: Any) -> list[int]:
    step(model, inner, batch, 0)
    inner.step()
    inner.zero_grad()
    return list(batch)


def _steps(model: Any, inner: Any, count: int) -> None:
    for at in range(count):
        _train(model, inner, [at])


def test_every_epoch_has_its_own_order_and_all_of_it_once() -> None:
    model, inner, diloco = outer(None, 0, 1)
    with diloco:
        data = diloco.data(30, epochs=3, batch=5)
        trained = [at for batch in data for at in _train(model, inner, batch)]
    assert Counter(trained) == dict.fromkeys(range(30), 3)
    assert len({tuple(trained[at : at + 30]) for at in (0, 30, 60)}) == 3
    assert data.epoch == 3


def test_without_shuffle_the_data_comes_in_its_order() -> None:
    model, inner, diloco = outer(None, 0, 1)
    with diloco:
        data = diloco.data(20, shuffle=False, batch=5)
        assert [at for batch in data for at in _train(model, inner, batch)] == list(range(20))


def test_a_stream_is_read_once_up_to_an_end_that_nobody_knew() -> None:
    blobs = store()
    end = 137

    def replica(rank: int) -> Any:
        model, inner, diloco = outer(blobs, rank, 2, sync_every=2)
        read: list[int] = []
        with diloco:
            data = diloco.data(stream=lambda at: iter(range(at, end)), batch=3)
            for batch in data:
                read += _train(model, inner, batch)
            return read, diloco.data_report()

    (one, report), (two, _) = world(2, replica)
    assert sorted(one + two) == list(range(end))
    assert (report.used, report.end) == (end, end)


def test_the_last_items_of_a_stream_are_read_once_wherever_it_ends() -> None:
    for end in range(12):
        model, inner, diloco = outer(None, 0, 1, sync_every=3)
        with diloco:
            data = diloco.data(stream=lambda at: iter(range(at, end)), batch=4)  # noqa: B023
            read = [at for batch in data for at in _train(model, inner, batch)]
            assert (read, diloco.data_report().used) == (list(range(end)), end)


@pytest.mark.parametrize("accumulation", [1, 3, 4])
def test_the_last_batches_of_an_accumulation_are_stepped(accumulation: int) -> None:
    """The script steps after every third batch, and the data ends in between."""
    model, inner, diloco = outer(None, 0, 1)
    trained: list[int] = []
    with diloco:
        for number, batch in enumerate(diloco.data(50, batch=4), start=1):
            step(model, inner, batch, 0)
            trained += batch
            if number % accumulation == 0:
                inner.step()
                inner.zero_grad()
        assert diloco.data_report().used == 50
        assert all(value.grad is None for value in model.parameters())
    assert sorted(trained) == list(range(50))
    assert diloco.steps == -(-13 // accumulation)


@pytest.mark.parametrize(
    ("length", "accumulation", "options"),
    [
        (4, 3, {"sync_every": 1}),  # the step of the tail ends a period
        (5, 1, {"sync_every": 4, "overlap_steps": 3}),  # the last round is on its way
    ],
    ids=str,
)
def test_the_round_that_uses_up_the_data_is_the_last_one(
    length: int, accumulation: int, options: dict[str, Any]
) -> None:
    """Whoever has nothing left ends with it, so nobody may go on."""
    model, inner, diloco = outer(f"memory:///{uuid.uuid4()}", 0, 1, **options)
    with diloco:
        for number, batch in enumerate(diloco.data(length, batch=1), start=1):
            step(model, inner, batch, 0)
            if number % accumulation == 0:
                inner.step()
                inner.zero_grad()
        report = diloco.data_report()
        assert report.used == length
        assert report.rounds[-1].round == diloco.round - 1


def test_a_sampler_without_a_loader_is_told_what_was_trained_on() -> None:
    model, inner, diloco = outer(None, 0, 1)
    with diloco:
        data = diloco.data(24, batch=4)
        trained: list[int] = []
        while data.left:
            for batch in data.sampler:
                step(model, inner, batch, 0)
                data.trained(batch.positions)
                trained += batch
                inner.step()
                inner.zero_grad()
            diloco.sync()
        with pytest.raises(ValidationError, match="held"):
            data.trained([3])
    assert sorted(trained) == list(range(24))


def test_samples_that_cannot_be_read_count_and_are_told_of() -> None:
    model, inner, diloco = outer(None, 0, 1)
    with diloco:
        data = diloco.data(16, batch=4)
        for batch in data.sampler:
            data.skip(batch.positions[:1])
            data.trained(batch.positions[1:])
            step(model, inner, batch[1:], 0)
            inner.step()
            inner.zero_grad()
        diloco.sync()
        report = diloco.data_report()
    assert (report.used, report.skipped) == (report.total // 2, 2)


def test_a_joiner_finds_a_lease_and_trains_before_its_first_manifest() -> None:
    blobs = store()
    model, inner, first = outer(blobs, 0, 2, min_replicas=1, grace_s=0.2)
    with first:
        data = first.data(4000, batch=4)
        batches = iter(data)
        for _ in range(9):
            _train(model, inner, next(batches))
        late_model, late_inner, late = outer(blobs, 1, 2, min_replicas=1, grace_s=0.2)
        with late:
            before = [info.key for info in blobs.list("run/manifest")]
            late_data = late.data(4000, batch=4)
            taken = [_train(late_model, late_inner, next(iter(late_data))) for _ in range(3)]
            assert [info.key for info in blobs.list("run/manifest")] == before
            assert not {at for batch in taken for at in batch} & set(_used(first))


def _used(diloco: DiLoCo) -> list[int]:
    return [at for use in diloco.data_report().rounds for at in ranges.positions(use.ranges)]


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"dataset": 101}, "length is '10[01]' there and '10[01]' here"),
        ({"seed": 3}, "seed is '[03]' there and '[03]' here"),
        ({"shuffle": False}, "shuffle is '(True|False)' there and '(True|False)' here"),
        ({"fingerprint": "b"}, "fingerprint is .* there and .* here"),
        ({"none": True}, "data is .*shared by diloco.data[(][)]"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_other_data_is_named_before_the_first_round(change: dict[str, Any], messages: str) -> None:
    blobs = store()

    def replica(rank: int) -> Any:
        model, inner, diloco = outer(blobs, rank, 2)
        asked: dict[str, Any] = {"dataset": 100, "fingerprint": "a"} | (change if rank else {})
        try:
            with diloco:
                if asked.pop("none", False):
                    for at in range(8):
                        _train(model, inner, [at])
                else:
                    for batch in diloco.data(asked.pop("dataset"), batch=4, **asked):
                        _train(model, inner, batch)
        except ValidationError as error:
            return str(error), diloco.round
        return "no error", diloco.round

    for text, rounds in world(2, replica):
        assert re.search(messages, text), text
        assert rounds == 0


def test_a_run_with_other_data_is_refused_before_it_trains() -> None:
    blobs = store()
    model, inner, diloco = outer(blobs, 0, 1)
    with diloco:
        batches = iter(diloco.data(100, batch=4))
        for _ in range(6):
            _train(model, inner, next(batches))
    for change, messages in (
        ({"dataset": 90}, "data.length: 90 is not valid: the run's data has 100"),
        ({"seed": 7}, "data.seed: 7"),
        ({"shuffle": False}, "data.shuffle: False"),
        ({"fingerprint": "x"}, "data.fingerprint: 'x'"),
    ):
        _, _, again = outer(blobs, 0, 1)
        asked: dict[str, Any] = {"dataset": 100, **change}
        with again, pytest.raises(ValidationError) as raised:
            again.data(asked.pop("dataset"), **asked)
        assert messages in str(raised.value)
    model, inner, without = outer(blobs, 0, 1)
    with without, pytest.raises(ValidationError, match=r"call diloco\.data"):
        _steps(model, inner, 4)


@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        ({}, "expected a dataset, a length or stream="),
        ({"dataset": 0}, "dataset"),
        ({"dataset": object}, "a stream is diloco.data(stream=open_at)"),
        ({"dataset": 10, "batch": 0}, "batch"),
        ({"dataset": 10, "epochs": 0}, "epochs"),
        ({"dataset": 10, "seed": -1}, "seed"),
        ({"stream": iter, "epochs": 2}, "a stream is read once"),
        ({"stream": 3}, "expected a function of a position"),
    ],
    ids=str,
)
def test_bad_arguments_are_named(asked: dict[str, Any], messages: str) -> None:
    _, _, diloco = outer(None, 0, 1)
    with diloco, pytest.raises(ValidationError) as raised:
        diloco.data(asked.pop("dataset", None), **asked)
    assert messages in str(raised.value)


def test_a_loader_over_something_else_is_refused() -> None:
    _, _, diloco = outer(None, 0, 1)
    with diloco:
        data = diloco.data(10)
        with pytest.raises(ValidationError, match=r"batch_sampler=data\.sampler"):
            data.loader(DataLoader(range(10), batch_size=2))
        with pytest.raises(ValidationError, match="one set of data"):
            diloco.data(10)


@pytest.mark.parametrize(
    "make",
    [
        lambda data: DataLoader(range(10), batch_size=2),
        lambda data: DataLoader(range(10), batch_size=2, sampler=data),
        lambda data: DataLoader(range(10), batch_size=2, sampler=data.sampler),
        lambda data: DataLoader(range(10), batch_sampler=data.sampler),
    ],
    ids=["other data", "sampler=data", "sampler=data.sampler", "not counted"],
)
def test_until_refuses_a_loader_whose_batches_are_not_counted(make: Any) -> None:
    _, _, diloco = outer(None, 0, 1)
    with diloco:
        data = diloco.data(10, batch=2)
        with pytest.raises(ValidationError, match=r"expected data\.loader\(DataLoader"):
            diloco.until(make(data), epochs=1)


def test_a_run_goes_on_with_its_data_in_a_world_of_another_size() -> None:
    """The processes end in the middle; others, more of them, use what is left."""
    blobs = store()
    model, inner, diloco = outer(blobs, 0, 1)
    first: list[int] = []
    with diloco:
        batches = iter(diloco.data(120, batch=4))
        for _ in range(12):
            first += _train(model, inner, next(batches))
    # The run knows of one replica only. It would go on alone if it came first, and what the other
    # has trained until then would be in vain: both are there before the first of them trains.
    are_here = threading.Barrier(2, timeout=100)

    def replica(rank: int) -> list[int]:
        model, inner, diloco = outer(blobs, rank, 2, min_replicas=2)
        with diloco:
            assert diloco.round == 3
            are_here.wait()
            return [at for batch in diloco.data(120, batch=4) for at in _train(model, inner, batch)]

    one, two = world(2, replica)
    assert one
    assert two
    assert sorted(first + one + two) == list(range(120))


def test_a_replica_that_comes_when_others_go_on_without_it_uses_nothing_twice() -> None:
    """The run knows of one replica only, which waits for nobody; another one has begun to train."""
    blobs = store()
    is_training, has_gone_on = threading.Event(), threading.Event()

    def replica(rank: int) -> Any:
        model, inner, diloco = outer(blobs, rank, 2, min_replicas=1, grace_s=0.2)
        trained: list[int] = []
        with diloco:
            for batch in diloco.data(200, batch=4):
                trained += _train(model, inner, batch)
                if rank:
                    is_training.set()
                    assert has_gone_on.wait(100)
                else:
                    assert is_training.wait(100)
                    if diloco.round > 1:
                        has_gone_on.set()
            return trained, diloco.data_report()

    model, inner, alone = outer(blobs, 0, 2, min_replicas=1, grace_s=0.2)
    with alone:
        batches = iter(alone.data(200, batch=4))
        first = [at for _ in range(4) for at in _train(model, inner, next(batches))]
    (one, report), (two, other) = world(2, replica)
    for each in (report, other):
        used = [at for use in each.rounds for at in ranges.positions(use.ranges)]
        assert sorted(used) == list(range(200))
        assert each.used == 200
    in_vain = report.in_vain + other.in_vain
    assert len(first) + len(one) + len(two) == 200 + in_vain


def test_a_run_that_began_without_a_ledger_goes_on_with_one() -> None:
    blobs = store()
    model, inner, diloco = outer(blobs, 0, 1)
    with diloco:
        for at in range(8):
            _train(model, inner, [at])
    model, inner, again = outer(blobs, 0, 1)
    with again:
        assert again.round == 2
        trained = [at for b in again.data(40, batch=4) for at in _train(model, inner, b)]
    assert sorted(trained) == list(range(40))


def test_two_processes_of_a_rank_do_not_use_data_twice() -> None:
    """Both have the lease of the rank. A round takes one; the other throws its work away."""
    blobs = store()

    def replica(at: int) -> Any:
        model, inner, diloco = outer(blobs, min(at, 1), 2, min_replicas=1, grace_s=0.3)
        with diloco:
            for batch in diloco.data(160, batch=4):
                _train(model, inner, batch)
            return diloco.data_report()

    reports = world(3, replica)
    used = [at for use in reports[0].rounds for at in ranges.positions(use.ranges)]
    assert sorted(used) == list(range(160))
    assert all(report.used == 160 for report in reports)
    assert sum(report.in_vain for report in reports) > 0


def test_sharing_data_costs_no_request() -> None:
    """What is deleted in the background falls into one round or another: most have none of it."""
    counts = []
    for is_shared in (False, True):
        model, inner, diloco = outer(store(), 0, 1)
        with diloco:
            batches = iter(diloco.data(4000, batch=4)) if is_shared else None
            for at in range(60):
                _train(model, inner, [at] if batches is None else next(batches))
        counts.append(median(report.requests for report in diloco.reports))
    assert counts[0] == counts[1]


@pytest.mark.timeout(240)
def test_killed_and_restarted_processes_use_all_data_once(tmp_path: Path) -> None:
    length, size = 480, 3
    uri = f"file://{tmp_path}/store"
    folder = tmp_path / "notes"
    folder.mkdir()
    rng = random.Random(7)
    env = {k: v for k, v in os.environ.items() if not k.startswith("ATOLL_")}

    def start(rank: int) -> Forked:
        return Forked([str(SCRIPT), uri, str(rank), str(size), str(folder), str(length)], env)

    alive = {rank: start(rank) for rank in range(size)}
    kills = 0
    deadline = time.monotonic() + 200
    try:
        while alive and time.monotonic() < deadline:
            trained = sum(path.read_text().count("\n") for path in folder.glob("trained.*"))
            for rank, process in list(alive.items()):
                code = process.poll()
                if code is not None:
                    alive.pop(rank).close()
                if code not in (0, None):
                    assert code == -signal.SIGKILL
                    alive[rank] = start(rank)
            if kills < 4 and trained > 20 * (kills + 1) and alive:
                rank = rng.choice(list(alive))
                alive[rank].send_signal(signal.SIGKILL)
                alive[rank].wait()
                kills += 1
            time.sleep(0.05)
        assert not alive
    finally:
        for process in alive.values():
            process.close()
    assert kills == 4
    report = json.loads((folder / "report").read_text())
    assert (report["used"], report["total"]) == (length, length)
    positions = [at for _, _, part in report["rounds"] for at in ranges.positions(part)]
    assert sorted(positions) == list(range(length))
    # Each process wrote down what it trained on: every index that was committed is among it.
    recorded = [
        index
        for path in folder.glob("trained.*")
        for line in path.read_text().splitlines()
        for index in json.loads(line)[1]
    ]
    assert set(recorded) == set(range(length))
