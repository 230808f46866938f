"""A control group for the processes of one shim, where this user may make one (cgroup v2).

Whatever a rank starts stays in the group of its supervisor, though it clears its environment,
leaves its session, and outlives every process of atoll. Each shim has a group of its own, for the
guard of a killed shim ends all that is in its group: the ranks of the next shim are not there.
Nothing is limited by it.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

FILE = "cgroup"  # in the gang's directory: where the group of its newest shim is


def group_for(directory: Path, shim: str, root: Path = Path("/")) -> str:
    """The folder of the group that a shim would have; empty where this process may make none."""
    own = _own_group(root)
    if own is None or not os.access(own, os.W_OK | os.X_OK):
        return ""
    return str(own / f"atoll-{directory.name}.{shim}")


def enter(directory: Path, folder: str) -> None:
    """Puts this process, and with it all that it will start, into the group."""
    if not folder:
        return
    with contextlib.suppress(OSError):  # ranks run without one
        os.makedirs(folder, mode=0o755, exist_ok=True)
        (directory / FILE).write_text(folder)
        Path(folder, "cgroup.procs").write_text("0")


def members(directory: Path) -> set[int]:
    """Processes in the group of an earlier supervisor or of this one, without this process."""
    pids: set[int] = set()
    with contextlib.suppress(OSError, ValueError):
        pids = set(map(int, (_group_of(directory) / "cgroup.procs").read_text().split()))
    return pids - {os.getpid()}


def remove(directory: Path) -> None:
    """Removes the group, if nothing is left in it."""
    with contextlib.suppress(OSError, ValueError):
        _group_of(directory).rmdir()


def _group_of(directory: Path) -> Path:
    """The folder that the gang's file names. Raises OSError if there is no file, and ValueError
    for one that is damaged or names the group of others."""
    folder = Path((directory / FILE).read_text())
    own = f"atoll-{directory.name}"
    if folder.name != own and not folder.name.startswith(f"{own}."):
        raise ValueError(f"{directory / FILE} names {folder}, which is no group of this gang")
    return folder


def _own_group(root: Path) -> Path | None:
    """The folder of the group that this process is in."""
    try:
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    tops = [line.split()[4] for line in mounts if " - cgroup2 " in line]
    paths = [line[3:] for line in groups if line.startswith("0::")]
    if not tops or not paths or "/.." in paths[0]:
        return None
    return root / tops[0].lstrip("/") / paths[0].lstrip("/")
