"""Which arguments reach a replica, in which variables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import ValidationError
from atoll.replicas.entrypoints import as_argv, read_arguments


def test_scalars_are_upper_cased_variables_and_everything_is_json() -> None:
    args = {
        "rendezvous_uri": "s3://bucket/run42",
        "lr": 0.1,
        "steps": 7,
        "warm-up.s": 2,
        "amp": True,
        "none": None,
        "tags": ["a"],
        "net": {"d": 1},
    }
    values, env = read_arguments(args, n_replicas=3, is_function=False)
    assert values == args
    assert json.loads(env.pop("ATOLL_ENTRYPOINT_ARGS")) == args
    assert env == {
        "RENDEZVOUS_URI": "s3://bucket/run42",
        "LR": "0.1",
        "STEPS": "7",
        "WARM_UP_S": "2",
        "AMP": "true",
    }


def test_a_path_is_told_as_text() -> None:
    values, env = read_arguments({"data": Path("/data")}, n_replicas=3, is_function=False)
    assert env == {"DATA": "/data", "ATOLL_ENTRYPOINT_ARGS": '{"data": "/data"}'}
    assert as_argv(values) == ["--data", "/data"]


def test_the_name_of_the_ranks_variable_is_no_argument() -> None:
    values, env = read_arguments({"rank_env": "MY_RANK", "lr": 1}, n_replicas=3, is_function=False)
    assert values == {"lr": 1}
    assert json.loads(env.pop("ATOLL_ENTRYPOINT_ARGS")) == {"lr": 1}
    assert env == {"ATOLL_RANK_ENV": "MY_RANK", "LR": "1"}
    assert (
        "ATOLL_RANK_ENV"
        not in read_arguments({"rank_env": None}, n_replicas=3, is_function=False).env
    )
    for usual in ("REPLICA_RANK", "RANK", "JOB_COMPLETION_INDEX"):
        read_arguments({"rank_env": usual}, n_replicas=3, is_function=False)


@pytest.mark.parametrize(
    "key",
    [
        *("rank", "RANK", "replica_rank", "WORLD_SIZE", "node_name", "atoll_name", "basilica_rank"),
        *(
            "master_addr",
            "local_rank",
            "job_completion_index",
            "entrypoint",
            "pet_nnodes",
            "atoll_entrypoint_args",
        ),
        *("path", "home", "pythonpath", "ld_preload", "replica-rank"),
    ],
)
def test_reserved_names_are_refused(key: str) -> None:
    for is_function in (False, True):
        with pytest.raises(ValidationError, match="expected another name") as refused:
            read_arguments({key: "1"}, n_replicas=3, is_function=is_function)
        assert refused.value.field == f"entrypoint_args.{key}"
    read_arguments({key: ["1"]}, n_replicas=3, is_function=False)  # it has no variable


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"lr": 1, "LR": 2}, "entrypoint_args.LR"),
        ({"a-b": 1, "a_b": 2}, "entrypoint_args.a_b"),
        ({"rank_env": "my rank"}, "entrypoint_args.rank_env"),
        ({"rank_env": ""}, "entrypoint_args.rank_env"),
        ({"rank_env": 3}, "entrypoint_args.rank_env"),
        ({"rank_env": "WORLD_SIZE"}, "entrypoint_args.rank_env"),
        ({"rank_env": "PATH"}, "entrypoint_args.rank_env"),
        ({"rank_env": "LR", "lr": 1}, "entrypoint_args.rank_env"),
        ({"text": "a\0b"}, "entrypoint_args.text"),
        ({"text": "\ud800"}, "entrypoint_args.text"),
        ({"large": "x" * 200_000}, "entrypoint_args.large"),
        ({"large": ["x" * 70_000], "more": ["x" * 60_000]}, "entrypoint_args.large"),
        ({"thing": object()}, "entrypoint_args.thing"),
        ({7: 1}, "entrypoint_args"),
        ([1], "entrypoint_args"),
    ],
)
def test_what_cannot_be_told_is_refused_by_name(args: Any, field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        read_arguments(args, n_replicas=3, is_function=False)
    assert refused.value.field == field


def test_a_function_takes_what_no_variable_can_hold() -> None:
    args = {"big": "x" * 200_000, "thing": object(), "lr": 0.5, "text": "a\0b"}
    assert read_arguments(args, n_replicas=3, is_function=True) == (args, {"LR": "0.5"})


def test_world_size_is_an_argument_if_it_is_the_number_of_replicas() -> None:
    values, env = read_arguments({"world_size": 3}, n_replicas=3, is_function=False)
    assert values == {"world_size": 3}
    assert "WORLD_SIZE" not in env, "every replica has it in any case"
    for other in (2, "3", True, None, 3.5):
        with pytest.raises(ValidationError, match=r"entrypoint_args\.world_size: .* expected 3"):
            read_arguments({"world_size": other}, n_replicas=3, is_function=True)
