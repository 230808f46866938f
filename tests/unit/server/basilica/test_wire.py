"""A training as the basilica client reads it, and what it sends as a spec."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from atoll.core.errors import ValidationError
from atoll.core.model import decode
from atoll.core.phase import Phase
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import (
    BenchResult,
    BenchStatus,
    Condition,
    Exit,
    RankExit,
    RankStatus,
    Status,
    Training,
    WorldStatus,
)
from atoll.server.basilica.deployments import rendezvous_of
from atoll.server.basilica.wire import Create, deployment, spec_of, world_of

# As version 0.29.0 sends it.
SENT: dict[str, Any] = {
    "instanceName": "ex-cmd",
    "image": "pytorch/pytorch:2.4.0-cuda12.4-cudnn9-runtime",
    "replicas": 2,
    "port": 18789,
    "resources": {"cpu": "8", "memory": "32Gi", "gpus": {"count": 1, "model": []}},
    "ttlSeconds": 86400,
    "enableBilling": True,
    "distributed": {
        "enabled": True,
        "worldSize": {"min": 2, "target": 2, "max": 4},
        "rendezvous": {"backend": "etcd-v2"},
        "providerFilter": {"include": [], "exclude": []},
        "topologySpread": {"strategy": "provider-aware"},
        "nccl": {"env": {}},
        "bench": {"mode": "off"},
        "command": "python train.py",
    },
}


def asked(**changes: Any) -> TrainingSpec:
    inner = {key: changes.pop(key) for key in list(changes) if key in SENT["distributed"]}
    body = {**SENT, **changes, "distributed": {**SENT["distributed"], **inner}}
    return spec_of(decode(json.dumps(body), Create), backend="etcd-v2")


def training(status: Status, **world: int) -> Training:
    size = WorldSize(**{"min": 2, "target": 2, "max": 4, **world})
    spec = replace(asked(), world_size=size)
    return Training(
        namespace="default", uid="u", spec=spec, status=status, generation=2, created_at=1.5
    )


def running(count: int, **more: Any) -> Status:
    ranks = [RankStatus(rank=r, phase="Running", started_at=1.0) for r in range(count)]
    world = WorldStatus(ready=count, target=count, min=2, max=4, below_minimum=False)
    return replace(
        Status(phase=Phase.READY, world=world, ranks=ranks, observed_generation=2), **more
    )


def test_the_request_becomes_a_spec() -> None:
    spec = asked(
        env={"A": "b"},
        args=["--a"],
        providerFilter={"include": ["cyan"], "exclude": []},
        nccl={"env": {"NCCL_DEBUG": "WARN"}},
        bench={"mode": "on-start", "placement": "strict"},
        resources={"cpu": "8", "gpus": {"count": 2, "model": ["H100"], "minGpuMemoryGb": 40}},
    )
    assert spec.name == "ex-cmd"
    assert spec.world_size == WorldSize(min=2, target=2, max=4)
    assert spec.source is not None
    assert spec.source.content == b'exec python train.py "$@"\n'
    assert (spec.env, spec.args, spec.nccl_env) == ({"A": "b"}, ["--a"], {"NCCL_DEBUG": "WARN"})
    assert spec.provider_filter.include == ["cyan"]
    assert (spec.bench.mode, spec.bench.placement) == ("on-start", "strict")
    assert (spec.resources.gpu_count, spec.resources.gpu_models) == (2, ["H100"])
    assert spec.resources.min_gpu_memory_gb == 40


def test_the_time_to_live_ends_the_run_and_keeps_the_result() -> None:
    spec = asked(ttlSeconds=600)
    assert (spec.deadline_s, spec.ttl_seconds) == (600.0, 600)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"instanceName": "../x"}, "name"),
        ({"worldSize": {"min": 3, "target": 2, "max": 4}}, "world_size.min"),
        ({"topologySpread": {"strategy": "moon"}}, "topology_spread"),
        ({"env": {"BASILICA_RANK": "1"}}, "env.BASILICA_RANK"),
        ({"storage": {}}, "storage"),
        ({"bench": {"mode": "on-start", "placement": "moon"}}, "bench_placement"),
    ],
)
def test_what_is_wrong_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        asked(**changes)
    assert refused.value.field == field


def test_a_placement_is_ignored_while_bench_is_off() -> None:
    assert asked(bench={"mode": "off", "placement": "moon"}).bench.mode == "off"


def test_the_new_target_is_there_at_once_and_never_looks_reached() -> None:
    seen = training(running(2), target=3)
    assert world_of(replace(seen, generation=3))["target"] == 3
    assert world_of(replace(seen, generation=3))["ready"] == 2


def test_a_scale_down_is_not_done_while_ranks_above_the_target_live() -> None:
    stale = replace(training(running(4), target=2), generation=3)
    assert world_of(stale)["ready"] < 2
    assert world_of(stale)["belowMinimum"] is False
    seen = training(running(4), target=2)
    assert world_of(seen)["ready"] < 2
    assert world_of(training(running(2), target=2))["ready"] == 2


def test_a_failed_training_shows_the_ranks_that_came_up() -> None:
    ended = [
        RankStatus(
            rank=r, phase="Failed", started_at=1.0, exit=Exit(code=1, at=2.0, reason="Error")
        )
        for r in range(2)
    ]
    failed = Status(phase=Phase.FAILED, ranks=ended, observed_generation=2)
    assert world_of(training(failed))["ready"] == 2
    assert world_of(training(failed, min=1))["ready"] == 1
    never = Status(phase=Phase.FAILED, ranks=[RankStatus(rank=0), RankStatus(rank=1)])
    assert world_of(training(never))["ready"] == 0


def test_an_exit_code_that_is_not_known_is_never_zero() -> None:
    status = running(2, phase=Phase.FAILED, rank_exits=[
        RankExit(rank=0, exit_code=None, termination_reason="Vanished"),
        RankExit(rank=1, exit_code=137, termination_reason="OOMKilled", restart_count=2),
    ])  # fmt: skip
    exits = deployment(training(status))["distributed"]["rankExits"]
    assert exits[0] == {
        "rank": 0, "exitCode": -1, "restartCount": 0, "terminationReason": "Vanished"
    }  # fmt: skip
    assert exits[1]["exitCode"] == 137


def test_bandwidth_is_told_in_the_unit_the_client_documents() -> None:
    result = BenchResult(measured_at=1.25, probe_node_a="a", probe_node_b="b", busbw_gbps_p50=80.0)
    bench = BenchStatus(phase="Succeeded", result=result, started_at=1.0, completed_at=2.0)
    seen = training(running(2, bench=bench))
    seen = replace(seen, spec=replace(seen.spec, bench=asked(bench={"mode": "on-start"}).bench))
    told = deployment(seen)["distributed"]["bench"]
    assert told["result"]["busbwGbpsP50"] == 10.0
    assert told["result"]["measuredAt"] == "1970-01-01T00:00:01.250Z"
    assert (told["phase"], told["lastAttemptOutcome"]) == ("Succeeded", "success")


def test_a_bench_that_did_not_run_says_why() -> None:
    bench = BenchStatus(phase="Skipped", message="one host only")
    seen = training(running(2, bench=bench))
    seen = replace(seen, spec=replace(seen.spec, bench=asked(bench={"mode": "on-start"}).bench))
    told = deployment(seen)["distributed"]["bench"]
    assert (told["phase"], told["message"]) == ("Skipped", "one host only")


def test_a_bench_is_not_waited_for_once_the_training_is_over() -> None:
    seen = training(running(2, phase=Phase.SUCCEEDED, bench=BenchStatus(phase="Pending")))
    seen = replace(seen, spec=replace(seen.spec, bench=asked(bench={"mode": "on-start"}).bench))
    told = deployment(seen)["distributed"]["bench"]
    assert (told["phase"], told["lastAttemptOutcome"]) == ("Skipped", "skipped")
    assert told["message"]


def test_without_an_etcd_ranks_meet_under_c10d(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_ETCD", "/no/such/etcd")
    assert rendezvous_of("etcd-v2", "local") == "c10d"
    assert rendezvous_of("etcd-v2", "kubernetes") == "etcd-v2"
    assert rendezvous_of("static", "local") == "static"


def test_a_degraded_mesh_is_told_as_transport_and_condition() -> None:
    degraded = Condition(type="DegradedMesh", status="True", reason="MeshTimeout")
    block = deployment(training(running(2, conditions=[degraded])))["distributed"]
    assert block["transport"] == "hub-relay"
    assert block["conditions"][0]["type"] == "DegradedMesh"


REQUIRED = ("instanceName", "userId", "namespace", "state", "url", "createdAt", "replicas")


@pytest.mark.parametrize("phase", list(Phase))
def test_what_the_client_requires_is_never_missing_or_null(phase: Phase) -> None:
    answer = deployment(training(replace(running(2), phase=phase)))
    assert all(answer[field] is not None for field in REQUIRED)
    for field in ("friendlyName", "image", "public", "publicMetadata", "containerStatuses"):
        assert answer[field] is not None
    block = answer["distributed"]
    for field in ("worldSize", "transport", "ranks", "conditions", "rankExits", "milestones"):
        assert block[field] is not None


def test_a_training_being_removed_is_terminating() -> None:
    seen = replace(training(running(2)), deletion_requested_at=5.0)
    assert (deployment(seen)["phase"], deployment(seen)["state"]) == ("terminating", "Terminating")
