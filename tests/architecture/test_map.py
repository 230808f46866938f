"""The map for newcomers names files and functions that exist."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"
HOP = re.compile(r"`((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)(?::([A-Za-z_0-9.]+))?`")


def hops() -> list[tuple[str, str]]:
    return sorted(set(HOP.findall(PAGE.read_text())))


def test_every_hop_exists() -> None:
    found = hops()
    assert len(found) > 50
    assert [hop for hop in found if not exists(*hop)] == []


def exists(file: str, name: str) -> bool:
    if not name and (ROOT / file).exists():
        return True  # a file of the tests
    if file in ("options.py", "render.py", "executor.py"):
        return (ROOT / "src/atoll/backends/kubernetes" / file).exists()
    if not (ROOT / "src/atoll" / file).exists():
        return False
    dotted = "atoll." + file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
    place: object = importlib.import_module(dotted)
    for part in name.split(".") if name else ():
        place = getattr(place, part, None)
    return place is not None


def test_the_map_names_every_package() -> None:
    page = PAGE.read_text()
    packages = {p.parent.name for p in (ROOT / "src/atoll").glob("*/__init__.py")}
    assert {name for name in packages if f"`{name}`" not in page} == set()


def test_the_glossary_is_short() -> None:
    rows = PAGE.read_text().partition("## Glossary")[2].partition("\n## ")[0].splitlines()[4:]
    words = [word for row in rows if row for word in row.split(" | ")[0].strip("| ").split(", ")]
    assert 30 < len(words) <= 40, words


def test_the_layers_are_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [each["layers"] for each in contracts["contracts"] if each["name"] == "layers"]
    assert "```text\n" + "\n".join(layers) + "\n```" in PAGE.read_text()
