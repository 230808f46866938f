"""The control plane reads no store for a training that the training's owner could not read."""

from __future__ import annotations

import pytest

from atoll.core.config import RoundStore
from atoll.core.spec import RendezvousSpec, TrainingSpec, WorldSize
from atoll.core.status import Training
from atoll.rounds.follow import StoreAccess, covers, refusal_reason

STORES = [RoundStore(uri="s3://bucket/runs", namespaces=["team-a"])]


def training(namespace: str, uri: str) -> Training:
    spec = TrainingSpec(
        name="t",
        command=["true"],
        world_size=WorldSize(min=1, target=1, max=1),
        rendezvous=RendezvousSpec(uri=uri or None),
    )
    return Training(namespace=namespace, uid="u", spec=spec)


@pytest.mark.parametrize(
    ("namespace", "uri", "kind", "expected"),
    [
        ("default", "file:///data", "local", ""),
        ("default", "file:///data", "slurm", ""),
        ("team-b", "file:///etc", "local", "own user"),
        ("team-b", "file:///etc", "slurm", "own user"),
        ("default", "file:///data", "kubernetes", "not on this machine"),
        ("team-a", "s3://bucket/runs/x", "kubernetes", ""),
        ("team-b", "s3://bucket/runs/x", "kubernetes", "team-b"),
        ("team-a", "s3://bucket/secret", "kubernetes", "[[rounds.stores]]"),
        ("default", "s3://other/x", "local", "[[rounds.stores]]"),
    ],
)
def test_only_what_was_allowed_is_read(namespace: str, uri: str, kind: str, expected: str) -> None:
    words = refusal_reason(training(namespace, uri), StoreAccess(kind, ""), STORES, "default")
    assert expected in words
    assert bool(expected) == bool(words)


def test_the_store_that_the_executor_has_for_a_training_is_read() -> None:
    for kind, uri in (("local", "file:///state/u"), ("sagemaker", "s3://own/atoll-ranks/u")):
        assert refusal_reason(training("team-b", ""), StoreAccess(kind, uri), (), "default") == ""
    assert refusal_reason(training("team-b", ""), StoreAccess("kubernetes", ""), (), "default")


@pytest.mark.parametrize(
    "uri",
    [
        "s3://bucket/runs/../secret",
        "s3://bucket/runs-of-others",
        "s3://bucket/runs/%2e%2e/secret",
        "s3://bucket/runs//x",
        "s3://bucket/runs/x?y",
        "s3://buckets/runs",
        "gs://bucket/runs",
    ],
)
def test_what_could_lead_out_of_a_store_is_not_under_it(uri: str) -> None:
    assert not covers("s3://bucket/runs", uri)
    assert covers("s3://bucket/runs/", "s3://bucket/runs/x/y")
    assert covers("s3://bucket", "s3://bucket/x")
