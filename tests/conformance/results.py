"""What came out of the fault table on each backend, kept from runs, and the table made of them.

`ATOLL_RECORD=1 pytest tests/conformance …` keeps the outcome of each row in `results/`.
`python -m tests.conformance.results` prints the table of all backends and why rows cannot be
provoked where they cannot; with `--write` the table is kept in `docs/evidence.md`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conformance.table import ROWS, Row

FOLDER = Path(__file__).with_name("results")
PAGE = Path(__file__).parents[2] / "docs" / "evidence.md"
BACKENDS = ("local", "kubernetes", "slurm", "modal", "sagemaker", "hfjobs")
WHAT = {
    "local": "processes of this machine",
    "kubernetes": "Kubernetes 1.34 with kubelets and containerd",
    "slurm": "Slurm 22.05 with its real daemons",
    "modal": "the unmodified `modal` client against a server of our own",
    "sagemaker": "the unmodified `boto3` against a server of our own",
    "hfjobs": "the unmodified `huggingface_hub` against a server of our own",
}
MARKS = {"passed": "yes", "failed": "**no**", "cannot": "–"}
VARIABLE = "ATOLL_RECORD"
TABLE = re.compile(r"(?<=<!--faults-->\n).*?(?=\n<!--/faults-->)", re.S)

Outcome = dict[str, Any]


@contextmanager
def recorded(backend: str, row: Row) -> Iterator[None]:
    """The outcome of the row is kept, if that was asked for."""
    try:
        yield
    except BaseException:
        keep(backend, row, {"outcome": "failed"})
        raise
    keep(backend, row, {"outcome": "passed"})


def keep(backend: str, row: Row, outcome: Outcome) -> None:
    if os.environ.get(VARIABLE) != "1":
        return
    FOLDER.mkdir(exist_ok=True)
    with (FOLDER / f"{backend}.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # rows may run in several processes
        file.seek(0)
        before = json.loads(file.read() or "{}")
        names = [each.name for each in ROWS]
        after = {name: before[name] for name in names if name in before}
        after[row.name] = outcome
        file.seek(0)
        file.truncate()
        file.write(json.dumps({n: after[n] for n in names if n in after}, indent=1) + "\n")


def read(backend: str) -> dict[str, Outcome]:
    path = FOLDER / f"{backend}.json"
    outcomes: dict[str, Outcome] = json.loads(path.read_text()) if path.exists() else {}
    return outcomes


def render() -> str:
    """The table: one line for each fault."""
    results = {backend: read(backend) for backend in BACKENDS}
    faults = list(dict.fromkeys(_fault(row) for row in ROWS))
    lines = [
        "| fault | " + " | ".join(BACKENDS) + " |",
        "|---|" + "---|" * len(BACKENDS),
        *(_line(fault, results) for fault in faults),
        _totals(results),
        "",
        "| backend | what it ran on |",
        "|---|---|",
        *(f"| {backend} | {WHAT[backend]} |" for backend in BACKENDS),
    ]  # fmt: skip
    return "\n".join(lines)


def _fault(row: Row) -> str:
    """Rows that differ only in the step of the controller are one line."""
    return row.fault if "controller killed" in row.fault else row.name


def _names(fault: str) -> list[str]:
    return list(dict.fromkeys(row.name for row in ROWS if _fault(row) == fault))


def _line(fault: str, results: dict[str, dict[str, Outcome]]) -> str:
    names = _names(fault)
    cells = []
    for backend in BACKENDS:
        outcomes = [results[backend][name]["outcome"] for name in names if name in results[backend]]
        good = outcomes.count("passed")
        if len(names) > 1 and good:
            cells.append(
                f"{good} of {len(names)} steps" if good < len(names) else f"yes, {good} steps"
            )
        else:
            cells.append(MARKS[outcomes[0]] if outcomes else "")
    return f"| {fault} | " + " | ".join(cells) + " |"


def _totals(results: dict[str, dict[str, Outcome]]) -> str:
    cells = []
    for backend in BACKENDS:
        outcomes = [each["outcome"] for each in results[backend].values()]
        ran = len(outcomes) - outcomes.count("cannot")
        cells.append(f"{outcomes.count('passed')} of {ran}" if outcomes else "")
    return "| **rows right, of those provoked** | " + " | ".join(cells) + " |"


def reasons() -> list[str]:
    """Why a row cannot be provoked on a backend."""
    return [
        f"- {backend}, {name}: {outcome['why']}"
        for backend in BACKENDS
        for name, outcome in read(backend).items()
        if outcome["outcome"] == "cannot"
    ]


def main(words: list[str]) -> int:
    if words not in ([], ["--write"]):
        sys.stderr.write("usage: python -m tests.conformance.results [--write]\n")
        return 2
    table = render()
    if words:
        PAGE.write_text(TABLE.sub(lambda _: table, PAGE.read_text()))
    sys.stdout.write("\n".join([table, "", *reasons(), ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
