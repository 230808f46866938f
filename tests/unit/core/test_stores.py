"""A plain path is a store, where it leads to the same place for everybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import ValidationError
from atoll.core.stores import missing_keys, own_keys_only, store_uri
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


@pytest.mark.parametrize("bad", ["run", "", 7, "a\0b", "file://run/a"])
def test_what_leads_nowhere_is_refused(bad: Any) -> None:
    with pytest.raises(ValidationError) as refused:
        store_uri("rendezvous_uri", bad)
    assert refused.value.field == "rendezvous_uri"


def test_a_training_takes_a_plain_path() -> None:
    spec = spec_of("t", {"command": ["true"], "rendezvous_uri": "/shared/run"})
    assert spec.rendezvous.uri == "file:///shared/run"


AWS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


@pytest.mark.parametrize(
    ("uri", "env", "missing"),
    [
        (None, {}, []),
        ("file:///x", {}, []),
        ("s3://b", {}, ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]),
        ("s3://b", {"AWS_ACCESS_KEY_ID": "a"}, ["AWS_SECRET_ACCESS_KEY"]),
        ("s3://b", {"AWS_REGION": "eu"}, ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"]),
        ("s3://b", AWS, []),
        ("s3://b", {"AWS_WEB_IDENTITY_TOKEN_FILE": "/t"}, []),
        ("gs://b", AWS, ["GOOGLE_APPLICATION_CREDENTIALS"]),
        ("az://b", {}, ["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"]),
        ("az://b", {"AZURE_STORAGE_ACCOUNT_NAME": "n"}, ["AZURE_STORAGE_ACCOUNT_KEY"]),
        ("az://b", {"AZURE_STORAGE_USE_EMULATOR": "1"}, []),
    ],
)
def test_keys_that_a_store_asks_for(
    uri: str | None, env: dict[str, str], missing: list[str]
) -> None:
    assert missing_keys(uri, env) == missing


def test_keys_of_two_accounts_are_not_mixed() -> None:
    inherited = {"AWS_SESSION_TOKEN": "old", "AWS_REGION": "us", "HOME": "/h", "GOOGLE_X": "1"}
    assert own_keys_only(inherited, AWS) == {"HOME": "/h", "GOOGLE_X": "1"}
    assert own_keys_only(inherited, {"AWS_REGION": "eu"}) == inherited
