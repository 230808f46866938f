from __future__ import annotations

import pytest

from atoll.core.errors import ValidationError
from atoll.diloco.replica_config import (
    ReplicaConfig,
    find_replica_config,
    read_run_id,
    read_start,
)
from atoll.replicas.surface import start_variables

NAMES = (
    "ATOLL_RANK REPLICA_RANK RANK ATOLL_WORLD_MAX ATOLL_WORLD_TARGET WORLD_SIZE ATOLL_WORLD_MIN "
    "ATOLL_RENDEZVOUS_URI ATOLL_STARTED_TOGETHER ATOLL_QUORUM"
).split()


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def test_with_nothing_set_it_is_a_world_of_one() -> None:
    assert find_replica_config() == ReplicaConfig(0, 1, 1, None)


def test_a_rank_of_atoll_finds_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ATOLL_RANK": "2",
        "RANK": "7",
        "ATOLL_WORLD_TARGET": "4",
        "WORLD_SIZE": "9",
        "ATOLL_WORLD_MIN": "3",
        "ATOLL_RENDEZVOUS_URI": "s3://bucket/run",
    }.items():
        monkeypatch.setenv(name, value)
    assert find_replica_config() == ReplicaConfig(2, 4, 3, "s3://bucket/run")
    assert find_replica_config("file:///x", 0, 2, 1) == ReplicaConfig(0, 2, 1, "file:///x")


def test_the_world_is_as_large_as_it_may_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_WORLD_MAX", "8")
    monkeypatch.setenv("ATOLL_WORLD_TARGET", "4")
    monkeypatch.setenv("ATOLL_RENDEZVOUS_URI", "file:///x")
    assert find_replica_config().world_size == 8


@pytest.mark.parametrize(("count", "least"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_round_of_a_launch_needs_half_of_it_whatever_its_failures_allow(
    count: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**start_variables(count), "ATOLL_WORLD_MIN": "1"}.items():
        monkeypatch.setenv(name, value)
    assert find_replica_config("file:///x", 0, count).min_replicas == least
    assert find_replica_config("file:///x", 0, count, 1).min_replicas == 1
    assert read_start(count, None, None).together == count


def test_any_executor_that_sets_rank_and_world_size_will_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert find_replica_config("file:///x") == ReplicaConfig(1, 2, 1, "file:///x")


def test_many_replicas_without_a_store_are_refused() -> None:
    with pytest.raises(ValidationError, match="ATOLL_RENDEZVOUS_URI"):
        find_replica_config(world_size=2)


@pytest.mark.parametrize(("name", "value"), [("RANK", "one"), ("WORLD_SIZE", "-1"), ("RANK", "4")])
def test_a_variable_that_does_not_fit_is_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATOLL_RENDEZVOUS_URI", "file:///x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv(name, value)
    with pytest.raises(ValidationError, match=name if value != "4" else "rank: 4"):
        find_replica_config()


@pytest.mark.parametrize("run_id", ["a/b", "..", "é", "²", "a\n", 7, [], b"x", "x" * 81])
def test_a_name_of_a_run_that_can_be_no_folder_is_refused(run_id: object) -> None:
    with pytest.raises(ValidationError, match=r"^run_id: .*expected 1 to 80 letters, digits"):
        read_run_id(run_id)  # type: ignore[arg-type]
