"""The command line of the ranks: the program, its environment, and a name for its training. Pure,
but for the files it reads."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

from atoll.core.errors import ValidationError
from atoll.sdk.endpoint import is_local_executor

# 32 letters that are not mistaken for each other: a byte picks all equally often.
_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"
_SUFFIX = 5  # 32**5 names: 1,000 trainings of one script collide once in 67 sweeps
_MAX_NAME = 63  # of a DNS label
# Programs that only run something else, so that they say little about a training.
_RUNNERS = re.compile(
    r"(python|pypy)[\d.]*|torchrun|accelerate|deepspeed|(ba|z)?sh|env|uv|nice|nohup|time|timeout"
)
_ASSIGNED = re.compile(r"[A-Za-z_]\w*=")
_SCRIPTS = (".py", ".sh", ".bash")


def program(command: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """The command, with the caller's Python before a script in Python.

    Raises ValidationError for a program that ranks on this machine cannot run.
    """
    argv = list(command)
    is_script = bool(argv) and argv[0].endswith(".py")
    if argv and is_local_executor(options.get("executor")):
        _check(argv[0], Path(options.get("working_dir") or "", argv[0]))
        return [sys.executable or "python3", *argv] if is_script else argv
    return ["python", *argv] if is_script else argv


def _check(argument: str, path: Path) -> None:
    expected = ""
    if len(argument.split()) > 1 and not path.exists():
        expected = "a program: this is one argument. Remove the quotes, or put 'sh -c' before it"
    elif _ASSIGNED.match(argument) and not path.exists():
        expected = f"a program: set variables with -e {argument}"
    elif argument.endswith(".ipynb"):
        expected = "a .py: 'jupyter nbconvert --to script' makes one of a notebook"
    elif argument.endswith(".py") and not path.is_file():
        expected = f"a file: there is none at {path.absolute()}"
    elif "/" in argument or argument in (".", ".."):
        if path.is_dir():
            expected = "a program or a .py: this is a directory"
        elif path.is_file() and not argument.endswith(".py") and not os.access(path, os.X_OK):
            expected = "a program: this file is not executable. Put its interpreter before it"
    if expected:
        raise ValidationError("command", argument, f"expected {expected}")


# Options of `run` that are easily typed in the wrong place, and that few scripts have.
_OURS = {"-n", "--ranks", "--min", "--max", "--gpus", "--max-restarts", "--rendezvous", "--uri"}
_OURS |= {"--run-id", "--executor", "--dry-run", "--env-file"}


def misplaced(command: Sequence[str], typed: Sequence[str]) -> str:
    """A note on options of atoll that went to the script because they follow it; empty if there
    are none, or if `typed` has a `--`."""
    if not command or not command[0].endswith(".py") or "--" in typed:
        return ""
    passed = [argument for argument in command[1:] if argument.partition("=")[0] in _OURS]
    if not passed:
        return ""
    remedy = f"for atoll, put it before {command[0]}; '--' before the script hides this note"
    return f"{passed[0]} goes to {command[0]}: {remedy}"


def generate_name(command: Sequence[str]) -> str:
    """A DNS label made of the program's name and a random suffix."""
    return f"{_stem(command)[: _MAX_NAME - 1 - _SUFFIX].rstrip('-')}-{_random()}"


def _random() -> str:
    return "".join(_LETTERS[byte % len(_LETTERS)] for byte in os.urandom(_SUFFIX))


def _stem(command: Sequence[str]) -> str:
    """`train` for `python train.py --lr 3`, `nanogpt-train` for `python -m nanogpt.train`."""
    stem = next(filter(None, map(_label, _candidates(command))), None)
    return stem or (_label(command[0]) if command else "") or "training"


def _candidates(command: Sequence[str]) -> Iterator[str]:
    """Arguments that may be the program, the likeliest first."""
    argv = _argv(command)
    for before, argument in argv:
        if before == "-m":
            yield argument.replace(".", "-")
        elif argument.endswith(_SCRIPTS) and _is_program(argument):
            yield PurePath(argument).stem
    for before, argument in argv:
        is_value = before.startswith("-") and "=" not in before  # such as `--nproc-per-node 2`
        if not is_value and _is_program(argument):
            yield PurePath(argument).stem


def _argv(command: Sequence[str]) -> list[tuple[str, str]]:
    """Each argument with the one before it, up to the first program that is no runner, or to code
    on the command line."""
    argv = []
    for before, argument in zip(["", *command], command, strict=False):
        if before == "-c":
            break
        argv.append((before, argument))
        if not before.startswith("-") and _is_program(argument):
            if argument.endswith(_SCRIPTS) or not argv[1:]:
                break
    return argv


def _is_program(argument: str) -> bool:
    if argument.startswith("-") or "=" in argument or not re.search("[A-Za-z]", argument):
        return False
    return not _RUNNERS.fullmatch(PurePath(argument).name)


def _label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", PurePath(text).name.lower()).strip("-")


def read_variables(argv: Sequence[str], files: Sequence[Path]) -> dict[str, str]:
    """The environment that `--env` and `--env-file` describe."""
    env: dict[str, str] = {}
    for path in files:
        env |= read_env_file(path)
    for argument in argv:
        env |= _variable(argument)
    return env


def _variable(argument: str) -> dict[str, str]:
    name, has_value, value = argument.partition("=")
    if has_value:
        return {name: value}
    matches = {key: os.environ[key] for key in os.environ if fnmatchcase(key, name)}
    if not matches:
        expected = "expected K=V, or the name or pattern of variables that are set here"
        raise ValidationError("--env", argument, expected)
    return matches


ENV_FILE = "--env-file"


def read_env_file(path: Path) -> dict[str, str]:
    """Variables of a file of `K=V` lines, as for `docker run --env-file`, with quotes and comments.

    Raises ValidationError that names the file and the line, and never shows a value.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValidationError(ENV_FILE, str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValidationError(ENV_FILE, str(path), "expected a text file in UTF-8") from error
    env: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        text = line.strip().removeprefix("export ").lstrip()
        if not text or text.startswith("#"):
            continue
        name, has_value, value = text.partition("=")
        if not has_value or not name.strip().isidentifier():
            raise ValidationError(ENV_FILE, str(path), f"line {number}: expected K=V")
        env[name.strip()] = _value(value.strip(), path, number)
    return env


def _value(text: str, path: Path, number: int) -> str:
    quote = text[:1]
    if quote not in ("'", '"'):
        return text.partition(" #")[0].rstrip()
    inside, end, remainder = text[1:].partition(quote)
    if not end or (remainder.strip() and not remainder.lstrip().startswith("#")):
        expected = f"line {number}: expected a closing {quote} at the end of the value"
        raise ValidationError(ENV_FILE, str(path), expected)
    return inside
