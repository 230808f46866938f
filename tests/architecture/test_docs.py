"""The documents say what is: snippets run, links lead somewhere, tables are printed from code."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import atoll
from atoll.cli.main import app
from atoll.core.executors import KINDS, load
from atoll.core.phase import RULES, ConditionType, ExitReason, PhaseReason, diagram, table
from atoll.server.app import NATIVE
from atoll.server.gauges import METRIC_GAUGES, TRAINING_GAUGES

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], key=lambda page: page.as_posix()
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def anchors(page: Path) -> set[str]:
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M
    )
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower()) for text in headings}


def leads_somewhere(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    other = page.parent / name if name else page
    return other.exists() and (not anchor or anchor in anchors(other))


def test_links_lead_somewhere() -> None:
    astray = [
        (page.relative_to(ROOT).as_posix(), target)
        for page in PAGES
        for target in LINK.findall(page.read_text())
        if not target.startswith(("https://", "http://")) and not leads_somewhere(page, target)
    ]
    assert astray == []


def test_every_picture_is_on_a_page() -> None:
    pictures = {picture.name for picture in (ROOT / "docs" / "images").iterdir()}
    shown = {name for page in PAGES for name in re.findall(r"images/([\w.-]+)", page.read_text())}
    assert pictures == shown


def test_the_readme_is_short_enough_to_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


def test_the_phase_diagram_is_the_table() -> None:
    page = ROOT / "docs" / "concepts.md"
    assert blocks(page, "mermaid") == [diagram() + "\n"]
    for rule in RULES:
        assert f"`{rule.reason}`" in page.read_text()


@pytest.mark.parametrize("reasons", [PhaseReason, ExitReason])
def test_the_tables_of_ends_are_the_vocabulary(reasons: Any) -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    assert f"\n\n{table(reasons)}\n\n" in page, f"print(table({reasons.__name__}))"


def test_the_table_of_conditions_is_the_vocabulary() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text()
    assert f"\n\n{table(ConditionType, 'condition')}\n\n" in page


def test_every_reason_in_the_page_on_kubernetes_is_in_the_vocabulary() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    rows = page.partition("## What ends how")[2].partition("\n\nEvery one")[0].splitlines()
    named = {word for row in rows[3:] for word in re.findall(r"`([A-Z]\w+)`", row)}
    assert "OOMKilled" in named
    assert named <= {*ExitReason, *PhaseReason}


def test_every_readme_snippet_is_of_a_kind_that_is_tested() -> None:
    kinds = {kind for kind, _ in BLOCK.findall((ROOT / "README.md").read_text())}
    # `text` is output, compared below; `console` is set-up, which `make` does before the tests.
    assert kinds == {"python", "sh", "text", "console"}


def test_readme_python_runs_and_prints_what_it_says(atoll: Any) -> None:
    (snippet,) = blocks(ROOT / "README.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", snippet],
        cwd=atoll.cwd,
        env=atoll.env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == blocks(ROOT / "README.md", "text")[0]


def test_readme_commands_run_and_print_what_they_say(atoll: Any) -> None:
    (snippet,) = blocks(ROOT / "README.md", "sh")
    command = f'atoll() {{ "{sys.executable}" -m atoll.cli "$@"; }}\n{snippet}'
    done = subprocess.run(
        ["bash", "-c", command], cwd=atoll.cwd, env=atoll.env, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr  # that of the last one, which fails on purpose
    told = blocks(ROOT / "README.md", "text")[1].splitlines()
    printed = [line for line in told if line.startswith("[")]
    assert sorted(done.stdout.splitlines()) == sorted(printed)
    report = "\n".join(line for line in told if not line.startswith("["))
    name = re.search(r"sh-\w{5} failed", done.stderr)
    assert name is not None
    assert report.replace("sh-k3v9d failed", name[0]) in done.stderr


# Backends with a page of their own; all others have a section of one.
OPTION_PAGES = {"local": "configuration", "kubernetes": "kubernetes", "slurm": "slurm"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_of_a_backend_is_on_its_page(kind: str) -> None:
    page = (ROOT / "docs" / f"{OPTION_PAGES.get(kind, 'serverless')}.md").read_text()
    options: tuple[str, ...] = load(kind).options_type.__struct_fields__
    set_by_atoll = {"is_controlled", "report_key"}
    assert {each for each in options if not re.search(rf"\b{each}\b", page)} <= set_by_atoll


def test_every_error_that_programs_catch_is_exported_and_on_the_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    names = {name for name, home in atoll._HOME.items() if home == "core.errors"}
    assert {"Temporary", "Denied", "Permanent", "Gone"} <= names
    assert {name for name in names if f"`{name}" not in page} <= {"BackendError"}


def test_every_endpoint_is_on_the_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    missing = [
        f"{row.method} {row.path}"
        for row in NATIVE
        if not re.search(rf"{row.method} {re.escape(row.path)}[`?]", page) and not row.is_open
    ]
    assert missing == []


def test_every_gauge_of_a_training_is_on_the_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    names = {name for name, *_ in (*TRAINING_GAUGES, *METRIC_GAUGES)}
    assert {name for name in names if f"_{name}`" not in page} == set()


def flags_of(command: click.Command, path: tuple[str, ...]) -> Iterator[tuple[str, set[str]]]:
    """Every command by its words, with the flags that it takes."""
    flags = {flag for parameter in command.params for flag in parameter.opts}
    flags |= {flag for parameter in command.params for flag in parameter.secondary_opts}
    yield " ".join(path), flags | {"-h", "--help"}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from flags_of(below, (*path, name))


# `--rank` is what the page on trouble says that somebody may type by mistake.
MISTAKES = {("troubleshooting.md", "atoll run", "--rank")}


def test_every_long_flag_on_a_page_is_one_of_its_command() -> None:
    known = dict(flags_of(app, ("atoll",)))
    unknown = set()
    for page in PAGES:
        for text in re.findall(r"\batoll [a-z][^`\n|#;]*", page.read_text()):
            words = text.split(" -- ")[0].split("&&")[0].split()
            end = max(n for n in range(1, len(words) + 1) if " ".join(words[:n]) in known)
            for word in words[end:]:
                if word.endswith(".py"):
                    break  # what follows belongs to the script
                flag = re.match(r"--[a-z][a-z-]*", word)
                if flag and end > 1 and flag[0] not in known[" ".join(words[:end])]:
                    unknown.add((page.name, " ".join(words[:end]), flag[0]))
    assert unknown == MISTAKES
