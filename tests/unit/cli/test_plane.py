"""`atoll token` on both homes: this machine's control plane, and an operator on a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from atoll.backends.kubernetes.client import Cluster
from atoll.cli.plane import token
from atoll.core.errors import Denied, NotFound, ValidationError
from tests.contract.test_tokens import SecretsInMemory


class SmallCluster(SecretsInMemory):
    """Secrets, and the namespaces that exist."""

    namespace = "home"

    async def get(self, kind: str, namespace: str | None, name: str) -> dict[str, Any]:
        if kind != "namespaces":
            return await super().get(kind, namespace or "", name)
        if name == "secret":
            raise Denied("forbidden")
        if name not in ("team-a", "home"):
            raise NotFound(kind, name)
        return {}

    async def close(self) -> None:
        pass


@pytest.fixture(params=["machine", "cluster"])
def home(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    cluster = SmallCluster()
    monkeypatch.setattr(Cluster, "connect", lambda: cluster)
    if request.param == "cluster":
        return ["--home", "home"]
    return ["--state-dir", str(tmp_path)]


def run(*words: str) -> str:
    done = CliRunner().invoke(token, words, catch_exceptions=False, standalone_mode=False)
    return done.stdout


def test_tokens_are_created_listed_and_revoked(home: list[str]) -> None:
    options = ["--namespace", "team-a", "--label", "alice", "--json", *home]
    made = json.loads(run("create", *options))
    assert made["token"].startswith("atoll_")
    (listed,) = json.loads(run("list", "--json", *home))
    assert (listed["id"], listed["namespace"], listed["label"]) == (made["id"], "team-a", "alice")
    assert made["token"] not in run("list", *home)
    assert run("revoke", made["id"], *home) == f"{made['id']}: removed\n"
    assert json.loads(run("list", "--json", *home)) == []
    with pytest.raises(NotFound):
        run("revoke", made["id"], *home)


@pytest.mark.parametrize("home", ["cluster"], indirect=True)
def test_on_a_cluster_a_token_is_for_a_namespace_that_exists(home: list[str]) -> None:
    with pytest.raises(ValidationError, match="kubectl create namespace team-b") as refused:
        run("create", "--namespace", "team-b", *home)
    assert refused.value.field == "namespace"
    assert json.loads(run("list", "--json", *home)) == []
    run("create", "--namespace", "secret", *home)  # who may not ask is believed
