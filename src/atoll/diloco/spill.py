"""Values that are hardly ever needed again, in a file without a name instead of in memory."""

from __future__ import annotations

import logging
import os
import tempfile
from typing import IO

import numpy as np

from atoll.diloco.outer import Floats

log = logging.getLogger("atoll.diloco")


class SpillFile:
    """Room for a row of `size` values in $TMPDIR, or in memory if that has no room."""

    def __init__(self, size: int) -> None:
        self._file: IO[bytes] | None = None
        self._row: Floats = np.empty(0, np.float32)
        try:
            self._file = tempfile.TemporaryFile(prefix="atoll-", buffering=0)
            os.posix_fallocate(self._file.fileno(), 0, max(1, 4 * size))  # a full disk shows now
        except OSError as error:
            log.info("a row is kept in memory: %s: %s", tempfile.gettempdir(), error)
            self.close()
            self._row = np.empty(size, np.float32)

    def __enter__(self) -> SpillFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def put(self, start: int, part: Floats) -> None:
        """The values from `start` on are those of `part`."""
        if self._file is None:
            self._row[start : start + part.size] = part
            return
        view, at = _bytes(part), 4 * start
        while view.nbytes:
            count = os.pwrite(self._file.fileno(), view, at)
            view, at = view[count:], at + count

    def get(self, start: int, part: Floats) -> None:
        """`part` holds the values from `start` on."""
        if self._file is None:
            part[:] = self._row[start : start + part.size]
            return
        view, at = _bytes(part), 4 * start
        while view.nbytes:
            count = os.preadv(self._file.fileno(), [view], at)
            if not count:
                raise OSError(f"a file in {tempfile.gettempdir()} was cut at {at} bytes")
            view, at = view[count:], at + count


def _bytes(values: Floats) -> memoryview:
    return memoryview(values).cast("B")  # type: ignore[arg-type]
