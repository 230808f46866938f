"""Keys of the store of a training: the caller's reach the ranks, or the training is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from atoll.core.errors import ValidationError
from atoll.core.spec import RendezvousSpec, TrainingSpec, WorldSize
from atoll.sdk import endpoint
from atoll.sdk.endpoint import Fixed, local_fields

KEYS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(endpoint, "VENDOR", tmp_path / "vendor")


def spec(uri: str | None, **env: str) -> TrainingSpec:
    size = WorldSize(min=1, target=1, max=1)
    rendezvous = RendezvousSpec(uri=uri)
    return TrainingSpec(name="x", world_size=size, command=["true"], rendezvous=rendezvous, env=env)


def test_the_callers_variables_go_with_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": "http://x", "GOOGLE_A": "1"}.items():
        monkeypatch.setenv(name, value)
    env = local_fields(spec("s3://bucket/run", AWS_ACCESS_KEY_ID="mine"))["env"]
    assert {name: env[name] for name in env if name.startswith(("AWS_", "GOOGLE_"))} == {
        "AWS_ACCESS_KEY_ID": "mine",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_ENDPOINT_URL": "http://x",
    }
    assert "AWS_ACCESS_KEY_ID" not in local_fields(spec("file:///tmp/x"))["env"]
    assert "AWS_ACCESS_KEY_ID" not in local_fields(spec(None))["env"]


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("s3://b/r", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY to be set"),
        ("gs://b/r", "GOOGLE_APPLICATION_CREDENTIALS to be set"),
        ("az://b/r", "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY to be set"),
    ],
)
def test_a_store_without_keys_is_refused_by_name(uri: str, told: str) -> None:
    with pytest.raises(ValidationError, match=told) as raised:
        local_fields(spec(uri))
    assert (raised.value.field, raised.value.value) == ("rendezvous_uri", uri)


def test_keys_that_only_a_tool_has_are_told_with_the_way_to_them(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").touch()
    with pytest.raises(ValidationError, match="aws configure export-credentials"):
        local_fields(spec("s3://b/r"))


def test_a_machine_with_keys_of_its_own_needs_none(tmp_path: Path) -> None:
    (tmp_path / "vendor").write_text("Amazon EC2\n")
    local_fields(spec("s3://b/r"))
    with pytest.raises(ValidationError):
        local_fields(spec("gs://b/r"))


def test_a_control_plane_of_somebody_else_may_have_keys() -> None:
    assert "env" in Fixed("http://127.0.0.1:1", None).local_fields(spec("s3://b/r"))
