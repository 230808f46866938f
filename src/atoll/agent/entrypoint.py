"""Runs code that was shipped with the training: `[--from DIR] script|function PAYLOAD ARGS…`.

A script runs as under `python script.py ARGS…`; a function is called with ARGS. A failure is
printed to stderr and written to the file that torch uses, so that the first one can be named.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from atoll.agent.result import hand_in

_OWN = str(Path(__file__).resolve())


def run(kind: str, payload: Path, arguments: list[str], directory: str | None) -> None:
    """Runs the code; whatever it raises passes through."""
    # Python has put the directory of `-m` first; the code's own directory belongs there.
    sys.path[0] = directory if directory and os.path.isdir(directory) else os.getcwd()
    if kind == "script":
        run_script(payload, arguments)
    else:
        sys.argv = [str(payload), *arguments]
        hand_in(load_function(payload)(*arguments))


def run_script(payload: Path, arguments: list[str]) -> None:
    import types

    code = compile(payload.read_bytes(), str(payload), "exec", dont_inherit=True)
    module = types.ModuleType("__main__")
    module.__dict__.update(__file__=str(payload), __builtins__=__builtins__)
    # Pickle and multiprocessing look up the script's own classes there.
    sys.modules["__main__"] = module
    sys.argv = [str(payload), *arguments]
    exec(code, module.__dict__)


def load_function(payload: Path) -> Callable[..., Any]:
    with payload.open("rb") as file:
        function: Callable[..., Any] = pickle.load(file)
    return function


def error_document(error: BaseException) -> dict[str, Any]:
    """The error in the form of torch's elastic agents, so that one reader serves both."""
    text = "".join(_lines(error))
    extra = {"py_callstack": text, "timestamp": f"{time.time():.6f}"}
    return {"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}


def write_error_file(error: BaseException) -> None:
    """Writes the file that names the first failure, unless a torch script has written its own."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    with contextlib.suppress(OSError):
        draft = Path(f"{path}.{os.getpid()}")
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(error_document(error)))
        draft.replace(path)


def _lines(error: BaseException) -> list[str]:
    return traceback.format_exception(type(error), error, _theirs(error.__traceback__))


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file."""
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, _OWN):
        trace = trace.tb_next
    return trace


def main(message: list[str]) -> int:
    directory = None
    if message[:1] == ["--from"]:
        directory, message = message[1], message[2:]
    if len(message) < 2 or message[0] not in ("script", "function"):
        sys.stderr.write("usage: atoll.agent.entrypoint [--from DIR] script|function PAYLOAD …\n")
        return 2
    try:
        run(message[0], Path(message[1]), message[2:], directory)
    except SystemExit:
        raise
    except BaseException as error:
        write_error_file(error)
        sys.stdout.flush()
        sys.stderr.write("".join(_lines(error)))
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    # Under its own name, so that a script's `__main__` can take the place of this one.
    from atoll.agent import entrypoint

    sys.exit(entrypoint.main(sys.argv[1:]))
