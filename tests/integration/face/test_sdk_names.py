"""A name may pass to another training: a handle never tells the other one's story."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import atoll
from atoll.core.errors import NotFound, ValidationError

from .conftest import PATIENCE_S

READS: dict[str, Callable[[Any], Any]] = {
    "phase": lambda t: t.phase,
    "logs": lambda t: t.logs(),
    "follow": lambda t: list(t.stream_logs()),
    "events": lambda t: t.events(),
    "stats": lambda t: t.stats(),
    "metrics": lambda t: t.metrics(),
    "scale": lambda t: t.scale(1),
    "wait": lambda t: t.wait_until_min_world(0),
}


@pytest.mark.parametrize("read", READS)
def test_an_old_handle_does_not_read_the_training_that_took_its_name(
    client: atoll.Client, read: str
) -> None:
    old = client.deploy_distributed("name", command=["sleep", "600"])
    client.get("name").delete()
    with client.deploy_distributed("name", command=["echo", "other"]) as other:
        other.result(PATIENCE_S)
        with pytest.raises(NotFound):
            READS[read](old)
        assert [line.text for line in other.logs()] == ["other"]
        assert other.events()


@pytest.mark.parametrize("is_async", [False, True])
def test_what_was_deleted_is_remembered_as_it_ended(client: atoll.Client, is_async: bool) -> None:
    t = client.deploy_distributed("gone", command=["sleep", "600"], wait="min")
    asyncio.run(t.delete_async()) if is_async else t.delete()
    assert t.phase == "cancelled"
    assert [(e.rank, e.signal) for e in t.rank_exits] == [(0, "SIGTERM")]


def test_no_ranks_have_no_lines(client: atoll.Client) -> None:
    with client.deploy_distributed("quiet", command=["echo", "x"], world_size=2) as t:
        t.result(PATIENCE_S)
        assert list(t.stream_logs(ranks=[])) == []
        assert len(list(t.stream_logs(ranks=[1]))) == 1
        assert len(list(t.stream_logs())) == 2


def test_a_filter_that_cannot_be_sent_is_refused(client: atoll.Client) -> None:
    with pytest.raises(ValidationError):
        client.list(prefix="\udcff")
