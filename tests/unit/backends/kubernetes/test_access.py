"""Which cluster, and as whom: what is wrong with a configuration is said in one line."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from atoll.backends.kubernetes.client import Cluster
from atoll.backends.kubernetes.executor import KubernetesBackend
from atoll.core.errors import Denied, Permanent, Temporary
from atoll.core.executors import PlaneContext
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import RankStatus, Training

SERVER = {"server": "https://127.0.0.1:1"}


def config(cluster: dict[str, Any] | None = None, user: dict[str, Any] | None = None) -> str:
    return json.dumps(
        {
            "clusters": [{"name": "c", "cluster": SERVER | (cluster or {})}],
            "users": [{"name": "u", "user": user or {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
    )


def plugin(script: str, version: str = "v1") -> dict[str, Any]:
    asked = {"apiVersion": f"client.authentication.k8s.io/{version}", "command": "sh"}
    return {"exec": asked | {"args": ["-c", script]}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("hello: [", "while parsing"),
        ("", "not a kubeconfig"),
        ("[]", "not a kubeconfig"),
        ("a: b", "the file has no 'clusters'"),
        (config({"certificate-authority": "/nope/ca.crt"}), "/nope/ca.crt: no such file"),
        (config(user={"client-certificate": "/nope/c", "client-key": "/nope/k"}), "/nope/c"),
        (config(user={"auth-provider": {"name": "gcp"}}), "auth-provider"),
    ],
)
def test_a_bad_configuration_is_refused_in_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "config"
    path.write_text(text)
    with pytest.raises(Permanent) as refused:
        Cluster.connect(kubeconfig=str(path))
    assert str(refused.value).startswith("no usable Kubernetes configuration: ")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


async def _ask(path: Path) -> None:
    cluster = Cluster.connect(kubeconfig=str(path))
    try:
        await cluster.get("pods", "default", "x")
    finally:
        await cluster.close()


@pytest.mark.parametrize(
    ("user", "words"),
    [
        (plugin("echo log in first >&2; exit 1"), "log in first"),
        (plugin("echo log in first >&2; exit 1", "v1beta1"), "log in first"),
        ({"exec": plugin("")["exec"] | {"command": "no-such-plugin"}}, "no-such-plugin"),
        ({"tokenFile": "/nope/token"}, "/nope/token"),
    ],
)
def test_missing_credentials_are_told(tmp_path: Path, user: dict[str, Any], words: str) -> None:
    path = tmp_path / "config"
    path.write_text(config(user=user))
    with pytest.raises(Denied) as refused:
        asyncio.run(_ask(path))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_plugin_is_asked_in_its_own_version(tmp_path: Path) -> None:
    script = (
        f'echo "$KUBERNETES_EXEC_INFO" > {tmp_path}/asked; '
        """echo '{"status": {"token": "t"}}'"""
    )
    path = tmp_path / "config"
    path.write_text(config(user=plugin(script)))
    with pytest.raises(Temporary, match="did not answer"):  # it has come as far as the server
        asyncio.run(_ask(path))
    asked = json.loads((tmp_path / "asked").read_text())
    assert asked["apiVersion"] == "client.authentication.k8s.io/v1"


@pytest.mark.parametrize("has_context", [False, True])
def test_kubectl_enters_the_cluster_of_the_executor(tmp_path: Path, has_context: bool) -> None:
    """Which need not be the one that the caller's own configuration names."""
    (tmp_path / "config").write_text(config())
    options = {"kubeconfig": "config", "namespace": "team"} | (
        {"context": "x"} if has_context else {}
    )
    home = PlaneContext(tmp_path, "p", directory=tmp_path)
    spec = TrainingSpec(name="tiny", command=["true"], world_size=WorldSize(1, 2, 2))
    training = Training(namespace="team", uid="u", created_at=0.0, spec=spec)
    rank = RankStatus(rank=1, pod_name="tiny-1-abc")

    async def target() -> list[str]:
        backend = KubernetesBackend.configured("eu", options, home)
        try:
            return (await backend.exec_target(training, rank)).kubectl
        finally:
            await backend.close()

    flags = [f"--kubeconfig={tmp_path / 'config'}", *(["--context=x"] if has_context else [])]
    expected = [*flags, "-n", "team", "tiny-1-abc", "-c", "rank"]
    assert asyncio.run(target()) == expected
