"""Errors as notebooks show them: what happened, and where in the user's own code."""

from __future__ import annotations

import traceback
from pathlib import Path

from atoll.core.escape import escape_control

OWN = str(Path(__file__).parents[1])
MAX_FRAMES = 5
ALL_FRAMES = "(all frames: import sys, traceback; traceback.print_exception(sys.last_value))"


def short_traceback(error: BaseException) -> list[str]:
    """Lines for `_render_traceback_`: the error first, then who called."""
    hint = getattr(error, "hint", None)
    words = [*f"{type(error).__name__}: {error}".split("\n"), *getattr(error, "__notes__", ())]
    if hint:
        words.append(str(hint))
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_inner(f.filename)]
    where = [
        f"  {_place(frame.filename)}, line {frame.lineno}: {(frame.line or '').strip()}"
        for frame in frames[-MAX_FRAMES:]
    ]
    return [*map(escape_control, words), *map(escape_control, where), ALL_FRAMES]


def _is_inner(filename: str) -> bool:
    """Whether a frame is atoll's, a library's or Python's own."""
    parts = filename.replace("\\", "/")
    return (
        filename.startswith((OWN, "<frozen"))
        or "/site-packages/" in parts
        or "/lib/python3." in parts
    )


def _place(filename: str) -> str:
    is_cell = "ipykernel_" in filename or filename.startswith("<ipython-input")
    return "cell" if is_cell else filename
