"""DiLoCo through a store: replicas as threads, and as processes that are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.forked import Forked

from atoll.core.errors import ValidationError
from atoll.diloco import DiLoCo, RoundReport
from atoll.objectstore import ObjectStore

torch.set_num_threads(1)
SCRIPT = Path(__file__).with_name("diloco_replica.py")


def net(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def train(model: torch.nn.Module, inner: torch.optim.Optimizer, seed: int, steps: int) -> None:
    dice = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(8, 6, generator=dice)
        torch.nn.functional.mse_loss(model(x), x[:, :2]).backward()
        inner.step()
        inner.zero_grad()


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


def same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(
        np.array_equal(one[name].view(np.uint32), other[name].view(np.uint32)) for name in one
    )


@pytest.mark.parametrize(
    "how",
    [
        {"codec": "fp32"},
        {"codec": "e3m0"},
        {"codec": "int4", "fragments": 2, "overlap_steps": 1, "mix": 0.5},
    ],
    ids=lambda how: how["codec"],
)
def test_replicas_that_begin_unlike_hold_the_same_bits_after_every_round(how: dict) -> None:
    uri, rounds = f"memory:///{uuid.uuid4()}", 6
    known: dict[tuple[int, int], list[bytes]] = {}

    def replica(rank: int) -> dict[str, np.ndarray]:
        model = net(seed=rank)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def note(report: RoundReport) -> None:
            values = loop.fragments[report.fragment].values
            known.setdefault((report.round, report.fragment), []).append(values.tobytes())

        with DiLoCo(
            model,
            inner,
            sync_every=4,
            uri=uri,
            rank=rank,
            world_size=3,
            min_replicas=3,
            on_round=note,
            **how,
        ) as loop:
            train(model, inner, rank, 4 * rounds)
        assert loop.round == rounds
        return loop.global_parameters()

    first, *others = world(3, replica)
    assert all(same_bits(first, other) for other in others)
    assert len(known) == rounds * how.get("fragments", 1)
    assert all(len(values) == 3 and len(set(values)) == 1 for values in known.values())


def test_replicas_weigh_by_what_they_counted() -> None:
    uri = f"memory:///{uuid.uuid4()}"

    def replica(rank: int) -> float:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        with DiLoCo(
            model,
            inner,
            sync_every=1,
            outer_lr=1.0,
            outer_momentum=0.0,
            uri=uri,
            rank=rank,
            world_size=2,
            min_replicas=2,
        ) as loop:
            loop.count([300, 100][rank])
            model.weight.grad = torch.tensor([[-4.0 * (rank + 1)]])
            inner.step()
        return model.weight.item()

    # Rank 0 moved to 4 with 300 tokens, rank 1 to 8 with 100.
    assert world(2, replica) == [5.0, 5.0]


def test_rounding_of_bf16_parameters_is_not_a_movement() -> None:
    model = net(0).bfloat16()
    for value in model.parameters():
        value.requires_grad_(True)
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    loop = DiLoCo(model, inner, sync_every=1)
    values = loop.fragments[0].values
    values += 1e-4  # between two values of bf16
    loop._model.apply(loop.fragments[0])
    before = loop.global_parameters()
    train_bf16 = torch.randn(4, 6).bfloat16()
    for _ in range(3):
        model(train_bf16).sum().backward()
        inner.step()
    assert same_bits(before, loop.global_parameters())


class Gate(ObjectStore):
    """A store that lets no upload through before the gate is open."""

    reached: threading.Event
    opened: threading.Event

    def put(self, key: str, data: Any, **how: Any) -> None:
        if "/upload/" in key:
            self.reached.set()
            assert self.opened.wait(60), "the model waited for the store"
        super().put(key, data, **how)


def test_the_model_trains_on_while_a_round_is_on_its_way() -> None:
    store = Gate.open(f"memory:///{uuid.uuid4()}")
    store.reached, store.opened = threading.Event(), threading.Event()
    model = net(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(
        model, inner, sync_every=5, overlap_steps=3, uri=store, rank=0, world_size=1
    ) as loop:
        train(model, inner, 0, 4)  # sent after the second step
        assert loop.round == 0
        assert store.reached.wait(60), "nothing was sent while the model trained"
        store.opened.set()
        train(model, inner, 1, 1)
        assert loop.round == 1
    (report,) = loop.reports
    assert report.hidden_s > 0
    assert report.members == (0,)
    assert report.bytes_up > 0
    assert loop.metrics()["rounds"] == 1


class LateJob:
    """Gives the result of a job when as much time has passed since its end as it took."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def done(self) -> bool:
        return True

    def result(self) -> Any:
        commit, started, ended = self._job.result()
        while time.monotonic() - ended <= ended - started:
            time.sleep(0.001)
        return commit, started, ended


