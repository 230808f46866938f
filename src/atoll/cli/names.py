"""Names: made from a command when none was given, and completed in the shell."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from pathlib import PurePath

_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"
_SUFFIX = 5
# Programs that only run something else, so that they say little about a training.
_RUNNERS = re.compile(r"(python|pypy)[\d.]*|torchrun|accelerate|bash|sh|env|uv|nice|time")


def generated(command: Sequence[str]) -> str:
    """A DNS label: what is run, and a random end."""
    return f"{_stem(command)[: 62 - _SUFFIX].rstrip('-')}-{_random()}"


def _random() -> str:
    return "".join(secrets.choice(_LETTERS) for _ in range(_SUFFIX))


def _stem(command: Sequence[str]) -> str:
    """`train` for `python train.py --lr 3`, `nanogpt-train` for `python -m nanogpt.train`."""
    found = next(filter(None, map(_label, _candidates(command))), None)
    return found or (_label(command[0]) if command else "") or "training"


def _candidates(command: Sequence[str]) -> Iterator[str]:
    """Words that may be the program, the likeliest first."""
    for before, word in zip(["", *command], command, strict=False):
        if before == "-m":
            yield word.replace(".", "-")
            return
        if before == "-c":
            return
        if word.startswith("-") or "=" in word:
            continue
        if word.endswith(".py") or not _RUNNERS.fullmatch(PurePath(word).name):
            yield PurePath(word).stem
            return


def _label(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", PurePath(text).name.lower()).strip("-")


def complete(incomplete: str) -> list[str]:
    """Names that begin so, if a control plane is there to ask; never starts one."""
    import os

    from atoll.core.errors import AtollError

    try:
        if not os.environ.get("ATOLL_URL"):
            from atoll.sdk.embedded import running, state_dir

            if running(state_dir()) is None:
                return []
        from atoll.sdk.client import Client

        with Client() as client:
            return [training.name for training in client.list(prefix=incomplete)]
    except (AtollError, OSError):
        return []
