"""DiLoCo tells of its rounds by itself; what it tells equals what the manifests hold."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from atoll.core.rounds import ReportedRound, StoredRound, items_of, with_observed, with_report
from atoll.diloco import DiLoCo, reports
from atoll.objectstore import ObjectStore
from atoll.rounds.manifests import RunReader

pytestmark = pytest.mark.timeout(120)


def train(uri: str, rank: int, world: int, rounds: int, **options: Any) -> None:
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 3)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    config: dict[str, Any] = {"uri": uri, "rank": rank, "world_size": world} if uri else {}
    with DiLoCo(model, inner, sync_every=2, **config, **options) as diloco:
        while diloco.round < rounds:
            diloco.count(5)
            model(torch.randn(2, 4)).square().sum().backward()
            inner.step()
            inner.zero_grad()


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[ReportedRound]:
    heard: list[ReportedRound] = []

    def hear(message: Any) -> None:
        heard.append(msgspec.convert(message, ReportedRound))

    monkeypatch.setattr(reports, "report_round", hear)
    return heard


@pytest.mark.parametrize("fragments", [1, 2])
def test_what_replicas_tell_equals_the_manifests(
    tmp_path: Path, messages: list[ReportedRound], fragments: int
) -> None:
    uri = tmp_path.as_uri()
    options = {"run_id": "told", "fragments": fragments}
    threads = [
        threading.Thread(target=train, args=(uri, rank, 2, 3), kwargs=options) for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    retained: dict[tuple[int, int], StoredRound] = {}
    for message in messages:
        key = message.fragment, message.round
        retained[key] = with_report(retained.get(key, StoredRound()), message)
    assert len(retained) == 3 * fragments
    blobs = ObjectStore.open(uri)
    for folder in blobs.list_folders():
        for known in RunReader(blobs, folder).observe().rounds:
            key = known.fragment, known.round
            reported = retained[key].reported
            assert reported is not None
            assert msgspec.structs.replace(reported, at=known.at) == msgspec.structs.replace(
                known, late=[]
            )
            (item,) = items_of([with_observed(retained[key], known)], has_costs=True)
            assert item.tokens == 20 if fragments == 1 else item.tokens >= 0
            assert [cost.rank for cost in item.costs or ()] == [0, 1]
            assert item.bits_per_parameter
            assert item.blocked_s


def test_a_replica_alone_tells_its_rounds_too(messages: list[ReportedRound]) -> None:
    train("", 0, 1, 3)
    assert [message.round for message in messages] == [0, 1, 2]
    assert all(message.facts is not None and message.facts.members == [0] for message in messages)
