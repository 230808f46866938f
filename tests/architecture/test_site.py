"""The site, the reference and the texts for agents are made from what is there."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from tools.agents import llms, skill
from tools.diagram import drawn
from tools.figures import FIGURE, PICTURES, TABLE, filled, pages
from tools.reference import public_names

from atoll.core.phase import EDGES, Phase

DOCS = Path(__file__).parents[2] / "docs"
LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]*)?\)")
SVG = re.compile(r"<svg.*?</svg>")
# Files of results by the tables that are made of them.
SOURCES = {name: {name} for name in ("mesh", "quality", "speeds", "outer", "codecs")}
SOURCES |= {
    "variants": {"quality"},
    "muon": {"quality"},
    "links": {"netbench"},
    "looks": {"local_look", "kubernetes", "look"},
}
MADE = {"index.md", "cli.md", "reference.md", "examples.md", "contributing.md", "changelog.md"}
MADE |= {"security.md", "decisions/README.md"}


def pages_in(nav: object) -> set[str]:
    if isinstance(nav, str):
        return {nav}
    items = nav if isinstance(nav, list) else nav.values()  # type: ignore[attr-defined]
    return set().union(*map(pages_in, items))


def test_every_page_is_in_the_navigation() -> None:
    written = {page.name for page in DOCS.glob("*.md")}
    nav = yaml.safe_load((DOCS.parent / "mkdocs.yml").read_text())["nav"]
    assert pages_in(nav) == written | MADE


def test_the_readme_links_every_page() -> None:
    linked = set(LINK.findall((DOCS.parent / "README.md").read_text()))
    assert {f"docs/{page.name}" for page in DOCS.glob("*.md")} - linked == set()


def test_figures_are_those_of_the_results() -> None:
    """Results of this machine, from `make bench`, are nobody's promise until they are committed."""
    texts = {page.name: page.read_text() for page in pages()}
    old = [name for name, text in texts.items() if filled(text) != text]
    if old and is_measured_here():
        pytest.skip("bench/results differ from those committed; python -m tools.figures takes them")
    assert old == [], "run: python -m tools.figures"
    assert all(file.read_text() == draw() for file, draw in PICTURES.items())


def is_measured_here() -> bool:
    """Whether the results have changed since the last commit. Without git they have not."""
    words = ["git", "diff", "--quiet", "HEAD", "--", "bench/results"]
    return subprocess.run(words, cwd=DOCS.parent, stderr=subprocess.DEVNULL).returncode == 1


def test_readme_has_figures_from_results() -> None:
    assert len(FIGURE.findall((DOCS.parent / "README.md").read_text())) >= 10


def test_figures_of_a_bench_are_filled_in() -> None:
    """A page that names a bench has figures of its results, each within a mark."""
    for page in pages():
        text = page.read_text()
        marked = {match["place"].partition("/")[0] for match in FIGURE.finditer(text)}
        marked = marked.union(*(SOURCES[match["name"]] for match in TABLE.finditer(text)))
        marked |= set(re.findall(r"bench/results/(\w+)\.json", text))  # named, not copied
        named = {(page.name, name) for name in re.findall(r"bench/(\w+)\.py", text)}
        assert {one for one in named if one[1] not in marked} == set()
        for line in text.splitlines():  # Markdown takes such a line for HTML, and shows it raw
            assert not line.lstrip(" ").startswith("<!--="), (page.name, line)


def test_every_public_name_is_described() -> None:
    silent = []
    for name, place in public_names().items():
        module, _, attribute = place.rpartition(".")
        if not inspect.getdoc(getattr(importlib.import_module(module), attribute)):
            silent.append(name)
    assert silent == []


def test_the_diagram_of_phases_is_drawn() -> None:
    page = drawn((DOCS / "concepts.md").read_text())
    assert "mermaid" not in page
    picture = ElementTree.fromstring(SVG.findall(page)[0])
    arrows = {path.get("aria-label") for path in picture.iter("path")} - {None}
    assert not list(picture.iter("title")), "parsers of HTML take it for that of the page"
    assert arrows == {f"{a or '[*]'} to {b}" for a, ends in EDGES.items() for b in ends}
    boxes = [text.text for text in picture.iter("text")]
    assert sorted(filter(None, boxes)) == sorted(set(Phase) - {Phase.NONE})


def test_every_diagram_can_be_drawn() -> None:
    for page in DOCS.rglob("*.md"):
        assert "mermaid" not in re.findall(r"^```(\w+)", drawn(page.read_text()), re.M)
    with pytest.raises(ValueError, match="state diagram"):
        drawn("```mermaid\ngraph LR\n  a --> b\n```\n")


def test_agents_find_every_page() -> None:
    for page in DOCS.glob("*.md"):
        assert f"docs/{page.name}" in llms()
    head, _, text = skill().removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(head)["name"] == "atoll"
    assert "atoll run -n 4 hello.py" in text
