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
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_SCRIPTS = (".py", ".sh", ".bash")


def program(command: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """The command with the caller's Python before a script in Python.

    Raises ValidationError for what cannot be run, where ranks would look for it.
    """
    words = list(command)
    is_script = bool(words) and words[0].endswith(".py")
    if words and is_here(options.get("executor")):
        _check(words[0], Path(options.get("working_dir") or "", words[0]))
        return [sys.executable or "python3", *words] if is_script else words
    return ["python", *words] if is_script else words


def _check(word: str, path: Path) -> None:
    expected = ""
    if len(word.split()) > 1 and not path.exists():
        expected = "a program: this is one word. Leave out the quotes, or put 'sh -c' before it"
    elif _ASSIGNED.match(word) and not path.exists():
        expected = f"a program: variables are set by -e {word}"
    elif word.endswith(".ipynb"):
        expected = "a .py: 'jupyter nbconvert --to script' makes one of a notebook"
    elif word.endswith(".py") and not path.is_file():
        expected = f"a file: there is none at {path.absolute()}"
    elif "/" in word or word in (".", ".."):
        if path.is_dir():
            expected = "a program or a .py: this is a directory"
        elif path.is_file() and not word.endswith(".py") and not os.access(path, os.X_OK):
            expected = "a program: this file is not executable. Put what runs it before it"
    if expected:
        raise ValidationError("command", word, f"expected {expected}")


# Options of `run` that are easily typed in the wrong place, and that scripts seldom have.
_OURS = {"-n", "--ranks", "--min", "--max", "--gpus", "--max-restarts", "--rendezvous", "--uri"}
_OURS |= {"--run-id", "--executor", "--dry-run", "--env-file"}


def misplaced(command: Sequence[str], typed: Sequence[str]) -> str:
    """What to say of options that went to the script, as they are behind it; empty for none, and
    where a `--` was `typed` before it."""
    if not command or not command[0].endswith(".py") or "--" in typed:
        return ""
    taken = [word for word in command[1:] if word.partition("=")[0] in _OURS]
    if not taken:
        return ""
    before = f"to mean atoll, put it before {command[0]}; with '--' before that, this is not said"
    return f"{taken[0]} goes to {command[0]}: {before}"


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
