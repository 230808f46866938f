"""Installs a training's packages once per host, then executes the rank's command.

`python -m atoll.agent.install FOLDER PACKAGE… -- COMMAND…`. Ranks of one host share the folder:
the first one installs, the others wait for it. A failed install fails the rank, with the output
of pip in its log.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    at = arguments.index("--")
    folder, packages, command = Path(arguments[0]), arguments[1:at], arguments[at + 1 :]
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / ".installed"
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            code = _install(folder, packages)
            if code:
                sys.stderr.write(f"atoll: pip could not install {' '.join(packages)}\n")
                return code
            done.touch()
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{path}" if path else str(folder)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"atoll: {command[0]}: {error.strerror}\n")
        return 127 if isinstance(error, FileNotFoundError) else 126


def _install(folder: Path, packages: list[str]) -> int:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    return subprocess.run([*pip, "--target", str(folder), "--", *packages]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
