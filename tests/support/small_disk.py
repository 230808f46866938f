"""A disk of a few megabytes for one test, which it may fill."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(path: Path, options: str) -> Iterator[None]:
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(path)],
        capture_output=True, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill(path: Path) -> None:
    """Not a byte is left."""
    file = os.open(path / "filler", os.O_WRONLY | os.O_CREAT)
    for size in (65536, 4096, 1):
        with contextlib.suppress(OSError):
            while True:
                os.write(file, b"\0" * size)
    os.close(file)
    assert shutil.disk_usage(path).free == 0
