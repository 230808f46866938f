"""docs/convert.md, done literally: its script for Trainer, with `atoll run`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"
pytestmark = [
    pytest.mark.skipif(
        "ATOLL_INTEGRATIONS" not in os.environ, reason="started by `make integrations`"
    ),
    pytest.mark.timeout(600),
]


def test_the_script_of_the_page_trains_two_replicas(tmp_path: Path) -> None:
    text = PAGE.read_text()
    (script,) = re.findall(r'^```python title="finetune.py"\n(.*?)^```', text, re.M | re.S)
    (command,) = re.findall(r"^```sh\n(atoll run .*finetune.py)\n```", text, re.M)
    (tmp_path / "finetune.py").write_text(script)
    env = os.environ | {"ATOLL_STATE_DIR": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}
    atoll = [sys.executable, "-m", "atoll.cli"]
    try:
        done = subprocess.run(
            [*atoll, *command.split()[1:]], cwd=tmp_path, env=env, capture_output=True, text=True
        )
    finally:
        subprocess.run([*atoll, "stop", "--all"], env=env, check=True)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = re.findall(r"step 40, first weight (\S+)", done.stdout)
    assert len(weights) == 2
    assert len(set(weights)) == 1
