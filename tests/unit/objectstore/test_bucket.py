"""Records in an object store."""

from __future__ import annotations

from pathlib import Path

import pytest

from atoll.agent.wrapper import RankAttempt
from atoll.core.errors import ValidationError
from atoll.objectstore.bucket import Bucket


@pytest.fixture
def record_store(tmp_path: Path) -> Bucket:
    return Bucket.open(f"memory://{tmp_path}")


def test_a_name_is_created_once(record_store: Bucket) -> None:
    assert record_store.create("a", b"1")
    assert record_store.create("a", b"1")  # the same request again, as after a lost answer
    assert not record_store.create("a", b"2")
    assert record_store.get("a") == b"1"


def test_put_get_list_and_delete(record_store: Bucket) -> None:
    assert record_store.get("a") is None
    record_store.put("a", b"1")
    record_store.put("a", b"2")
    record_store.heartbeat("0.0.heartbeat")
    before = record_store.entries()
    assert sorted(before) == ["0.0.heartbeat", "a"]
    record_store.heartbeat("0.0.heartbeat")
    assert record_store.entries()["0.0.heartbeat"] > before["0.0.heartbeat"]
    record_store.delete(["a", "b"])
    assert sorted(record_store.entries()) == ["0.0.heartbeat"]


def test_a_claim_is_taken_once(record_store: Bucket) -> None:
    assert RankAttempt(record_store, 0, 0, "h").claim()
    assert not RankAttempt(record_store, 0, 0, "h").claim()


def test_a_uri_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="uri"):
        Bucket.open("nonesuch://bucket/prefix")
