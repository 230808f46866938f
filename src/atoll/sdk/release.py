"""A client and a control plane of different releases: which is older, and what to do."""

from __future__ import annotations

import re

from msgspec.structs import replace

import atoll
from atoll.core.model import UNKNOWN_FIELD
from atoll.core.problem import Problem

HEADER = "Atoll-Release"  # of every answer
SILENT = "0.1"  # the release of a control plane that does not name one


class OtherRelease(UserWarning):
    """The control plane in use has another release than this client."""


def difference(release: str | None) -> str:
    """How the release of the control plane differs from this one, in words; empty if equal."""
    theirs, ours = release or SILENT, atoll.__version__
    return "" if theirs == ours else f"the control plane is atoll {theirs}, this is atoll {ours}"


def is_older(release: str | None) -> bool:
    return _numbers(release or SILENT) < _numbers(atoll.__version__)


def explained(problem: Problem, release: str | None) -> Problem:
    """The problem; an unknown field or path is explained by the difference of releases, if any."""
    is_foreign_path = problem.type == "about:blank" and problem.status in (404, 405)
    words = difference(release)
    if not words or not (is_foreign_path or problem.expected == UNKNOWN_FIELD):
        return problem
    words += "; restart it with this one" if is_older(release) else "; install that one here"
    expected = None if problem.expected is None else f"{problem.expected} ({words})"
    return replace(problem, detail=f"{problem.detail} ({words})", expected=expected)


def _numbers(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]
