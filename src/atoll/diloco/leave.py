"""A replica that is told to go: by SIGTERM, a notice of its host, or its own program.

It uploads what it has trained since the last round, with its next step, marks itself as one that
has left, and ends when its program does, or with the step after.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from atoll.core.errors import ValidationError

log = logging.getLogger("atoll.diloco")

SIGNALS = "ATOLL_LEAVE_SIGNALS"  # names, such as "TERM USR1"
NOTICE = "ATOLL_SPOT_NOTICE"  # a file, or a URL, that is there once the host is to go
_POLL_S = 2.0


def read_signals() -> list[signal.Signals]:
    """Raises ValidationError for a name in the variable that is no signal, or that none catches."""
    names = os.environ.get(SIGNALS, "TERM").replace(",", " ").split()
    caught = {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}
    known = {each.name.removeprefix("SIG"): each for each in caught}
    for name in names:
        if name.removeprefix("SIG") not in known:
            raise ValidationError(SIGNALS, name, "expected names of signals, such as TERM USR1")
    return [known[name.removeprefix("SIG")] for name in names]


class LeaveRequest:
    """Whether this replica was told to go. A handler only sets flags: what was trained is uploaded
    between two steps, by the training thread.

    Handlers that the program has set are left alone: it calls `DiLoCo.leave()` in them.
    """

    def __init__(self, ask: Callable[[], None]) -> None:
        """`ask` is called at once, in a signal handler, too: it may only set flags."""
        self._ask, self._signals = ask, read_signals()
        self._has_stepped = False
        self.signal: int | None = None
        self.is_requested = False
        self._replaced: dict[signal.Signals, Any] = {}
        self._is_closed = threading.Event()

    def listen(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for each in self._signals:
            if signal.getsignal(each) is signal.SIG_DFL:
                self._replaced[each] = signal.signal(each, self._on_signal)
        where = os.environ.get(NOTICE)
        if where:
            threading.Thread(target=self._watch, args=(where,), daemon=True).start()

    def close(self) -> None:
        self._is_closed.set()
        if threading.current_thread() is threading.main_thread():
            for each, handler in self._replaced.items():
                # Bound methods are made anew each time, so they are compared, not identified.
                if signal.getsignal(each) == self._on_signal:
                    signal.signal(each, handler)
        self._replaced = {}

    def make(self) -> None:
        """The program, a signal or another process says that this replica is to leave."""
        if not self.is_requested:
            self.is_requested = True
            self._ask()

    def exit_soon(self) -> None:
        """A step after the replica has left. The program has seen the word after the first one.

        Raises SystemExit at the second.
        """
        if self._has_stepped:
            raise SystemExit(128 + (self.signal or signal.SIGTERM))
        self._has_stepped = True

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        # Not by logging: its lock may be held by the very code that was interrupted.
        os.write(2, f"asked to leave by {signal.Signals(number).name}\n".encode())
        self.make()

    def _watch(self, where: str) -> None:
        while not self._is_closed.wait(_POLL_S):
            if _is_there(where):
                log.warning("asked to leave by %s", where)
                os.kill(os.getpid(), signal.SIGTERM)
                return


def _is_there(where: str) -> bool:
    if not where.startswith(("http://", "https://")):
        return Path(where.removeprefix("file://")).exists()
    try:
        with urllib.request.urlopen(where, timeout=_POLL_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):  # not there yet, or nobody to ask
        return False
