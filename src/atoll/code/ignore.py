"""The patterns of `.gitignore` and `.atollignore` files, as git reads them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from pathspec import GitIgnoreSpec

# Left out where git does not say what belongs to a project: what tools make, and secrets.
DEFAULTS = """\
.git
.hg/
.svn/
__pycache__/
*.py[cod]
.venv/
venv/
node_modules/
.mypy_cache/
.pytest_cache/
.ruff_cache/
.hypothesis/
.ipynb_checkpoints/
.tox/
.nox/
*.egg-info/
.DS_Store
.env
.netrc
.ssh/
.aws/
.kube/
.gnupg/
"""


class RuleFile(NamedTuple):
    """The patterns of one file; `base` is its folder, `""` for the root, else with a `/` behind."""

    base: str
    patterns: GitIgnoreSpec

    def verdict(self, path: str, *, is_folder: bool) -> bool | None:
        """Whether the path is to be left out; None if no pattern fits it."""
        if not path.startswith(self.base):
            return None
        own = path[len(self.base) :] + ("/" if is_folder else "")
        return self.patterns.check_file(own).include


def read_rules(text: str, base: str = "") -> RuleFile:
    return RuleFile(base, GitIgnoreSpec.from_lines(_valid(text.splitlines())))


def is_ignored(path: str, files: Iterable[RuleFile], *, is_folder: bool = False) -> bool:
    """Whether a path is left out by files of which the last has the last word."""
    verdict = None
    for file in files:
        own = file.verdict(path, is_folder=is_folder)
        verdict = verdict if own is None else own
    return bool(verdict)


def is_inside_ignored(path: str, files: Iterable[RuleFile]) -> bool:
    """Whether a file or one of the folders that it is in is left out."""
    files = list(files)
    parts = path.split("/")
    folders = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
    return is_ignored(path, files) or any(is_ignored(f, files, is_folder=True) for f in folders)


def _valid(lines: Iterable[str]) -> Iterator[str]:
    """The lines without those that are no pattern: git passes over them, pathspec raises."""
    for line in lines:
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:
            continue
        yield line
