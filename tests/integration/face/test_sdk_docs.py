"""The example of docs/api.md, run as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DOCUMENT = Path(__file__).parents[3] / "docs" / "api.md"


def test_the_python_example_prints_what_it_says() -> None:
    found = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found is not None
    told = re.findall(r"print\(.*\)\s+# (.+)", found[1])
    done = subprocess.run(
        [sys.executable, "-c", found[1]], capture_output=True, text=True, timeout=100
    )
    assert (done.stdout.splitlines(), done.stderr) == (told, "")
    assert len(told) == 2
