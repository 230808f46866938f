"""`python -m tools.lock`: keeps the versions of the environments that passed, in tools/locks/.

`make` installs these versions, so that a release of somebody's package changes nothing here until
it was tried: `make clean`, `make LOCK= check test packages integrations docs` with the newest
versions that are allowed, then this. What users may install is in pyproject.toml, as ranges.
"""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "tools/locks"
ENVIRONMENTS = {"dev": ".venv", "integrations": ".venv-integrations", "docs": ".venv-docs"}
# `make` names the version of torch, and the rest comes with the build of it that a machine has.
NOT_LOCKED = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")


def lock(python: Path) -> str:
    """The text of a file of constraints: what is installed beside `python`."""
    freeze = [python, "-m", "pip", "freeze", "--exclude-editable", "--disable-pip-version-check"]
    lines = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout.splitlines()
    kept = [line for line in lines if "==" in line and not NOT_LOCKED.match(line)]
    return "\n".join([f"# Python {platform.python_version()}; see tools/lock.py", *kept, ""])


def main(names: list[str]) -> None:
    for name in names or ENVIRONMENTS:
        python = ROOT / ENVIRONMENTS[name] / "bin/python"
        if not python.exists():
            sys.exit(f"{ENVIRONMENTS[name]} is not there: make it first, or name those that are")
        (LOCKS / f"{name}.txt").write_text(lock(python))


if __name__ == "__main__":
    main(sys.argv[1:])
