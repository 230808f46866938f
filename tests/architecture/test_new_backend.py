"""`python -m tools.new_backend` writes a backend that is checked, typed and tested at once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tools import new_backend

ROOT = Path(__file__).parents[2]
NAME, LABEL = "acme", "A" * new_backend.MAX_LABEL

WRITTEN = [
    path.format(name=NAME)
    for path in (*new_backend.FILES, *new_backend.ROWS)
    if path.endswith((".py", ".pyi"))
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the new backend in it."""
    root = tmp_path_factory.mktemp("copy")
    for folder in ("src", "tools", "tests"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, root / folder, ignore=ignored, symlinks=True)
    shutil.copy(ROOT / "pyproject.toml", root)
    words = [NAME, "--cls", "Acme", "--label", LABEL, "--package", ""]
    done = run(root, "-m", "tools.new_backend", *words)
    assert done.returncode == 0, done.stderr
    return root


def run(root: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=280)


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "ruff", "check", *WRITTEN],
        ["-m", "ruff", "format", "--check", *WRITTEN],
        ["-c", "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"],
        ["-m", "mypy", "-m", f"atoll.backends.{NAME}.executor", "-m", f"atoll.replicas.{NAME}"],
        ["-m", "pytest", "-q", f"tests/unit/backends/{NAME}", f"tests/conformance/test_{NAME}.py"],
        ["-m", "pytest", "-q", "tests/architecture/test_dependencies.py"],
    ],
    ids=["ruff", "format", "imports", "types", "golden and table", "extras"],
)
def test_what_is_written_passes(copy: Path, words: list[str]) -> None:
    done = run(copy, *words)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_kind_the_class_and_the_extra_are_known(copy: Path) -> None:
    code = (
        "import atoll; from atoll.core.executors import EXTRAS, load; "
        f"print(load({NAME!r}).name, atoll.AcmeExecutor.backend_name, EXTRAS[{NAME!r}]); "
        "atoll.AcmeExecutor('train:1', store='s3://bucket/runs')"
    )
    done = run(copy, "-c", code)
    assert (done.returncode, done.stdout.split()) == (0, [NAME] * 3), done.stderr


def test_what_is_there_is_not_written_over(copy: Path) -> None:
    before = (copy / "pyproject.toml").read_text()
    again = run(copy, "-m", "tools.new_backend", NAME)
    assert again.returncode == 2
    assert "is there already: nothing was written" in again.stderr
    assert (copy / "pyproject.toml").read_text() == before


@pytest.mark.parametrize("words", [["Acme"], ["a-b"], ["acme", "--label", LABEL + "A"]])
def test_bad_names_are_refused(words: list[str]) -> None:
    done = run(ROOT, "-m", "tools.new_backend", *words)
    assert done.returncode == 2
    assert "expected" in done.stderr
