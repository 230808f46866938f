"""The migration page keeps its word: every limit has a verdict, every fix a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
VERDICTS = {"fixed here", "not applicable", "still so"}
ROW = re.compile(r"^\| (\d+b?) \| (.+?) \| (.+?) \| (.+) \|$", re.MULTILINE)


def test_every_limit_has_a_verdict_and_every_fix_a_test_that_exists() -> None:
    page = (ROOT / "docs" / "basilica.md").read_text()
    rows = ROW.findall(page)
    numbers = [str(number) for number in range(1, 37)]
    numbers.insert(21, "21b")
    assert [row[0] for row in rows] == numbers
    assert {row[2] for row in rows} == VERDICTS
    text = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    known = set(re.findall(r"^(?:async )?def (test_\w+)", text, re.MULTILINE))
    for number, _, verdict, why in rows:
        named = set(re.findall(r"`(test_\w+)`", why))
        assert named <= known, f"limit {number} names a test that is not there"
        assert named or verdict != "fixed here", f"limit {number} is fixed and names no test"
