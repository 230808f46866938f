"""What cannot train in one run is refused by name, before anything was sent."""

from __future__ import annotations

import math
import os
import re
import threading
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.forked import run_forked
from tests.support.stores import run_threads

from atoll.core.errors import DistributedError, ValidationError
from atoll.diloco import DiLoCo
from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.objectstore import ObjectStore

GROUPS = Path(__file__).parent / "refused_groups.py"
# For each case, what every process is told.
TOLD = {
    "partial": r"model\.weight: 'Partial\(sum\)' .*expected Shard or Replicate",
    "drifted": r"model\.0\.weight: 'of process 1' .*expected the values of process 0",
    "frozen": r"model: .*expected a parameter with requires_grad",
    "stages": r"model\.stage1\.weight: 'process 1' .*stages of a pipeline",
    "unlike": r"model\.weight: 'float32\[4, 4\] in process 1' .*expected float32\[3, 4\]",
    "outside": r"model\.0\.weight: 'on ranks \[\d\]' .*expected a mesh within the replica",
    "codec": r"codec: 'fp32 in process 1 of the replica' .*expected 'int8', as in process 0",
    "fragments": r"fragments: '2 in process 1 of the replica' .*expected 1",
    "sync_every": r"sync_every: 'every 4 steps in process 1 of the replica' .*expected 'every 2 ",
    "run_id": r"run_id: 'b in process 1 of the replica' .*expected 'a'",
}


@pytest.mark.timeout(300)
def test_processes_that_cannot_be_one_replica_are_told_what_differs_and_why(
    tmp_path: Path,
) -> None:
    done = run_forked([str(GROUPS), str(tmp_path)], os.environ, 280)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split(" ", 2) for line in done.stdout.splitlines()]
    is_reported = {(case, process): text for case, process, text in lines}
    for case, messages in TOLD.items():
        for process in "01":
            assert re.match(f"ValidationError {messages}", is_reported[case, process]), is_reported[
                case, process
            ]
    assert (is_reported["fine", "0"], is_reported["fine", "1"]) == ("-", "-")


def pair(first: str = "a", second: str = "b") -> torch.nn.Module:
    return torch.nn.ModuleDict({first: torch.nn.Linear(3, 3), second: torch.nn.Linear(3, 3)})


def uri() -> str:
    return f"memory:///{uuid.uuid4()}"


def open_with(model: torch.nn.Module, where: Any, **more: Any) -> DiLoCo:
    options: dict[str, Any] = {"sync_every": 2, "rank": 0, "world_size": 2, "min_replicas": 1}
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    return DiLoCo(model, inner, uri=where, **{**options, **more})


@pytest.mark.parametrize(
    ("other", "messages"),
    [
        (torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4)}), r"a\.weight \[4, 3\].*a\.weight \[3, "),
        (pair("b", "a"), r"b\.weight \[3, 3\].*the run has a\.weight"),
        (torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3)}), r"2 .*the run has 4 parameters"),
    ],
)
def test_replicas_of_one_run_have_the_same_parameters_in_one_order(
    other: torch.nn.Module, messages: str
) -> None:
    where = uri()
    with open_with(pair(), where) as first:
        with pytest.raises(ValidationError, match=f"^model: .*{messages}.*run_id 'run' is in use"):
            open_with(other, where, rank=1)
        assert first.round == 0
    uploaded = ObjectStore.open(where).list("run/upload")
    assert [each.key for each in uploaded] == ["run/upload/ended/launch/00000.done"]


def test_a_run_id_that_another_all_reduce_uses_is_refused() -> None:
    where = uri()
    with ObjectStoreAllReduce(where, 0, 1) as reduce:
        reduce.allreduce([np.ones(24, np.float32)])  # as many values as the model has
    model = pair()
    before = [value.clone() for value in model.parameters()]
    with pytest.raises(ValidationError, match=r"run_id: 'run' .*all-reduce without a model"):
        open_with(model, where)
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (2, 4)])
def test_a_run_has_one_number_of_fragments(first: int, second: int) -> None:
    where = uri()
    more: dict[str, Any] = {"sync_every": 4, "run_id": "mine"}
    open_with(pair(), where, fragments=first, **more).close()
    open_with(pair(), where, fragments=second, **{**more, "run_id": "min"}).close()
    with pytest.raises(ValidationError, match=f"fragments: {second} .*run 'mine' has {first}"):
        open_with(pair(), where, fragments=second, **more)
    open_with(pair(), where, fragments=first, **more).close()


def test_replicas_that_begin_at_once_with_other_fragments_do_not_wait_for_each_other() -> None:
    where, looked, is_reported = uri(), threading.Barrier(2, timeout=60), list[str]()

    def start(rank: int, fragments: int) -> None:
        looked.wait()
        try:
            with open_with(pair(), where, rank=rank, fragments=fragments):
                pass
        except ValidationError as error:
            is_reported.append(str(error))

    run_threads(lambda: start(0, 1), lambda: start(1, 2))
    assert len(is_reported) == 1
    assert re.search(r"fragments: [12] .*the run 'run' has [12]", is_reported[0])


