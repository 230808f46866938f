"""The mistakes of docs/troubleshooting.md, each typed: its words, its exit code, no traceback."""

from __future__ import annotations

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
ROW = re.compile(r"^\| `(?P<typed>.+?)` \| (?P<words>.+?) \| (?P<code>\d+) \|", re.M)
FILES = {
    "hello.py": "print('hello')\n",
    "steps.txt": "echo hello\n",
    "syntax.py": "def f(:\n",
    "bad.toml": '[executors.lab]\nkind = "slrum"\n',
    "odd.toml": "[defaults]\nmax_restart = 1\n",
    "yaml.toml": "slots: 4\n",
    "broken.py": "import nosuchmodule\n",
    "foreign.py": """
import torch
from atoll.diloco import DiLoCo
one, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
DiLoCo(one, torch.optim.SGD(other.parameters(), lr=0.1), sync_every=2)
""",
    "alone.py": """
import os
import torch
from atoll.diloco import DiLoCo
del os.environ["ATOLL_RENDEZVOUS_URI"]
model = torch.nn.Linear(2, 2)
DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), sync_every=2, world_size=2)
""",
}
OF_RANKS = {"broken.py", "foreign.py", "alone.py"}  # whose output is a traceback of their own


@pytest.mark.timeout(300)
def test_each_mistake_is_told_in_the_words_of_the_page(atoll: Any) -> None:
    for name, text in FILES.items():
        (Path(atoll.cwd) / name).write_text(text)
    assert (
        atoll(
            "run", "-d", "--name", "taken", "-n", "2", "--max", "3", "--", "sleep", "600"
        ).returncode
        == 0
    )
    assert atoll("wait", "taken", "--for", "target").returncode == 0
    assert atoll("run", "--name", "done", "--", "true").returncode == 0
    rows = [match.groupdict() for match in ROW.finditer(PAGE.read_text())]
    assert len(rows) >= 40
    with ThreadPoolExecutor(4) as pool:
        wrong = list(filter(None, pool.map(lambda row: fault(atoll, **row), rows)))
    assert not wrong, "\n".join(wrong)


def fault(atoll: Any, typed: str, words: str, code: str) -> str:
    shell = f'atoll() {{ "{sys.executable}" -m atoll.cli "$@"; }}\n'
    env = {name: value for name, value in atoll.env.items() if not name.startswith("AWS_")}
    done = subprocess.run(
        ["bash", "-c", shell + typed],
        cwd=atoll.cwd,
        env=env | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    is_right = done.returncode == int(code) and words in done.stdout
    if not any(name in typed for name in OF_RANKS):
        is_right &= "Traceback" not in done.stdout
    if code == "2":  # nothing has happened: one line, of atoll
        is_right &= bool(re.fullmatch(r"atoll: error: .*\n", done.stdout))
    if is_right:
        return ""
    return f"{typed}\n  exits with {done.returncode}, and says:\n{done.stdout}"
