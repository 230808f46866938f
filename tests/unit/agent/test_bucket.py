"""Records in an object store."""

from __future__ import annotations

from pathlib import Path

import pytest
from obstore.store import LocalStore, MemoryStore

from atoll.agent.bucket import Objects
from atoll.agent.wrapper import RankAttempt
from atoll.core.errors import ValidationError


@pytest.fixture(params=["memory", "folder"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Objects:
    store = MemoryStore() if request.param == "memory" else LocalStore(tmp_path)
    return Objects(store, request.param)


def test_a_name_is_created_once(place: Objects) -> None:
    assert place.create("a", b"1")
    assert place.create("a", b"1")  # the same request again, as after a lost answer
    assert not place.create("a", b"2")
    assert place.get("a") == b"1"


def test_put_get_list_and_delete(place: Objects) -> None:
    assert place.get("a") is None
    place.put("a", b"1")
    place.put("a", b"2")
    place.heartbeat("0.0.heartbeat")
    before = place.entries()
    assert sorted(before) == ["0.0.heartbeat", "a"]
    place.heartbeat("0.0.heartbeat")
    assert place.entries()["0.0.heartbeat"] > before["0.0.heartbeat"]
    place.delete(["a", "b"])
    assert sorted(place.entries()) == ["0.0.heartbeat"]


def test_a_claim_is_taken_once(place: Objects) -> None:
    assert RankAttempt(place, 0, 0, "h").claim()
    assert not RankAttempt(place, 0, 0, "h").claim()


def test_a_uri_that_is_none_is_refused() -> None:
    with pytest.raises(ValidationError, match="uri"):
        Objects.open("nonesuch://bucket/prefix")
