"""What a release needs is there: one version, an open entry in the changelog, hooks that exist."""

from __future__ import annotations

import datetime
from pathlib import Path

import yaml
from tools.release import dated, main, troubles, versions

import atoll

ROOT = Path(__file__).parents[2]


def test_there_is_one_version() -> None:
    assert set(versions().values()) == {atoll.__version__}
    assert len(versions()) == 2


def test_a_release_is_refused_in_words(capsys: object) -> None:
    said = " ".join(troubles("one"))
    assert "'one' is no version" in said
    assert "CHANGELOG.md has no '## one, not yet released'" in said
    assert main([]) == 2
    assert main(["9.9.9", "--check"]) == 1


def test_the_changelog_gets_its_date() -> None:
    text = "# Changes\n\n## 0.3.0, not yet released\n\n- a\n"
    day = datetime.date(2026, 1, 2)
    assert dated(text, "0.3.0", day) == "# Changes\n\n## 0.3.0, 2026-01-02\n\n- a\n"


def test_hooks_before_a_commit_run_what_make_check_runs() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = " ".join(hook["entry"] for hook in repo["hooks"])
    for line in (ROOT / "Makefile").read_text().partition("\ncheck:")[2].splitlines()[1:7]:
        assert line.split()[0] in entries, line
