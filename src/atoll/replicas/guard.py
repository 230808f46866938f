"""Ends what a script launched on this machine once the script is gone, however it went.

One small process a script. Should it be killed along with the script, the next script that
launches anything clears up instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import atoll
from atoll.local import processes
from atoll.local.executor import LocalBackend

PREFIX = "atoll-replicas-"
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from atoll.replicas.guard import main; main(sys.argv[2])"
)


def new_root() -> Path:
    """A directory that says in its name whose it is."""
    pid = os.getpid()
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{pid}-{processes.born(pid)}-"))


def start_guard(root: Path) -> subprocess.Popen[bytes]:
    source = str(Path(atoll.__file__).parents[1])
    return subprocess.Popen(
        [sys.executable, "-c", _START, source, str(root)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is for the script
        cwd="/",
    )


def main(root: str) -> None:
    pid, born = owner_of(Path(root))
    with contextlib.suppress(ProcessLookupError):
        owner = os.pidfd_open(pid)
        if processes.is_running(pid, born):
            select.select([owner], [], [])
    clear(Path(root))


def clear(root: Path) -> None:
    """No process of the gangs under `root` is left, and nothing of their files.

    Two may try at once, a guard and the next script: one waits for the other.
    """
    try:
        held = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        asyncio.run(LocalBackend(root / "gangs").start(()))
        shutil.rmtree(root, ignore_errors=True)
    finally:
        os.close(held)


def clear_abandoned() -> None:
    """What a script left whose guard was killed too. Whatever thread or event loop calls."""
    for root in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*-*"):
        try:
            is_ours = root.stat().st_uid == os.geteuid() and not root.is_symlink()
            is_alive = processes.is_running(*owner_of(root))
        except (OSError, ValueError):
            continue
        if is_ours and not is_alive:
            thread = threading.Thread(target=clear, args=[root])
            thread.start()
            thread.join()


def owner_of(root: Path) -> tuple[int, int]:
    pid, born, _ = root.name.removeprefix(PREFIX).split("-", 2)
    return int(pid), int(born)
