"""`make` installs versions that passed: every requirement of its environments has one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from tools.lock import ENVIRONMENTS, LOCKS, NOT_LOCKED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MORE = {
    "dev": "",
    "integrations": (ROOT / "tests/integrations/requirements.txt").read_text(),
    "docs": (ROOT / "tools/requirements-docs.txt").read_text(),
}
EXTRAS = {"dev": ["dev"], "integrations": ["store"], "docs": None}


def locked(name: str) -> dict[str, Version]:
    lines = (LOCKS / f"{name}.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(package): Version(version) for package, version in pairs}


def asked(name: str) -> list[Requirement]:
    """What the environment is made of, with the extras of atoll."""
    extras, done = EXTRAS[name], set[str]()
    rows = [] if extras is None else list(PROJECT["dependencies"])
    todo = list(extras or ())
    while todo:
        extra = todo.pop()
        if extra not in done:
            done.add(extra)
            for row in PROJECT["optional-dependencies"][extra]:
                own = re.fullmatch(r"atoll\[(.+)\]", row)
                todo += own[1].split(",") if own else []
                rows += [] if own else [row]
    rows += [line for line in MORE[name].splitlines() if line and line[0] != "#"]
    return [Requirement(row) for row in rows]


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_requirement_is_locked_within_its_range(name: str) -> None:
    versions = locked(name)
    wanted = [each for each in asked(name) if each.name != "torch"]
    assert len(wanted) >= 4
    for each in wanted:
        assert each.specifier.contains(versions[canonicalize_name(each.name)]), each


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_torch_is_left_to_the_makefile(name: str) -> None:
    assert not [package for package in locked(name) if NOT_LOCKED.match(f"{package}==")]


def test_make_uses_the_locks() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert makefile.count("pip install") == 1  # in the definition of `install`
    assert "PIP_CONSTRAINT=$(LOCK)/$(1).txt" in makefile
    used = set(re.findall(r"^\t\$\(call install,(\w+),(\S+)\) ", makefile, re.M))
    assert used == set(ENVIRONMENTS.items())
