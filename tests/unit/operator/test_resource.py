"""A training as a Kubernetes object and back."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.phase import Phase
from atoll.core.spec import Source, TrainingSpec, WorldSize
from atoll.core.status import (
    Condition,
    DesiredState,
    Event,
    Exit,
    RankExit,
    RankStatus,
    Status,
    Training,
    WorldStatus,
)
from atoll.operator.resource import (
    MAX_EVENTS,
    status_body,
    to_event,
    to_resource,
    to_training,
    with_events,
)

replace = msgspec.structs.replace


def training(**spec: object) -> Training:
    given = {
        "name": "tiny",
        "command": ["true"],
        "world_size": WorldSize(min=1, target=2, max=4),
    } | spec
    return Training(namespace="team-a", uid="u-1", spec=TrainingSpec(**given))  # type: ignore[arg-type]


def served(one: Training) -> dict[str, object]:
    """As the API server gives it back."""
    made = to_resource(one)
    made["metadata"] |= {
        "namespace": one.namespace,
        "uid": one.uid,
        "resourceVersion": "7",
        "generation": 3,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    made["status"] = status_body(one, one.status, [])
    wire = msgspec.json.decode(msgspec.json.encode(made))
    assert isinstance(wire, dict)
    return wire


def test_a_training_comes_back_as_it_was_sent() -> None:
    status = Status(
        phase=Phase.READY,
        world=WorldStatus(ready=2, target=2, min=1, max=4, below_minimum=False),
        ranks=[RankStatus(rank=0, attempt=5, exit=Exit(code=None, at=1.5, reason="NodeLost"))],
        desired=DesiredState(version=3, size=2, discarded_attempts={1: 5}),
        discarded_attempts={1: 5},
    )
    one = replace(
        training(
            command=None,
            source=Source(kind="function", content=bytes(range(256)), filename="f.pkl"),
            env={"A": "b"},
            executor="kubernetes",
            start_grace_s=1.5,
        ),
        status=status,
    )
    back = to_training(served(one))
    assert (back.spec, back.status) == (one.spec, one.status)
    assert (back.generation, back.resource_version, back.uid) == (3, 7, "u-1")


def test_an_object_made_with_kubectl_runs_on_this_cluster() -> None:
    raw = served(training())
    assert "executor" not in raw["spec"]
    assert to_training(raw).spec.executor == "kubernetes"


def test_zeros_are_written_out_for_kubectl_get() -> None:
    world = status_body(training(), Status(), [])["world"]
    assert (world["ready"], world["target"]) == (0, 0)


def test_what_kubectl_users_look_for_is_written_out() -> None:
    condition = Condition(type="Ready", status="False", last_transition_at=1.5)
    ranks = [RankStatus(rank=0), RankStatus(rank=1)]
    body = status_body(training(), Status(ranks=ranks, conditions=[condition]), [])
    assert (body["phase"], body["restarts"], body["observedGeneration"]) == ("", 0, 0)
    assert body["ranks"] == [{"ranks": "0-1", "phase": "Pending"}]
    (written,) = body["conditions"]
    assert written == {
        "type": "Ready",
        "status": "False",
        "reason": "",
        "message": "",
        "lastTransitionTime": "1970-01-01T00:00:01.500Z",
    }


def test_times_of_conditions_are_read() -> None:
    raw = served(training())
    named = [{"type": "A", "status": "True", "lastTransitionTime": "2027-01-15T08:00:00Z"}]
    raw["status"] = {"conditions": [*named, {"type": "B", "status": "True"}]}
    read = [c.last_transition_at for c in to_training(raw).status.conditions]
    assert read == [1_800_000_000.0, 0.0]


def test_an_exit_code_that_is_not_known_may_be_dropped_on_the_way() -> None:
    cause = RankExit(rank=0, exit_code=None, termination_reason="Vanished")
    raw = served(replace(training(), status=Status(root_cause=cause)))
    assert raw["status"]["rootCause"].pop("exitCode", 0) is None  # type: ignore[index]
    assert to_training(raw).status.root_cause == cause


def test_ranks_spoilt_by_hand_are_left_out_and_the_rest_is_read() -> None:
    ended = Exit(code=1, at=5.0, reason="Error")
    status = Status(phase=Phase.FAILED, ranks=[RankStatus(rank=0, attempt=0, exit=ended)])
    raw = served(replace(training(), status=status))
    raw["status"]["rankData"] = "rubbish"  # type: ignore[index]
    back = to_training(raw).status
    assert (back.phase, back.ranks) == ("failed", [])


def test_an_event_is_shown_by_kubectl_describe() -> None:
    body = to_event(served(training()), Event(type="Warning", reason="R", message="m", at=0.0))
    assert body["involvedObject"]["uid"] == "u-1"  # type: ignore[index]
    assert (body["type"], body["reason"], body["message"]) == ("Warning", "R", "m")


@given(st.lists(st.sampled_from("abc"), max_size=150))
def test_events_keep_their_order_and_repeats_are_counted(reasons: list[str]) -> None:
    status: dict[str, object] = {}
    for at, reason in enumerate(reasons):
        event = Event(type="Normal", reason=reason, message="", at=float(at))
        status["events"] = with_events(status, [event])
    kept = status.get("events") or []
    assert isinstance(kept, list)
    assert len(kept) <= MAX_EVENTS
    runs = [r for n, r in enumerate(reasons) if n == 0 or reasons[n - 1] != r]
    assert [e["reason"] for e in kept] == runs[-MAX_EVENTS:]
    ids = [e["id"] for e in kept]
    assert ids == sorted(set(ids))
    if len(runs) <= MAX_EVENTS:
        assert sum(e.get("count", 1) for e in kept) == len(reasons)


def test_a_status_spoilt_by_hand_is_read_as_far_as_it_can_be() -> None:
    raw = served(replace(training(), status=Status(phase=Phase.FAILED, reason="RankFailed")))
    raw["status"] |= {"ranks": "rubbish", "events": ["rubbish", 3]}  # type: ignore[operator]
    back = to_training(raw)
    assert (back.status.phase, back.status.reason, back.status.ranks) == (
        "failed",
        "RankFailed",
        [],
    )
    event = Event(type="Normal", reason="R", message="", at=0.0)
    assert [e["reason"] for e in with_events(raw["status"], [event])] == ["R"]  # type: ignore[arg-type]
