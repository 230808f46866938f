"""The clock of this machine, which goes on over restarts of the control plane."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

from atoll.core.clock import Clock, ClockMark
from atoll.core.errors import ValidationError
from atoll.core.model import decode, encode

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
KEEP_S = 300.0  # what a crash of the machine may leave uncounted


def machine_clock(path: Path | None = None) -> Clock:
    """Goes on from the mark in `path`, if there is one."""
    mark = None
    if path is not None:
        with contextlib.suppress(OSError, ValidationError):
            mark = decode(path.read_bytes(), ClockMark)
    # CLOCK_MONOTONIC: it stands still while the machine sleeps.
    return Clock(time.time, time.monotonic, boot=_boot(), mark=mark)


async def keep_mark(clock: Clock, path: Path) -> None:
    """Writes the mark from time to time, until cancelled."""
    while True:
        clock()
        write_mark(clock, path)
        await asyncio.sleep(KEEP_S)


def write_mark(clock: Clock, path: Path) -> None:
    """A full disk is no reason to stop: an older mark of this boot is as good."""
    draft = path.with_name(f"{path.name}.new")
    with contextlib.suppress(OSError):
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(encode(clock.mark))
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)


def _boot() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
