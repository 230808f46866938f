"""A function has its rank, its world and their store from the environment, if it needs them."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from atoll.agent.entrypoint import call, missing_keywords

ENV = {"REPLICA_RANK": "2", "WORLD_SIZE": "4", "RENDEZVOUS_URI": "s3://b/run"}


def record_store(rank: int, world_size: int, *, rendezvous_uri: str, lr: float) -> tuple[Any, ...]:
    return rank, world_size, rendezvous_uri, lr


def test_what_a_function_requires_and_was_not_given_is_filled_in() -> None:
    assert call(record_store, {"lr": 0.1}, ENV) == (2, 4, "s3://b/run", 0.1)
    assert call(record_store, {"lr": 0.1, "world_size": 9}, ENV) == (2, 9, "s3://b/run", 0.1)


def test_what_has_a_value_of_its_own_keeps_it() -> None:
    def lora(rank: int = 8, **more: Any) -> Any:
        return rank, more

    assert call(lora, {}, ENV) == (8, {})
    assert missing_keywords(functools.partial(record_store, rank=3), {"lr": 1}) == [
        "world_size",
        "rendezvous_uri",
    ]
    assert missing_keywords(dict.fromkeys, {}) == []


def test_the_variable_that_the_launcher_chose_counts_first() -> None:
    env = ENV | {"ATOLL_RANK_ENV": "MY_RANK", "MY_RANK": "3"}
    assert call(lambda rank: rank, {}, env) == 3


@pytest.mark.parametrize(("name", "value"), [("REPLICA_RANK", "two"), ("WORLD_SIZE", "")])
def test_a_variable_that_is_missing_or_no_number_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        call(lambda rank, world_size: None, {}, ENV | {name: value})
