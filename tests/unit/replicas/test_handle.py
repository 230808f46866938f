"""Handles: plain data that travels."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

import atoll
from atoll import ReplicaHandle, ValidationError
from atoll.replicas.handle import read_handle

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
