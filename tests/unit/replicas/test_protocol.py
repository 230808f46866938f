"""Whoever looks like an executor of replicas is one."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from atoll import EKSExecutor, KubernetesExecutor, LocalProcessExecutor, ServerlessExecutor

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
