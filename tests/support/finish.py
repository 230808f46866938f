"""The end of a process of which some lines were read before."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import IO


def finish(process: subprocess.Popen[str], timeout: float) -> tuple[str, str]:
    """What is left of its output and errors.

    `communicate` reads past the buffers of the two: what came together with a line that was read
    before is missing in its answer.
    """
    with ThreadPoolExecutor(2) as pool:
        out, errors = (pool.submit(_rest, file) for file in (process.stdout, process.stderr))
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return out.result(), errors.result()


def _rest(file: IO[str] | None) -> str:
    if file is None:
        return ""
    with file:
        return file.read()
