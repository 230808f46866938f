"""`python -m tools.release 0.3.0`: a release from a clean tree. Nothing is pushed or uploaded.

The version goes to pyproject.toml and `atoll.__version__`, today's date to the changelog; wheel and
sdist are built into dist/, and the commit is tagged. `--check` only says what is in the way.
"""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = {
    "pyproject.toml": r'^version = "(.+)"$',
    "src/atoll/__init__.py": r'^__version__ = "(.+)"$',
}
OPEN = "not yet released"


def versions() -> dict[str, str]:
    """The version as each place has it."""
    found = {
        name: re.search(line, (ROOT / name).read_text(), re.M) for name, line in PLACES.items()
    }
    return {name: match[1] for name, match in found.items() if match}


def troubles(version: str) -> list[str]:
    """What is in the way of a release, a sentence each."""
    said = []
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        said.append(f"{version!r} is no version: expected one such as 0.3.0")
    if f"## {version}, {OPEN}" not in (ROOT / "CHANGELOG.md").read_text():
        said.append(f"CHANGELOG.md has no '## {version}, {OPEN}'")
    if len(set(versions().values())) != 1:
        said.append(f"the versions differ: {versions()}")
    if git("status", "--porcelain"):
        said.append("the tree is not clean: commit, or stash")
    if version in git("tag").split():
        said.append(f"the tag {version} exists")
    return said


def git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()


def dated(changes: str, version: str, day: datetime.date) -> str:
    return changes.replace(f"## {version}, {OPEN}", f"## {version}, {day.isoformat()}", 1)


def main(words: list[str]) -> int:
    is_check = "--check" in words
    names = [word for word in words if not word.startswith("-")]
    if len(names) != 1:
        sys.stderr.write("usage: python -m tools.release VERSION [--check]\n")
        return 2
    (version,) = names
    said = troubles(version)
    for each in said:
        sys.stderr.write(f"release: {each}\n")
    if said or is_check:
        return bool(said)
    for name, line in PLACES.items():
        path, pattern = ROOT / name, line.replace("(.+)", ".+")
        text = line.strip("^$").replace("(.+)", version)
        path.write_text(re.sub(pattern, text, path.read_text(), count=1, flags=re.M))
    changes = ROOT / "CHANGELOG.md"
    changes.write_text(dated(changes.read_text(), version, datetime.date.today()))
    subprocess.run([sys.executable, "-m", "build", "--outdir", ROOT / "dist", ROOT], check=True)
    git("commit", "-qam", f"Release {version}")
    git("tag", version)
    sys.stdout.write(f"dist/ has wheel and sdist of {version}; git push --tags publishes the tag\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
