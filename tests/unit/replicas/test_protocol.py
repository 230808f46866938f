"""Whoever looks like an executor of replicas is one, and handles are plain data that travels."""

from __future__ import annotations

import inspect
import json
import pickle
from typing import Any

import pytest

import atoll
from atoll import (
    EKSExecutor,
    KubernetesExecutor,
    LocalProcessExecutor,
    ReplicaHandle,
    ServerlessExecutor,
    ValidationError,
)
from atoll.replicas.protocol import read_handle

MADE = [LocalProcessExecutor(), KubernetesExecutor("i"), EKSExecutor("i")]
METHODS = ("launch_replicas", "poll", "stream_logs", "cancel", "collect")


@pytest.mark.parametrize("executor", MADE, ids=lambda made: made.backend_name)
def test_every_executor_is_one(executor: ServerlessExecutor) -> None:
    assert isinstance(executor, ServerlessExecutor)
    for name in METHODS:
        promised = inspect.signature(getattr(ServerlessExecutor, name)).parameters
        own = inspect.signature(getattr(type(executor), name)).parameters
        assert [(p.name, p.kind, p.default) for p in own.values()] == [
            (p.name, p.kind, p.default) for p in promised.values()
        ]


def test_one_of_somebody_else_is_one_too_and_half_of_one_is_none() -> None:
    members: dict[str, Any] = dict.fromkeys(METHODS, lambda self: None)
    members |= {"backend_name": "mine", "supports_inter_replica_network": False}
    assert isinstance(type("Mine", (), members)(), ServerlessExecutor)
    for name in members:
        half = {key: value for key, value in members.items() if key != name}
        assert not isinstance(type("Half", (), half)(), ServerlessExecutor)


HANDLE = ReplicaHandle(1, "local", {"job_name": "replicas-1", "namespace": "default", "rank": 1})


def test_a_handle_travels_as_json_and_as_a_pickle() -> None:
    document = json.loads(HANDLE.to_json())
    assert document == {
        "rank": 1,
        "backend_name": "local",
        "metadata": {"job_name": "replicas-1", "namespace": "default", "rank": 1},
    }
    for back in (
        ReplicaHandle.from_json(HANDLE.to_json()),
        ReplicaHandle.from_json(document),
        ReplicaHandle.from_json(HANDLE.to_json().encode()),
        pickle.loads(pickle.dumps(HANDLE)),
        ReplicaHandle(rank=1, backend_name="local", metadata=HANDLE.metadata),
        eval(repr(HANDLE), {"ReplicaHandle": atoll.ReplicaHandle}),
    ):
        assert back == HANDLE
        assert {back, HANDLE} == {HANDLE}
        assert (back.rank, back.backend_name, back.metadata) == (
            HANDLE.rank,
            HANDLE.backend_name,
            HANDLE.metadata,
        )
    assert ReplicaHandle(0, "local", HANDLE.metadata) != HANDLE
    assert HANDLE != "replicas-1"


def test_metadata_of_another_kind_of_executor_travels_too() -> None:
    handle = ReplicaHandle(0, "my-cloud", {"call_id": "fc-1", "tags": ["a"]})
    assert ReplicaHandle.from_json(handle.to_json()) == handle


def test_a_handle_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="cannot assign"):
        HANDLE.rank = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "handle"),
        ("[]", "handle"),
        ("{}", "handle"),
        (None, "handle"),
        (7, "handle"),
        ('{"rank": 0, "backend_name": "local", "metadata": [], "more": 1}', "handle"),
        ('{"rank": 0, "backend_name": "local", "metadata": []}', "handle.metadata"),
        ('{"rank": -1, "backend_name": "local", "metadata": {"job_name": "a"}}', "handle.rank"),
        ('{"rank": 0, "backend_name": 5, "metadata": {"job_name": "a"}}', "handle.backend_name"),
    ],
)
def test_json_that_is_no_handle_is_refused_by_field(text: Any, field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        ReplicaHandle.from_json(text)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("handle", "field"),
    [
        (None, "handle"),
        ("replicas-1", "handle"),
        (ReplicaHandle(True, "local", {"job_name": "a"}), "handle.rank"),
        (ReplicaHandle(0, "eks", {"job_name": "a"}), "handle.backend_name"),
        (ReplicaHandle(0, "local", "text"), "handle.metadata"),  # type: ignore[arg-type]
        (ReplicaHandle(0, "local"), "handle.metadata.job_name"),
        (ReplicaHandle(0, "local", {"job_name": 7}), "handle.metadata.job_name"),
        (ReplicaHandle(0, "local", {"job_name": "a", "uid": 7}), "handle.metadata.uid"),
    ],
)
def test_what_is_no_handle_of_this_backend_is_refused_by_field(handle: Any, field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        read_handle(handle, "local")
    assert refused.value.field == field


PUBLIC = {*METHODS, "attach", "backend_name", "close", "supports_inter_replica_network"}


@pytest.mark.parametrize(
    "kind",
    ["LocalProcessExecutor", "KubernetesExecutor", "EKSExecutor", "SlurmExecutor", "ModalExecutor",
     "ModalSpawnExecutor", "SageMakerExecutor"],
)  # fmt: skip
def test_an_executor_shows_its_protocol_and_nothing_else(kind: str) -> None:
    public = {name for name in dir(getattr(atoll, kind)) if not name.startswith("_")}
    extra = {"render_replicas"} if kind in ("KubernetesExecutor", "EKSExecutor") else set()
    assert public - {"attach"} == (PUBLIC | extra) - {"attach"}
