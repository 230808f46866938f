"""A training that is scaled down: the rank that goes hands in what it has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import Shell
from tests.support.finish import finish

SCRIPT = str(Path(__file__).parents[1] / "integration" / "leaving_replica.py")
pytestmark = pytest.mark.timeout(300)


def read_until(process: subprocess.Popen[str], *starts: str) -> list[str]:
    """The lines up to the last one of those that begin so."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line.strip())
        if all(any(each.startswith(start) for each in lines) for start in starts):
            return lines
    raise AssertionError(f"{process.wait()}: {lines}")


@pytest.mark.parametrize(
    ("how", "code"), [("plain", 143), pytest.param("polite", 0, marks=pytest.mark.soak)]
)
def test_a_rank_that_is_scaled_away_hands_in_and_leaves(
    atoll: Shell, tmp_path: Path, how: str, code: int
) -> None:
    name = f"leaver-{how}"
    world = ["-n", "2", "--min", "1", "--stop-grace", "60", "--name", name]
    gate = tmp_path / "gate"
    variables = ["-e", "CODEC=fp32", "-e", f"GATE={gate}"]
    run = atoll.start("run", *world, *variables, "--", sys.executable, SCRIPT, "4", "0", how)
    try:
        # Both have made some steps of their second round.
        said = read_until(run, "[0] step 13", "[1] step 13")
        assert atoll("scale", name, "1").returncode == 0
        said += read_until(run, "[1] left after round")
        gate.touch()
        rest, errors = finish(run, 120)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 0, errors
    out = [*said, *rest.splitlines()]
    rosters = [line.split()[3:] for line in out if line.startswith("[0] round")]
    # In the second round by what it handed in.
    assert rosters == [["0", "1"], ["0", "1"], ["0"], ["0"]]
    assert any("asked to leave by SIGTERM" in line for line in out if line.startswith("[1]"))
    for words in ("continues without", "given up", "waiting for ranks", "Traceback"):
        assert not any(words in line for line in out), words
    ends = {each["rank"]: each["exitCode"] for each in atoll.json("status", name)["rankExits"]}
    assert ends == {0: 0, 1: code}
