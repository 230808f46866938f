"""The program on a command line: what runs it, and a name for its training."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from atoll.core.errors import ValidationError
from atoll.sdk.endpoint import is_here

_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"  # 32 of them: a byte picks all equally often
_SUFFIX = 5
# Programs that only run something else, so that they say little about a training.
_RUNNERS = re.compile(
    r"(python|pypy)[\d.]*|torchrun|accelerate|deepspeed|(ba|z)?sh|env|uv|nice|nohup|time|timeout"
)
_SCRIPTS = (".py", ".sh", ".bash")


def program(command: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """The command with the caller's Python before a script in Python.

    Raises ValidationError for a script that is not there, where ranks would look for it.
    """
    words = list(command)
    if not words or not words[0].endswith(".py"):
        return words
    if not is_here(options.get("executor")):
        return ["python", *words]
    path = Path(options.get("working_dir") or "", words[0])
    if not path.is_file():
        expected = f"expected a file: there is none at {path.absolute()}"
        raise ValidationError("command", words[0], expected)
    return [sys.executable or "python3", *words]


def generated(command: Sequence[str]) -> str:
    """A DNS label made of the program's name and a random suffix."""
    return f"{_stem(command)[: 62 - _SUFFIX].rstrip('-')}-{_random()}"


def _random() -> str:
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(_SUFFIX))


def _stem(command: Sequence[str]) -> str:
    """`train` for `python train.py --lr 3`, `nanogpt-train` for `python -m nanogpt.train`."""
    stem = next(filter(None, map(_label, _candidates(command))), None)
    return stem or (_label(command[0]) if command else "") or "training"


def _candidates(command: Sequence[str]) -> Iterator[str]:
    """Words that may be the program, the likeliest first."""
    words = _words(command)
    for before, word in words:
        if before == "-m":
            yield word.replace(".", "-")
        elif word.endswith(_SCRIPTS) and _is_program(word):
            yield PurePath(word).stem
    for before, word in words:
        is_value = before.startswith("-") and "=" not in before  # such as `--nproc-per-node 2`
        if not is_value and _is_program(word):
            yield PurePath(word).stem


def _words(command: Sequence[str]) -> list[tuple[str, str]]:
    """Each word with the one before it, as far as they run something: up to the first program
    that is no runner, or to code on the command line."""
    words = []
    for before, word in zip(["", *command], command, strict=False):
        if before == "-c":
            break
        words.append((before, word))
        if not before.startswith("-") and _is_program(word):
            if word.endswith(_SCRIPTS) or not words[1:]:
                break
    return words


def _is_program(word: str) -> bool:
    if word.startswith("-") or "=" in word or not re.search("[A-Za-z]", word):
        return False
    return not _RUNNERS.fullmatch(PurePath(word).name)


def _label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", PurePath(text).name.lower()).strip("-")
