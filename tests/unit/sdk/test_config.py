"""Which `atoll.toml` counts, and that what the caller says wins over it."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import Permanent, ValidationError
from atoll.core.spec import WorldSize
from atoll.sdk import config


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory; the user's own configuration is in `user/atoll/atoll.toml`."""
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "user" / "atoll").mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    monkeypatch.delenv("ATOLL_CONFIG", raising=False)
    return work


def test_the_nearest_file_counts(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.find() is None
    users = here.parent / "user" / "atoll" / "atoll.toml"
    users.touch()
    assert config.find() == users
    (here / "atoll.toml").touch()
    assert config.find() == here / "atoll.toml"
    monkeypatch.setenv("ATOLL_CONFIG", "other.toml")
    assert config.find() == here / "other.toml"


def test_a_control_plane_obeys_no_file_of_a_working_directory(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "atoll.toml").write_text("[executors.local]\nslots = 1\n")
    assert config.read_for_plane().path is None
    users = here.parent / "user" / "atoll" / "atoll.toml"
    users.write_text("[executors.local]\nslots = 2\n")
    assert config.read_for_plane().executors["local"].options == {"slots": 2}
    monkeypatch.setenv("ATOLL_CONFIG", "atoll.toml")
    assert config.read_for_plane().executors["local"].options == {"slots": 1}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[executors.local]\nslots = 1\n", "executors: ['local']"),
        ("[executors.eu]\nkind = 'kubernetes'\n", "executors: ['eu']"),
        ("[[rounds.stores]]\nuri = 's3://b/r'\n", "rounds.stores: ['s3://b/r']"),
    ],
)
def test_what_the_control_plane_would_not_read_is_refused(
    here: Path, text: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "atoll.toml").write_text(text)
    with pytest.raises(ValidationError) as refused:
        config.with_defaults({})
    words = f"{here}/atoll.toml: {field} is not valid: expected [defaults] alone"
    assert str(refused.value).startswith(words)
    assert f"move this to {here.parent}/user/atoll/atoll.toml" in str(refused.value)
    monkeypatch.setenv("ATOLL_CONFIG", "atoll.toml")
    assert config.with_defaults({}) == {}


def test_a_default_executor_may_be_one_of_the_users_own_file(here: Path) -> None:
    (here / "atoll.toml").write_text("[defaults]\nexecutor = 'eu'\n")
    assert config.with_defaults({}) == {"executor": "eu"}
    (here.parent / "user" / "atoll" / "atoll.toml").write_text("[defaults]\nexecutor = 'eu'\n")
    with pytest.raises(ValidationError, match="defaults.executor: 'eu' is not valid: expected one"):
        config.read_for_plane()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("is_named", [False, True])
def test_a_file_of_another_user_is_refused(
    here: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    path = here / "atoll.toml"
    path.write_text("[defaults]\nmax_restarts = 1\n")
    os.chown(path, 65534, 65534)
    if is_named:
        monkeypatch.setenv("ATOLL_CONFIG", str(path))
    with pytest.raises(Permanent, match=r"atoll.toml is not used: it belongs to nobody \(uid 6553"):
        config.with_defaults({})


def test_a_named_file_that_is_not_there_is_refused(here: Path) -> None:
    with pytest.raises(Permanent, match=r"cannot read .*/work/other.toml: No such file"):
        config.read(Path("other.toml"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("max_restarts = -1", "defaults.max_restarts: -1 is not valid: expected a whole number"),
        ("max_restart = 1", "there is no such option: did you mean 'max_restarts'?"),
        ("command = ['true']", "defaults.command: ['true'] is not valid: expected none"),
        ("world_size = 0", "defaults.world_size.min: 0 is not valid"),
        ("world_size = { min = 1 }", "defaults.world_size.target: None is not valid"),
        ("world_size = { mix = 1 }", "defaults.world_size.mix: 1 is not valid"),
    ],
)
def test_defaults_are_checked_as_options_are(here: Path, line: str, words: str) -> None:
    (here / "atoll.toml").write_text(f"[defaults]\n{line}\n")
    with pytest.raises(ValidationError) as refused:
        config.with_defaults({})
    assert str(refused.value).startswith(f"{here}/atoll.toml: ")
    assert words in str(refused.value)


def test_what_the_caller_says_wins(here: Path) -> None:
    (here / "atoll.toml").write_text(
        """
        [defaults]
        max_restarts = 3
        image = "a"
        working_dir = "sub"
        env = { A = "1", B = "1" }
        world_size = { min = 1, target = 2, max = 3 }
        """
    )
    stated = {"max_restarts": 0, "image": None, "env": {"B": "2"}}
    assert config.with_defaults(stated) == {
        "max_restarts": 0,
        "image": "a",
        "working_dir": here / "sub",
        "env": {"A": "1", "B": "2"},
        "world_size": WorldSize(min=1, target=2, max=3),
    }


def test_without_a_file_nothing_is_added(here: Path) -> None:
    assert config.with_defaults({"image": "a", "cpu": None}) == {"image": "a"}


def test_a_file_that_is_edited_or_removed_has_changed(here: Path) -> None:
    path = here / "atoll.toml"
    path.write_text("[defaults]\n")
    known = config.read(path)
    assert not config.is_changed(known)
    path.write_text("[defaults]\ncpu = '1'\n")
    assert config.is_changed(known)
    path.unlink()
    assert config.is_changed(known)


def test_a_command_parses_each_file_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of its parts ask: the defaults, the code to send, the executors."""
    parsed: list[str] = []
    real = tomllib.loads

    def count(text: str) -> dict[str, Any]:
        parsed.append(text)
        return real(text)

    monkeypatch.setattr(tomllib, "loads", count)
    users = here.parent / "user" / "atoll" / "atoll.toml"
    users.write_text("[defaults]\nmax_restarts = 3\n")
    for _ in range(2):
        spec, _ = config.resolve_training("a", {"command": ["true"], "world_size": 1})
        assert (spec.max_restarts, config.read_for_plane().path) == (3, str(users))
    assert len(parsed) == 1
    users.write_text("[defaults]\nmax_restarts = 4\n")
    assert config.resolve_spec("a", {"command": ["true"], "world_size": 1}).max_restarts == 4