@pytest.mark.parametrize(
    ("model", "more", "messages"),
    [
        (pair(), {"min_replicas": 3}, r"min_replicas: 3 .*2"),
        (torch.nn.Sequential(torch.nn.LazyLinear(3)), {}, r"model\.0\.weight: 'without a shape'"),
    ],
)
def test_what_cannot_be_used_is_named(model: Any, more: dict[str, Any], messages: str) -> None:
    with pytest.raises(ValidationError, match=messages):
        open_with(model, uri(), **more)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("timeout", value) for value in (0, -1, "10", None, [], True, math.nan, math.inf)),
        *(("grace_s", value) for value in (0, -1, "10", [], True, math.nan, 1e30)),
        *(("on_round", value) for value in (1, "x", [])),
        *(("preset", value) for value in ([], {}, 1)),
        *(("outer_lr", value) for value in ([(True, 1)], [(0, 1), (0, 2)], ["ab"], {}, math.nan)),
        *(("sync_every", value) for value in ([(True, 1)], [(0, 1), (0, 2)], ["ab"], {}, 1.5)),
        *(("down_codec", value) for value in ([], 0, "nope")),
        *(("uri", value) for value in ([], 0, {})),
        *(("scheduler", value) for value in (1, "x", [])),
        ("world_size", 100_000),  # more ranks than keys have digits for
    ],
)
def test_an_argument_that_does_not_fit_is_named_and_the_store_is_not_touched(
    field: str, value: Any
) -> None:
    where = uri()
    with pytest.raises(ValidationError) as caught:
        open_with(
            pair(), value if field == "uri" else where, **{} if field == "uri" else {field: value}
        )
    assert caught.value.field == field
    assert "expected" in str(caught.value)
    assert not ObjectStore.open(where).list("")


@pytest.mark.parametrize("names", ["FOO", "KILL", "TERM STOP"])
def test_signals_that_nobody_can_catch_are_named_and_the_store_is_not_touched(
    names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_LEAVE_SIGNALS", names)
    where = uri()
    with pytest.raises(ValidationError, match="expected names of signals"):
        open_with(pair(), where)
    assert not ObjectStore.open(where).list("")


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda diloco: diloco.until(5, rounds=1), "batches"),
        *((lambda d, part=part: d.data(10, part=part), "part") for part in (1, (0,), (0, 1, 2))),
        (lambda diloco: diloco.data(10).trained(5), "positions"),
        (lambda diloco: diloco.data(10).trained(["x"]), "positions"),
        (lambda diloco: diloco.data(10).skip([1000]), "positions"),
    ],
)
def test_what_a_call_cannot_use_is_named(call: Any, field: str) -> None:
    with open_with(pair(), uri(), world_size=1) as diloco:
        with pytest.raises(ValidationError) as caught:
            call(diloco)
        assert caught.value.field == field


@pytest.mark.parametrize(
    "call",
    [
        lambda diloco: diloco.sync(),
        lambda diloco: diloco.end_period(),
        lambda diloco: diloco.until(rounds=5),
        lambda diloco: diloco.data(10),
    ],
)
def test_a_run_that_was_closed_is_not_trained_on(call: Any) -> None:
    where = uri()
    diloco = open_with(pair(), where, world_size=1)
    diloco.close()
    before = [blob.key for blob in ObjectStore.open(where).list("")]
    with pytest.raises(DistributedError, match="this DiLoCo is closed"):
        call(diloco)
    assert [blob.key for blob in ObjectStore.open(where).list("")] == before
    assert set(diloco.global_parameters()) == {"a.weight", "a.bias", "b.weight", "b.bias"}


def test_a_function_is_no_model() -> None:
    inner = torch.optim.SGD(pair().parameters(), lr=0.1)
    with pytest.raises(ValidationError, match=r"model: 'builtin_function_or_method'"):
        DiLoCo(len, inner, sync_every=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        ({"world_size": 3}, "world_size is [23] there and [23] here"),
        ({"codec": "int8"}, "codec is '(int8|fp32)' there"),
    ],
)
def test_another_cut_than_the_others_have_is_named_and_no_round_is_made(
    changes: dict[str, Any], messages: str
) -> None:
    where, is_reported = uri(), list[str]()

    def train(rank: int, **more: Any) -> None:
        model = pair()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"sync_every": 1, "world_size": 2, "min_replicas": 2, **more}
        diloco = DiLoCo(model, inner, uri=where, rank=rank, grace_s=30.0, **options)
        model["a"](torch.ones(1, 3)).sum().backward()
        with pytest.raises(ValidationError) as caught, diloco:
            inner.step()
        is_reported.append(str(caught.value))

    run_threads(lambda: train(0), lambda: train(1, **changes))
    assert len(is_reported) == 2
    assert all(re.search(messages, each) for each in is_reported), is_reported
    assert not ObjectStore.open(where).list("run/mean")
