"""How much code one quiet round passes through: functions, files and changes of file.

    python -m tools.round_path [--list]

Two replicas in threads over a folder take rounds of fp32; the third of one of them is followed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from types import FrameType
from typing import Any

import numpy as np

from atoll import ObjectStoreAllReduce

ROUNDS = 3


class Path:
    """Functions of the package, in the order in which they are entered first."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, int], str] = {}
        self.files: set[str] = set()
        self.changes = 0
        self._last = ""

    def follow(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or "/atoll/" not in code.co_filename:
            return
        place = code.co_filename, code.co_firstlineno
        # Once each: a reader passes a function once, however often it is called or resumed.
        if code.co_name.startswith("<") or place in self.functions:
            return
        self.functions[place] = code.co_qualname
        self.files.add(code.co_filename)
        self.changes += code.co_filename != self._last
        self._last = code.co_filename


def measure() -> Path:
    path = Path()
    with tempfile.TemporaryDirectory(prefix="atoll-path-") as folder:
        start = threading.Barrier(2)

        def take_part(rank: int) -> None:
            values = np.ones(1 << 18, np.float32)
            with ObjectStoreAllReduce(f"file://{folder}", rank, 2, min_replicas=2) as replica:
                for number in range(ROUNDS):
                    start.wait()
                    if rank == 0 and number == ROUNDS - 1:
                        sys.setprofile(path.follow)
                    replica.allreduce(values)
                    sys.setprofile(None)

        threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--list", action="store_true", help="print the functions in their order")
    options = parser.parse_args()
    path = measure()
    functions, files = len(path.functions), len(path.files)
    sys.stdout.write(f"{functions} functions, {files} files, {path.changes} changes of file\n")
    if options.list:
        for (file, _), name in path.functions.items():
            sys.stdout.write(f"  {file.partition('/atoll/')[2]}  {name}\n")


if __name__ == "__main__":
    main()
