"""What another user of this machine left in a shared directory is not obeyed, by root neither."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ATOLL, SOURCE, Shell

OTHER = 65534
as_other = ("setpriv", f"--reuid={OTHER}", f"--regid={OTHER}", "--clear-groups")

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def give(path: Path) -> None:
    os.chown(path, OTHER, OTHER, follow_symlinks=False)


def test_a_configuration_of_another_user_starts_nothing(lone_atoll: Shell) -> None:
    lone_atoll.cwd.chmod(0o1777)
    file = lone_atoll.cwd / "atoll.toml"
    file.write_text('[defaults]\nenv = { LD_PRELOAD = "/tmp/theirs.so" }\n')
    give(file)
    for words in (
        ("run", "--", "true"),
        ("run", "-d", "--", "true"),
        ("run", "--dry-run", "--", "true"),
    ):
        for named in ((), ("--config", "atoll.toml")):
            refused = lone_atoll(words[0], *named, *words[1:])
            assert refused.returncode == 1
            assert refused.stderr.startswith(f"atoll: error: {file} is not used: it belongs to nob")
            assert refused.stderr.count("\n") == 1
    assert not lone_atoll.state.exists()
    # What has nothing to do with the file works there, and obeys none of it.
    assert lone_atoll("ps").returncode == 0
    assert lone_atoll.json("executors").get("config") is None


@pytest.mark.parametrize("is_parent", [False, True])
def test_a_state_directory_of_another_user_is_refused_by_every_command(
    lone_atoll: Shell, is_parent: bool
) -> None:
    theirs = lone_atoll.cwd / "theirs"
    where = theirs / "state" if is_parent else theirs
    (where / "ranks").mkdir(parents=True)
    give(theirs)
    shell = Shell(where, lone_atoll.cwd)
    for words in (
        *(("ps",), ("run", "--", "true"), ("stop",), ("ui",)),
        *(("token", "create"), ("token", "create", "--state-dir", str(where))),
        ("serve", "--port", "0", "--state-dir", str(where)),
    ):
        refused = shell(*words)
        assert refused.returncode == 1, words
        assert f"{where} is not used: " in refused.stderr, words
        assert "belongs to nobody (uid 65534)" in refused.stderr, words
        assert refused.stderr.count("\n") == 1, words
    assert sorted(path.name for path in where.iterdir()) == ["ranks"]
    found = {each["what"]: each for each in shell.json("doctor", code=1)}
    assert "belongs to nobody" in found["check"]["message"]


def test_what_others_left_in_a_state_directory_that_was_open_is_refused(lone_atoll: Shell) -> None:
    planted = lone_atoll.state / "ranks" / ("0" * 32)
    planted.mkdir(parents=True)
    give(planted)
    lone_atoll.state.chmod(0o777)
    assert "others can write to it (mode 777)" in lone_atoll("ps").stderr
    lone_atoll.state.chmod(0o700)
    refused = lone_atoll("ps")
    assert refused.returncode == 1
    assert f"{planted} belongs to nobody" in refused.stderr
    planted.rmdir()
    assert lone_atoll("ps").returncode == 0


def test_another_user_is_refused_roots_directories_and_has_its_own(tmp_path: Path) -> None:
    """Not root, whose HOME is still root's."""
    env = {**os.environ, "HOME": "/root", "PYTHONPATH": SOURCE}
    for name in ("ATOLL_STATE_DIR", "ATOLL_CONFIG", "XDG_STATE_HOME", "XDG_CONFIG_HOME"):
        env.pop(name, None)
    command = [*as_other, *ATOLL, "ps"]
    if subprocess.run([*as_other, sys.executable, "-c", ""], cwd="/").returncode:
        pytest.skip("another user cannot run this Python")
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "Permission denied" in done.stderr
    assert done.stderr.count("\n") == 1


def test_what_a_control_plane_makes_is_private_whatever_the_umask(lone_atoll: Shell) -> None:
    program = "import os; m = os.umask(0); print(f'umask {m:o}')"
    before = os.umask(0)
    try:
        ran = lone_atoll(
            *("run", "-n", "2", "--rendezvous", "etcd-v2", "--mesh", "--name", "open"),
            *("--", sys.executable, "-c", program),
        )
        assert lone_atoll("ui", "--no-open").returncode == 0
        tokens = lone_atoll.cwd / "tokens"
        assert lone_atoll("token", "create", "--state-dir", str(tokens)).returncode == 0
    finally:
        os.umask(before)
    assert ran.returncode == 0, ran.stderr
    assert "[0] umask 0" in ran.stdout, "a rank keeps the umask of who started the control plane"
    others = stat.S_IRWXG | stat.S_IRWXO
    places = [lone_atoll.state, *lone_atoll.state.rglob("*")]
    places += [tokens, *tokens.rglob("*")]
    assert {lone_atoll.state / "ranks", tokens / "atoll.db"} <= set(places)
    assert [path for path in places if path.lstat().st_mode & others] == []
