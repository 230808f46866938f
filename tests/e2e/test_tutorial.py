"""docs/tutorial.md, done literally: its files saved, its commands run in order, its output seen."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([\w.]+)")?\n(.*?)^```', re.M | re.S)


def test_the_tutorial_does_what_it_says(atoll: Any, tmp_path: Path) -> None:
    told = 0
    output = ""
    python = f'"{sys.executable}"'
    shell = f'atoll() {{ {python} -m atoll.cli "$@"; }}; python() {{ {python} "$@"; }}\n'
    for kind, title, text in BLOCK.findall(PAGE.read_text()):
        if title:
            (Path(atoll.cwd) / title).write_text(text)
        elif kind == "sh":
            done = subprocess.run(
                ["bash", "-c", shell + text],
                cwd=atoll.cwd,
                env=atoll.env | {"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            output = done.stdout
            assert "Traceback" not in output, output
            assert done.returncode == (1 if "broken.py" in text else 0), output
        elif kind == "text":
            for line in text.splitlines():
                wanted = re.sub(r"(\w+)-k3v9d", r"\1-\\w{5}", re.escape(line).replace("\\-", "-"))
                assert re.search(wanted, output), f"{line!r} is not in:\n{output}"
                told += 1
    assert told >= 10
    (weights,) = set(re.findall(r"30 rounds, first weight (\S+)", output_of_replicas(atoll)))
    assert weights


def output_of_replicas(atoll: Any) -> str:
    (name,) = (t["name"] for t in atoll.json("ps") if t["name"].startswith("replica-"))
    return str(atoll("logs", name).stdout)
