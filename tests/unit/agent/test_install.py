"""Packages of a training: installed once a host, failures in pip's own words."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

RECORD = "tidal-1.0.dist-info"


def make_wheel(folder: Path) -> Path:
    """A package of our own, so that nothing has to be downloaded."""
    path = folder / "tidal-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tidal.py", "HIGH = 'water'\n")
        wheel.writestr(f"{RECORD}/METADATA", "Metadata-Version: 2.1\nName: tidal\nVersion: 1.0\n")
        wheel.writestr(f"{RECORD}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n")
        wheel.writestr(f"{RECORD}/RECORD", "")
    return path


def prepare(folder: Path, package: str, *command: str) -> subprocess.Popen[str]:
    entry = [sys.executable, "-m", "atoll.agent.install", str(folder), package, "--"]
    return subprocess.Popen(
        [*entry, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_ranks_started_at_once_all_find_the_package(tmp_path: Path) -> None:
    wheel = str(make_wheel(tmp_path))
    code = "import tidal; print(tidal.HIGH)"
    ranks = [prepare(tmp_path / "p", wheel, sys.executable, "-c", code) for _ in range(3)]
    for rank in ranks:
        out, err = rank.communicate()
        assert (rank.returncode, out) == (0, "water\n"), err


def test_a_package_that_cannot_be_had_fails_the_rank(tmp_path: Path) -> None:
    rank = prepare(tmp_path / "p", str(tmp_path / "none.whl"), "true")
    _, err = rank.communicate()
    assert rank.returncode != 0
    assert "none.whl" in err


def test_the_commands_own_exit_code_is_kept(tmp_path: Path) -> None:
    rank = prepare(tmp_path / "p", str(make_wheel(tmp_path)), "sh", "-c", "exit 7")
    rank.communicate()
    assert rank.returncode == 7