def test_what_was_hidden_counts_though_the_model_wakes_up_late() -> None:
    """On a busy machine the thread that waits for a round goes on long after the round ended."""
    store = Gate.open(f"memory:///{uuid.uuid4()}")
    store.reached, store.opened = threading.Event(), threading.Event()
    model = net(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with DiLoCo(
        model, inner, sync_every=5, overlap_steps=3, uri=store, rank=0, world_size=1
    ) as loop:
        train(model, inner, 0, 4)
        assert store.reached.wait(60)
        assert loop._flight is not None
        loop._flight.job = LateJob(loop._flight.job)  # type: ignore[assignment]
        store.opened.set()
        train(model, inner, 1, 1)
    (report,) = loop.reports
    assert 0 < report.hidden_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sync_every": 0}, "sync_every: 0"),
        ({"fragments": 3}, "sync_every: 4 .* multiple of 3"),
        ({"overlap_steps": 4}, "overlap_steps: 4 .* 0 to 3"),
        ({"mix": 1.5}, "mix: 1.5"),
        ({"codec": "int6", "uri": "memory:///x"}, "codec: 'int6'"),
        ({"world_size": 2}, "ATOLL_RENDEZVOUS_URI"),
    ],
)
def test_a_setting_that_does_not_fit_is_named(changes: dict, message: str) -> None:
    model = net(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValidationError, match=message):
        DiLoCo(model, inner, **({"sync_every": 4} | changes))


def test_a_replica_with_another_model_or_outer_step_is_refused() -> None:
    uri = f"memory:///{uuid.uuid4()}"

    def open_with(model: torch.nn.Module, **more: Any) -> DiLoCo:
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return DiLoCo(model, inner, sync_every=4, uri=uri, rank=0, world_size=1, **more)

    open_with(net(0)).close()
    with pytest.raises(ValidationError, match=r"the run has 0.weight \[16, 6\]"):
        open_with(torch.nn.Sequential(torch.nn.Linear(6, 15)))
    with pytest.raises(ValidationError, match="outer_lr"):
        open_with(net(0), outer_lr=0.5)


def test_a_replica_that_fails_is_not_waited_for_in_any_fragment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ATOLL_STARTED_TOGETHER", "3")
    uri, model = f"memory:///{uuid.uuid4()}", net(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"sync_every": 4, "fragments": 2, "uri": uri, "world_size": 3}
    with (
        pytest.raises(ZeroDivisionError),
        DiLoCo(model, inner, rank=0, run_id="r", **options),
    ):
        _ = 1 / 0
    marks = [info.key for info in ObjectStore.open(uri).list("r/upload/ended")]
    assert marks == ["r/upload/ended/launch/00000.failed"]
    DiLoCo(model, inner, rank=0, run_id="r", **options)
    assert not ObjectStore.open(uri).list("r/upload/ended")


def start(store: Path, rank: int, *messages: object) -> Forked:
    env = os.environ | {
        "ATOLL_RENDEZVOUS_URI": f"file://{store}",
        "ATOLL_RANK": str(rank),
        "ATOLL_WORLD_MAX": "3",
        "ATOLL_WORLD_MIN": "2",
    }
    return Forked([str(SCRIPT), *map(str, messages)], env)


def begin(processes: list[Forked]) -> None:
    """Together, once all have loaded torch, which takes them anything from one second to twenty."""
    for process in processes:
        read_until(process, "loaded")
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()


def read_until(process: Forked, message: str) -> str:
    assert process.stdout is not None
    return next(line for line in process.stdout if line.startswith(message))


def test_a_replica_killed_in_the_run_comes_back_from_the_store_alone(tmp_path: Path) -> None:
    rounds, file, store = 12, tmp_path / "go-on", tmp_path / "store"
    staying = [start(store, rank, rounds, 6, file) for rank in (0, 1)]
    victim = start(store, 2, rounds, 3, file)
    processes = [*staying, victim]
    try:
        begin(processes)
        read_until(victim, "waiting")
        victim.send_signal(signal.SIGKILL)
        returned = start(store, 2, rounds, -1, file)
        processes.append(returned)
        begin([returned])
        begins = int(read_until(returned, "start").split()[1])
        file.touch()
        header = [
            process.communicate(timeout=110)[0].split("\n") for process in (*staying, returned)
        ]
    finally:
        for process in processes:
            process.close()
    assert [process.returncode for process in (*staying, returned)] == [0, 0, 0]
    assert 3 <= begins <= 6
    digests: dict[str, set[str]] = {}
    for lines in header:
        for line in lines:
            if line.startswith("round "):
                _, number, digest = line.split()
                digests.setdefault(number, set()).add(digest)
    assert all(len(matches) == 1 for matches in digests.values()), digests
    assert {lines[-2] for lines in header} == {header[0][-2]}
    assert header[0][-2].startswith(f"round {rounds} ")
