"""Where this machine keeps what must outlive a process."""

from __future__ import annotations

import os
from pathlib import Path

from atoll.core.errors import Permanent
from atoll.files.ownership import check_directory

ENDPOINT = "endpoint.json"  # where its control plane listens


def home() -> Path | None:
    """The user's home directory, by HOME or the system's list of users; None if neither has one."""
    if os.environ.get("HOME") == "":
        return None
    try:
        return Path.home().absolute()
    except RuntimeError:
        return None


def state_dir(override: Path | None = None) -> Path:
    """The directory that is given, else ATOLL_STATE_DIR, else the user's own of the platform.

    Raises Permanent if there is none, or others could give commands through it.
    """
    where = (override or _usual()).absolute()
    check_directory(where)
    return where


def _usual() -> Path:
    if override := os.environ.get("ATOLL_STATE_DIR"):
        return Path(override)
    base = os.environ.get("XDG_STATE_HOME")
    if base:
        return Path(base) / "atoll"
    if (user := home()) is None:
        raise Permanent("there is no home directory to keep state in: set ATOLL_STATE_DIR")
    return user / ".local" / "state" / "atoll"
