"""The patterns of `.gitignore` and `.atollignore` files, as git reads them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

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


class IgnoreRule(NamedTuple):
    """One line of a file of patterns. The last rule that fits a path decides."""

    fits: re.Pattern[str]  # a path from the folder of the file on
    is_kept: bool  # it began with `!`
    is_for_folders: bool


class RuleFile(NamedTuple):
    """The rules of one file; `base` is its folder, `""` for the root, else with a `/` behind."""

    base: str
    rules: tuple[IgnoreRule, ...]

    def verdict(self, path: str, *, is_folder: bool) -> bool | None:
        """Whether the path is to be left out; None if no rule fits it."""
        if not path.startswith(self.base):
            return None
        own = path[len(self.base) :]
        for rule in reversed(self.rules):
            if (is_folder or not rule.is_for_folders) and rule.fits.fullmatch(own):
                return not rule.is_kept
        return None


def read_rules(text: str, base: str = "") -> RuleFile:
    rules = (_rule(line) for line in text.splitlines())
    return RuleFile(base, tuple(rule for rule in rules if rule is not None))


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


def _rule(line: str) -> IgnoreRule | None:
    line = re.sub(r"(?<!\\)[ \t]+$", "", line.rstrip("\r"))
    if not line or line.startswith("#"):
        return None
    is_kept = line.startswith("!")
    pattern = line[1:] if is_kept else line
    is_for_folders = pattern.endswith("/")
    pattern = pattern.rstrip("/") if is_for_folders else pattern
    if not pattern:
        return None
    is_anchored = "/" in pattern
    body = _regex(pattern.removeprefix("/"))
    head = "" if is_anchored else "(?:.*/)?"
    try:
        return IgnoreRule(re.compile(head + body, re.DOTALL), is_kept, is_for_folders)
    except re.error:  # it fits nothing, as in git
        return None


def _regex(pattern: str) -> str:
    made, at = "", 0
    while at < len(pattern):
        rest = pattern[at:]
        if rest.startswith("**/") and (at == 0 or pattern[at - 1] == "/"):
            made, at = made + "(?:.*/)?", at + 3
        elif rest == "**" and (at == 0 or pattern[at - 1] == "/"):
            made, at = made + ".*", at + 2
        elif rest[0] == "*":
            made, at = made + "[^/]*", at + len(rest) - len(rest.lstrip("*"))
        elif rest[0] == "?":
            made, at = made + "[^/]", at + 1
        elif rest[0] == "[" and (end := rest.find("]", 3 if rest[1:2] in ("!", "^") else 2)) > 0:
            inside = rest[1:end]
            negation = "^" if inside[0] in "!^" else ""
            inside = inside[1:] if negation else inside
            made += f"(?!/)[{negation}{_class(inside)}]"
            at += end + 1
        elif rest[0] == "[":
            return "(?!)"  # a class without an end fits nothing
        elif rest[0] == "\\" and len(rest) > 1:
            made, at = made + re.escape(rest[1]), at + 2
        else:
            made, at = made + re.escape(rest[0]), at + 1
    return made


def _class(inside: str) -> str:
    """The inside of a class, in which `[:digit:]` and the like are not supported."""
    return re.sub(r"[\[\]^&|~]|\\(?!.)", lambda mark: "\\" + mark[0], inside)
