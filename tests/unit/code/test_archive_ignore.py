"""Patterns, against git itself where it is there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from atoll.code.archive import DEFAULTS, is_ignored, is_inside_ignored, read_rules

# Patterns, a path, whether it is left out.
CASES = [
    ("*.log", "a.log", True),
    ("*.log", "deep/er/a.log", True),
    ("/a.log", "deep/a.log", False),
    ("deep/*.log", "deep/a.log", True),
    ("deep/*.log", "x/deep/a.log", False),
    ("**/logs", "a/b/logs/x", True),
    ("logs/**", "logs/a/b", True),
    ("a/**/b", "a/b", True),
    ("a/**/b", "a/x/y/b", True),
    ("data/", "data/a", True),
    ("data/", "x/data/a", True),
    ("data/", "data", False),
    ("*.bin\n!keep.bin", "keep.bin", False),
    ("*.bin\n!keep.bin", "lose.bin", True),
    ("data/\n!data/keep", "data/keep", True),  # nothing comes back from a folder left out
    ("data/*\n!data/keep", "data/keep", False),
    ("file?.txt", "file1.txt", True),
    ("file?.txt", "file10.txt", False),
    ("file[0-9].txt", "file7.txt", True),
    ("file[!0-9].txt", "file7.txt", False),
    ("file[!0-9].txt", "filea.txt", True),
    ("\\#a", "#a", True),
    ("#a", "#a", False),
    ("\\!a", "!a", True),
    ("a\\ ", "a ", True),
    ("a   ", "a", True),
    ("*", "any/thing", True),
    ("foo*bar", "foo/bar", False),
    ("[", "[", False),
    ("a.c", "abc", False),
]


@pytest.mark.parametrize(("text", "path", "is_out"), CASES)
def test_what_a_pattern_leaves_out(text: str, path: str, is_out: bool) -> None:
    assert is_inside_ignored(path, [read_rules(text)]) is is_out


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_git_says_the_same(tmp_path: Path) -> None:
    for number, (text, path, is_out) in enumerate(CASES):
        root = tmp_path / str(number)
        file = root / path
        file.parent.mkdir(parents=True)
        file.write_text("")
        subprocess.run(["git", "init", "-q", root], check=True)
        (root / ".git/info").mkdir(exist_ok=True)
        (root / ".git/info/exclude").write_text(text + "\n")
        command = ["git", "-C", root, "ls-files", "-zo", "--exclude-standard"]
        said = subprocess.run(command, capture_output=True, check=True).stdout.decode()
        assert (path not in said.split("\0")) is is_out, (text, path)


def test_a_file_of_patterns_is_for_its_own_folder_and_the_deepest_one_decides() -> None:
    files = [read_rules("*.bin\n/top"), read_rules("!*.bin\n/own", "sub/")]
    assert is_ignored("a.bin", files)
    assert not is_ignored("sub/a.bin", files)
    assert is_ignored("sub/own", files)
    assert not is_ignored("sub/top", files)
    assert not is_ignored("own", files)


def test_what_tools_make_and_secrets_are_left_out_by_default() -> None:
    usual = [read_rules(DEFAULTS)]
    for path in ("x/__pycache__/a.cpython-311.pyc", ".venv/bin/python", ".git/HEAD", ".env"):
        assert is_inside_ignored(path, usual), path
    for path in ("train.py", "src/model.py", "conf/a.env.yaml", "venv.py"):
        assert not is_inside_ignored(path, usual), path
