"""The page of every public name, from docstrings."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

import atoll
import atoll.diloco as diloco

_ORDER = ("Trainings", "Inside a rank", "DiLoCo", "Replicas from a script", "Errors")
_GROUPS = {
    "core.errors": "Errors",
    "sdk": "Trainings",
    "core": "Trainings",
    "replicas": "Replicas from a script",
    "agent": "Inside a rank",
    "mesh": "Inside a rank",
    "diloco": "DiLoCo",
}


def public_names() -> dict[str, str]:
    """Where each name that users import is defined, by the name they import."""
    names = {f"atoll.{name}": f"atoll.{home}.{name}" for name, home in atoll._HOME.items()}
    names |= {f"atoll.diloco.{name}": f"atoll.{home}.{name}" for name, home in diloco._HOME.items()}
    report = "atoll.diloco.allreduce.AllReduceReport"
    names[report] = report
    for kind in ("transformers", "lightning"):
        name = f"atoll.integrations.{kind}.DiLoCoCallback"
        names[name] = name
    return names


def _group(place: str) -> str:
    inner = place.removeprefix("atoll.")
    return next((words for start, words in _GROUPS.items() if inner.startswith(start)), "DiLoCo")


def reference() -> str:
    names = sorted(public_names().items(), key=lambda item: (_ORDER.index(_group(item[1])), item))
    parts = ["# Python reference\n\nEvery public name, from its docstring.\n"]
    group = ""
    for name, place in names:
        if _group(place) != group:
            group = _group(place)
            parts.append(f"## {group}\n")
        parts.append(f"::: {place}\n    options:\n      heading: {name}\n      heading_level: 3\n")
    return "\n".join(parts)
