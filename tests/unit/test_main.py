"""Executors as a control plane gets them: what cannot be used is named, and the rest goes on."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from atoll.backends.local.executor import LocalBackend
from atoll.core.config import parse
from atoll.core.errors import ValidationError
from atoll.main import configured
from atoll.sdk.config import read
from atoll.server.handlers.admission import probe_executors
from atoll.store.sqlite import MemoryStore

EU = '[executors.eu]\nkind = "kubernetes"\nkubeconfig = "kube.yaml"\n'
KUBECONFIG = """
clusters: [{name: x, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: x, user: {token: abc}}]
contexts: [{name: x, context: {cluster: x, user: x}}]
current-context: x
"""


def _unusable(directory: Path) -> str:
    """Why `eu` cannot be used, which must be what a reader of the list and a user are told."""
    executors, setup = configured(parse(EU, str(directory / "atoll.toml")), directory)
    assert list(executors) == ["local"]
    why = setup.unusable["eu"]
    assert "\n" not in why
    assert setup.refusal("eu", executors).startswith(f"{why}; once that is put right, stop it")
    listed = asyncio.run(probe_executors(executors, setup))
    assert {e.name: (e.kind, e.is_reachable, e.message) for e in listed.items} == {
        "eu": ("kubernetes", False, why),
        "local": ("local", True, ""),
    }
    return why


def test_a_kubeconfig_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/kube.yaml not found" in _unusable(tmp_path)


def test_a_kubeconfig_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "kube.yaml").write_text("- 1\n")
    assert "this is not a kubeconfig" in _unusable(tmp_path)


def test_packages_that_are_not_there_are_named_with_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("executor", "client"):  # as in a process that has not loaded them yet
        monkeypatch.delitem(sys.modules, f"atoll.backends.kubernetes.{module}", raising=False)
    for name in ("lightkube", *(name for name in sys.modules if name.startswith("lightkube."))):
        monkeypatch.setitem(sys.modules, name, None)
    why = _unusable(tmp_path)
    assert "the kind 'kubernetes' needs the package 'lightkube" in why
    assert "pip install '.[kubernetes]' in a clone" in why


def test_what_was_put_right_is_used_by_the_next_control_plane(tmp_path: Path) -> None:
    _unusable(tmp_path)
    (tmp_path / "kube.yaml").write_text(KUBECONFIG)
    executors, setup = configured(parse(EU, str(tmp_path / "atoll.toml")), tmp_path)
    assert sorted(executors) == ["eu", "local"]
    assert setup.unusable == {}


def test_ranks_of_an_unknown_training_are_told_to_readers_of_the_list(tmp_path: Path) -> None:
    (tmp_path / "atoll.toml").touch()
    executors, setup = configured(read(tmp_path / "atoll.toml"), tmp_path)
    logs = tmp_path / "ranks" / "abc" / "logs"
    logs.mkdir(parents=True)
    local = executors["local"]
    assert isinstance(local, LocalBackend)
    asyncio.run(local.start(MemoryStore()))
    listed = asyncio.run(probe_executors(executors, setup))
    assert listed.message.startswith(f"{logs.parent} is of a training that the store does not know")
    assert f"'touch {logs.parent}/removed'" in listed.message
    assert [each.is_reachable for each in listed.items] == [True]
    assert logs.exists()


def test_a_wrong_option_is_a_mistake_in_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match="atoll.toml: executors.eu.imag: 'x'"):
        configured(parse(EU + "imag = 'x'\n", "atoll.toml"), tmp_path)
