"""A plain path is a store, where it leads to the same place for everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import ValidationError
from atoll.core.stores import store_uri
from atoll.sdk.options import spec_of


@pytest.mark.parametrize(
    ("value", "folder", "uri"),
    [
        (None, None, None),
        ("s3://bucket/run", None, "s3://bucket/run"),
        ("/shared/run 1", None, "file:///shared/run%201"),
        (Path("/shared/run"), None, "file:///shared/run"),
        ("/shared/run", "/here", "file:///shared/run"),
        ("run", "/here", "file:///here/run"),
    ],
)
def test_a_plain_path_is_a_store(value: Any, folder: str | None, uri: str | None) -> None:
    assert store_uri("rendezvous_uri", value, folder) == uri


@pytest.mark.parametrize("bad", ["run", "", 7, "a\0b"])
def test_what_leads_nowhere_is_refused(bad: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        store_uri("rendezvous_uri", bad)
    assert refused.value.field == "rendezvous_uri"


def test_a_training_takes_a_plain_path() -> None:
    spec = spec_of("t", {"command": ["true"], "rendezvous_uri": "/shared/run"})
    assert spec.rendezvous.uri == "file:///shared/run"
