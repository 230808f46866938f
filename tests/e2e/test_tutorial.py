"""Pages done literally: their files saved, their commands run in order, their output seen."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```', re.M | re.S)
# Programs of this environment, by the names that the pages have for them.
SHELL = """
python() { "$PYTHON" "$@"; }
atoll() { "$PYTHON" -m atoll.cli "$@"; }
moto_server() { exec "$PYTHON" -m moto.server "$@"; }
"""


def save_files(text: str, folder: Path) -> None:
    for _, title, block in BLOCK.findall(text):
        if title:
            (folder / title).write_text(block)


def follow(text: str, atoll: Any) -> int:
    """Does what a page says; how many lines of output it had told."""
    told, output = 0, ""
    save_files(text, Path(atoll.cwd))
    for kind, title, block in BLOCK.findall(text):
        if kind == "sh":
            done = subprocess.run(
                ["bash", "-c", SHELL + block],
                cwd=atoll.cwd,
                env=atoll.env | {"OMP_NUM_THREADS": "1", "PYTHON": sys.executable},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            output = done.stdout
            assert "Traceback" not in output, output
            assert done.returncode == (1 if "broken.py" in block else 0), output
        elif kind == "text" and not title:
            for line in block.splitlines():
                wanted = re.sub(r"(\w+)-k3v9d", r"\1-\\w{5}", re.escape(line).replace("\\-", "-"))
                assert re.search(wanted, output), f"{line!r} is not in:\n{output}"
                told += 1
    return told


def test_the_quickstart_does_what_it_says(atoll: Any) -> None:
    assert follow((DOCS / "quickstart.md").read_text(), atoll) >= 10
    assert len(weights(atoll)) == 1


def test_a_sweep_of_twenty_does_what_it_says(lone_atoll: Any) -> None:
    head = (DOCS / "sweeps.md").read_text().partition("\n## A function")[0]
    assert follow(head, lone_atoll) == 1
    # Twenty of the function, four of the script's sweep, and one that has a label.
    assert [t["phase"] for t in lone_atoll.json("ps")] == ["succeeded"] * (20 + 4 + 1)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_replicas_meet_in_a_bucket_as_the_page_says(atoll: Any) -> None:
    save_files((DOCS / "quickstart.md").read_text(), Path(atoll.cwd))
    page = (DOCS / "diloco.md").read_text()
    page = page[page.index("### Try S3") : page.index("## Stop and resume")]
    assert "5566" in page
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert follow(page.replace("5566", str(port)), atoll) == 2
    assert len(weights(atoll)) == 1


def weights(atoll: Any) -> set[str]:
    """The first weight, as each replica has it at the end of its thirty rounds."""
    name = next(t["name"] for t in atoll.json("ps") if t["name"].startswith("replica-"))
    found = re.findall(r"30 rounds, first weight (\S+)", str(atoll("logs", name).stdout))
    assert len(found) == 3
    return set(found)
