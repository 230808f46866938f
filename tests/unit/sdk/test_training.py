"""The handle: its properties come from one snapshot, and its options are in its signature."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.core.errors import ValidationError
from atoll.core.phase import Phase
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Status, Training
from atoll.sdk import training as module
from atoll.sdk.client import Client
from atoll.sdk.options import DeployOptions
from atoll.sdk.training import DistributedTraining

SPEC = TrainingSpec(name="t", world_size=WorldSize(min=1, target=1, max=1), command=["true"])
PENDING = Training(namespace="n", uid="u", spec=SPEC, status=Status(phase=Phase.PENDING))


class CountingClient:
    """Answers every read with the newest state, and counts the reads."""

    def __init__(self) -> None:
        self.newest = PENDING
        self.reads = 0

    def run(self, flow: Any) -> Training:
        flow.close()
        self.reads += 1
        return self.newest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.logs(rank=1),
        lambda t: t.stream_logs([0, 1]),
        lambda t: t.attempts(1),
    ],
    ids=["logs", "stream_logs", "attempts"],
)
def test_a_rank_that_the_training_cannot_have_is_refused(read: Any) -> None:
    client: Any = CountingClient()
    with pytest.raises(ValidationError, match="rank: 1 is not valid: t has rank 0 only"):
        read(DistributedTraining(client, PENDING))
    assert client.reads == 0


def test_properties_in_a_row_cost_one_request_and_agree(clock: list[float]) -> None:
    client: Any = CountingClient()
    t = DistributedTraining(client, PENDING)
    clock[0] += 1
    client.newest = replace(PENDING, status=Status(phase=Phase.READY))
    assert (t.phase, t.is_terminal, t.ranks, t.rank_exits, t.root_cause) == (
        "ready", False, [], [], None
    )  # fmt: skip
    assert (t.world.target, t.conditions, t.bench, t.spec) == (1, [], None, SPEC)
    assert client.reads == 1
    clock[0] += 1
    client.newest = replace(PENDING, status=Status(phase=Phase.FAILED))
    assert t.phase == "failed", "an old snapshot is read again"
    clock[0] += 1
    assert t.is_terminal
    assert client.reads == 2, "what is over is not read again"


def test_refresh_always_reads(clock: list[float]) -> None:
    client: Any = CountingClient()
    t = DistributedTraining(client, PENDING)
    client.newest = replace(PENDING, status=Status(phase=Phase.READY))
    assert t.phase == "pending"
    assert t.refresh().status.phase is Phase.READY
    assert (t.phase, client.reads) == ("ready", 1)


def test_the_signature_of_deploy_distributed_has_and_describes_every_option() -> None:
    parameters = dict(inspect.signature(Client.deploy_distributed).parameters)
    assert list(parameters)[:2] == ["self", "name"]
    assert list(parameters)[2:-1] == list(DeployOptions.__annotations__)
    described = re.findall(r"^ {12}(\w+): ", Client.deploy_distributed.__doc__ or "", re.MULTILINE)
    assert described == list(parameters)[1:-1]
    twin = inspect.signature(Client.deploy_distributed_async)
    assert list(twin.parameters) == list(parameters)


def test_an_unknown_option_of_deploy_distributed_is_refused_with_the_one_that_was_meant() -> None:
    with Client.local() as client, pytest.raises(ValidationError, match="'max_restarts'"):
        client.deploy_distributed("t", command=["true"], max_restart=1)  # type: ignore[arg-type]
