"""Stacks of ranks in words: where each of their processes is. Pure.

They are plain values, as JSON has them; `core/rank_access.py` has their types.
"""

from __future__ import annotations

import os.path

TYPE_CHECKING = False  # it travels with `agent/wrapper.py`, to Python 3.7 as well
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    Json = Mapping[str, Any]

# Frames below these folders are of libraries: a line of the user's own says more. In an archive of
# the wrapper this file is at its root.
OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))
OWN_FOLDER = os.path.dirname(OWN_FOLDER) if __package__ else OWN_FOLDER
LIBRARY_MARKS = ("/site-packages/", "/dist-packages/", "/lib/python", OWN_FOLDER + "/")
IMPORT_MARK = "<frozen importlib."  # half of the frames of a long import, which say nothing
# In the record of an exit, of which a journal takes 4 KiB.
MAX_SUMMARY_LINES, MAX_SUMMARY_CHARS, SUMMARY_FRAMES = 12, 1000, 6


def frame_text(frame: Json) -> str:
    code = f": {frame['code']}" if frame.get("code") else ""
    return f"{os.path.basename(frame['file'])}:{frame['line']} in {frame['function']}{code}"


def location_of(frames: Sequence[Json]) -> str:
    """Where a thread is: the function it is in, and the innermost line that is no library's."""
    if not frames:
        return "no Python code"
    own = next((frame for frame in frames if not _is_library(frame["file"])), frames[0])
    if own is frames[0]:
        return frame_text(own)
    return f"{frames[0]['function']} ({os.path.basename(frames[0]['file'])}), {frame_text(own)}"


def _is_library(file: str) -> bool:
    return file.startswith("<") or any(mark in file for mark in LIBRARY_MARKS)


def main_frames(process: Json) -> Sequence[Json]:
    """The calls of its main thread, the innermost first, without those inside of `import`."""
    threads = process.get("threads")
    frames: Sequence[Json] = threads[0]["frames"] if threads else ()
    return [frame for frame in frames if not frame["file"].startswith(IMPORT_MARK)] or frames


def process_location(process: Json) -> str:
    return location_of(main_frames(process)) if process.get("threads") else str(process["reason"])


def summary_of(stacks: Json) -> list[str]:
    """The stacks of a rank for the record of its exit: where each process was, and the calls of the
    first."""
    if not stacks.get("processes"):
        return [f"no stacks: {stacks.get('reason') or 'it has no process'}"]
    lines = []
    for number, process in enumerate(stacks["processes"]):
        where = process_location(process)
        where = where if process.get("threads") else f"no stack: {where}"
        lines.append(where if number == 0 else f"its child {process['pid']}: {where}")
    first = main_frames(stacks["processes"][0])[:SUMMARY_FRAMES]
    lines += [f"  {frame_text(frame)}" for frame in first]
    summary: list[str] = []
    for line in lines[:MAX_SUMMARY_LINES]:
        if sum(map(len, summary)) + len(line) <= MAX_SUMMARY_CHARS:
            summary.append(line)
    return summary
