"""Where this machine keeps what must outlive a process."""

from __future__ import annotations

import os
from pathlib import Path

ENDPOINT = "endpoint.json"  # where its control plane listens


def state_dir() -> Path:
    """ATOLL_STATE_DIR, else the user's state directory of the platform."""
    given = os.environ.get("ATOLL_STATE_DIR")
    if given:
        return Path(given).absolute()
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "atoll"
