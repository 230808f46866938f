"""Hooks of mkdocs: the pages that are made from code, and links that leave docs/."""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from tools.diagram import drawn
from tools.reference import reference

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<=\]\()([^)\s#]+)")
SHIM = "https://unpkg.com/iframe-worker/shim"
# What pages link to outside of docs/, as a page of its own; the README is the first page.
BESIDE = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples")


def on_files(files: Files, config: Any) -> Files:
    for name, text in _made().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Search works from disk with a script that the theme would fetch."""
    return output.replace(SHIM, f"{'../' * page.url.count('/')}assets/iframe-worker.js")


def on_post_template(output_content: str, template_name: str, config: Any) -> str:
    return output_content.replace(SHIM, "assets/iframe-worker.js")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files of the repository lead to their pages, and to decisions to their list;
    diagrams are drawn."""
    source = page.file.src_uri
    home = "" if source in _MOVED else posixpath.dirname(source)

    def aim(match: re.Match[str]) -> str:
        target = match[1]
        if "://" in target:
            return target
        base = "." if source in _MOVED else f"docs/{home}"
        place = posixpath.normpath(posixpath.join(base, target))
        wanted = _place_in_site(place)
        return target if wanted is None else posixpath.relpath(wanted, posixpath.dirname(source))

    return LINK.sub(aim, drawn(markdown))


def _place_in_site(place: str) -> str | None:
    """Where the site has a file of the repository."""
    for name, original in _MOVED.items():
        if place == original or (original == "examples" and place.startswith("examples")):
            return name
    if place == "docs/decisions":
        return "decisions/README.md"
    return place.removeprefix("docs/") if place.startswith("docs/") else None


_MOVED = {f"{Path(name).stem.lower()}.md": name for name in BESIDE if (ROOT / name).exists()}
_MOVED["index.md"] = _MOVED.pop("readme.md")


def _made() -> dict[str, str]:
    pages = {
        "cli.md": _manual(),
        "reference.md": reference(),
        "decisions/README.md": _decisions(),
    }
    for name, original in _MOVED.items():
        if original == "examples":
            pages[name] = _examples()
        else:
            pages[name] = (ROOT / original).read_text()
    return pages


def _manual() -> str:
    """Printed by the package's own environment: that of the site lacks what the command imports."""
    words = [ROOT / ".venv" / "bin" / "python", "-m", "tools.manual"]
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _decisions() -> str:
    paths = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
    titles = [path.read_text().partition("\n")[0].removeprefix("# ") for path in paths]
    rows = [f"- [{t}]({path.name})" for t, path in zip(titles, paths, strict=True)]
    return "\n".join(["# Decisions", "", "Why it is built as it is.", "", *rows, ""])


def _examples() -> str:
    parts = ["# Examples\n\nPrograms to run and change, in `examples/`.\n"]
    for path in sorted((ROOT / "examples").glob("*.py")):
        parts.append(f"## {path.name}\n\n```python\n{path.read_text()}```\n")
    return "\n".join(parts)
