"""Every field that `kubectl explain training` shows is described, and every stored one shown."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from atoll.core.mesh import MeshState
from atoll.core.phase import Phase
from atoll.core.ranks import final_exits
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import (
    BenchResult,
    BenchStatus,
    Condition,
    DesiredState,
    Event,
    Exit,
    MeshStatus,
    RankExit,
    RankStatus,
    Resize,
    Status,
    Training,
    WorldPoint,
)
from atoll.operator.crd import render_crd
from atoll.operator.resource import status_body, with_events

Json = dict[str, Any]
(VERSION,) = render_crd()["spec"]["versions"]
FIELDS: Json = VERSION["schema"]["openAPIV3Schema"]["properties"]


def walk(schema: Json, path: str) -> Iterator[tuple[str, Json]]:
    yield path, schema
    for name, part in (schema.get("items") or schema).get("properties", {}).items():
        yield from walk(part, f"{path}.{name}")


@pytest.mark.parametrize("part", ["spec", "status"])
def test_every_field_is_described(part: str) -> None:
    fields = list(walk(FIELDS[part], part))
    assert len(fields) > 30
    assert [path for path, schema in fields if len(schema.get("description", "")) < 5] == []


def full_status() -> Status:
    """A status with something in every field."""
    ended = Exit(code=1, at=2.5, reason="Error", signal="SIGTERM", is_stopped=True, failed_at=2.25,
                 message="m", log_tail=["l"], is_from_backend=True)  # fmt: skip
    ranks = [
        RankStatus(rank=n, phase="Failed", pod_name=f"p-{n}", node=f"n-{n}", provider="p",
                   region="r", restarts=n, message="m", attempt=n, started_at=1.5, exit=ended,
                   previous_exit=ended, metered_s=9.5, missing_since=3.0, is_stopping=True)
        for n in range(300)
    ]  # fmt: skip
    result = BenchResult(measured_at=1.0, probe_node_a="a", probe_node_b="b",
                         size_bytes_swept=[1], busbw_gbps_p10=1.0, busbw_gbps_p50=1.0,
                         busbw_gbps_p90=1.0, algbw_gbps_p50=1.0, latency_us_at_1mib=1.0,
                         is_worker_pair=False, points=[(1, 1.0)])  # fmt: skip
    status = Status(
        phase=Phase.FAILED, reason="RankFailed", message="m", observed_generation=3,
        ranks=ranks[:299], removed_ranks=ranks[299:],
        root_cause=RankExit(rank=0, exit_code=1, termination_reason="Error", restart_count=1,
                            signal="s", started_at=1.0, ended_at=2.0, host="h", collateral=True,
                            message="m", log_tail=["l"]),
        conditions=[Condition(type="Ready", status="False", reason="r", message="m")],
        started_at=1.0, ended_at=2.0, gate_opened_at=1.0, failing="RankFailed",
        failing_message="m", desired_at=1.0, 
        desired=DesiredState(version=1, size=2, discarded_attempts={0: 1}),
        discarded_attempts={0: 1}, world_size_history=[WorldPoint(at=1.0, target=2, ready=1)],
        last_resize=Resize(from_target=1, to_target=2, at=1.0), is_released=True,
        rendezvous_endpoint="e", started_monotonic={"created": 1.5}, clock_skew=2.5,
        mesh=MeshStatus(state=MeshState.READY, message="m", hosts=2, foreign_writes=1),
        bench=BenchStatus(phase="Succeeded", message="m", result=result, started_at=1.0,
                          completed_at=2.0),
    )  # fmt: skip
    return status


@pytest.mark.parametrize("is_over", [False, True])
def test_every_field_that_is_stored_is_shown(is_over: bool) -> None:
    spec = TrainingSpec(name="a", command=["x"], world_size=WorldSize(min=1, target=2, max=3))
    status = full_status()
    if is_over:
        exits = final_exits(status, status.ranks[0])
        status = type(status)(**{n: getattr(status, n) for n in status.__struct_fields__}
                              | {"rank_exits": exits})  # fmt: skip
    events = with_events({}, [Event(type="Normal", reason="r", message="m", at=1.0, count=2)])
    body = status_body(Training(namespace="n", uid="u", spec=spec), status, events)
    strange = [path for path, value in _leaves(body, "status") if not _is_shown(path, value)]
    assert strange == []


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and path.split(".")[-1] not in (
        "discardedAttempts",
        "startedMonotonic",
    ):
        for name, part in value.items():
            yield from _leaves(part, f"{path}.{name}")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for part in value:
            yield from _leaves(part, path)
    else:
        yield path, value


TYPES = {"string": str, "integer": int, "number": (int, float), "boolean": bool}


def _is_shown(path: str, value: Any) -> bool:
    schema = dict(walk(FIELDS["status"], "status")).get(path)
    if schema is None:
        return False
    kind = {"array": list, "object": dict}.get(schema["type"], TYPES.get(schema["type"]))
    return kind is not None and isinstance(value, kind)
