"""The site, the reference and the texts for agents are made from what is there."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml
from tools.agents import llms, skill
from tools.figures import FIGURE, filled, pages
from tools.reference import public_names

DOCS = Path(__file__).parents[2] / "docs"
LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]*)?\)")
MADE = {"reference.md", "examples.md", "contributing.md", "changelog.md", "decisions/README.md"}


def pages_in(nav: object) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    items = nav if isinstance(nav, list) else nav.values()  # type: ignore[attr-defined]
    return set().union(*map(pages_in, items))


def test_every_page_is_in_the_navigation() -> None:
    written = {page.name for page in DOCS.glob("*.md")}
    nav = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())["nav"]
    assert pages_in(nav) == written | MADE


def test_every_page_is_reached_from_the_index() -> None:
    reached, todo = set(), ["index.md"]
    while todo:
        page = todo.pop()
        if page not in reached and (DOCS / page).exists():
            reached.add(page)
            todo += LINK.findall((DOCS / page).read_text())
    assert reached >= {page.name for page in DOCS.glob("*.md")}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_figures_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert filled(text) == text, "run: python -m tools.figures"


def test_readme_has_figures_from_results() -> None:
    assert len(FIGURE.findall((DOCS.parent / "README.md").read_text())) >= 10


@pytest.mark.parametrize("name", sorted(public_names().items()), ids=lambda name: name[0])
def test_every_public_name_is_described(name: tuple[str, str]) -> None:
    module, _, attribute = name[1].rpartition(".")
    assert inspect.getdoc(getattr(importlib.import_module(module), attribute))


def test_agents_find_every_page() -> None:
    for page in DOCS.glob("*.md"):
        assert page.name == "index.md" or f"docs/{page.name}" in llms()
    head, _, text = skill().removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(head)["name"] == "atoll"
    assert "atoll run -n 4 hello.py" in text
