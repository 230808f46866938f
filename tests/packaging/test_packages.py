"""Wheel and sdist, built from this tree and installed into empty environments. Needs PyPI.

Started by `make packages`: it takes a minute.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTRAS = ("store", "kubernetes", "sagemaker", "modal", "hfjobs")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


def sh(*words: str | Path, **env: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if lock := os.environ.get("ATOLL_LOCK"):  # unset by `make LOCK= packages`
        constraints = str(ROOT / lock / "dev.txt")
        clean |= {"PIP_CONSTRAINT": constraints, "PIP_BUILD_CONSTRAINT": constraints}
    done = subprocess.run(
        list(map(str, words)), cwd="/", env=clean | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def empty(path: Path) -> Path:
    """The Python of a new environment."""
    sh(sys.executable, "-m", "venv", path)
    return path / "bin" / "python"


def pip(python: Path, *words: str | Path) -> str:
    options = ("-q", "--disable-pip-version-check", "--no-compile")
    return sh(python, "-m", "pip", "install", *options, *words)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with one wheel and one sdist; the wheel is built from the sdist."""
    folder = tmp_path_factory.mktemp("packages")
    python = empty(folder / "builder")
    pip(python, "build")
    sh(python, "-m", "build", "-q", "--outdir", folder / "out", ROOT)
    return folder / "out"


def test_the_wheel_has_what_is_needed_and_no_tests(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"atoll/py.typed", "atoll/cli/start.py", "atoll/server/ui/static/index.html"} <= set(
        names
    )
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"atoll"}
    (sdist,) = built.glob("*.tar.gz")
    files = {name.partition("/")[2] for name in tarfile.open(sdist).getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile"} <= files


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_a_package_runs_in_an_empty_environment(built: Path, tmp_path: Path, kind: str) -> None:
    (package,) = built.glob(kind)
    python = empty(tmp_path / "venv")
    pip(python, package)
    atoll, env = python.with_name("atoll"), {"ATOLL_STATE_DIR": str(tmp_path / "state")}
    assert sh(atoll, "--version").startswith("atoll 0.")
    page = sh(python, "-c", "import atoll; help(atoll); print(dir(atoll))")
    assert "deploy_distributed" in page
    assert "'KubernetesExecutor'" in page
    done = sh(atoll, "run", "-n", "2", "--", "sh", "-c", "echo hello $RANK", **env)
    assert "[1] hello 1" in done
    assert ".[torch]" in sh(
        *(python, "-c"),
        "from atoll.diloco import DiLoCo\ntry: DiLoCo(1, 2)\nexcept RuntimeError as e: print(e)",
    )
    assert "stopped the control plane" in sh(atoll, "stop", "--all", **env)


def test_the_extras_can_be_installed_together_from_a_clone(tmp_path: Path) -> None:
    python = empty(tmp_path / "venv")
    pip(python, f"{ROOT}[{','.join(EXTRAS)}]")
    sh(python, "-m", "pip", "check")
    sh(python, "-c", "import obstore, lightkube, boto3, modal; from atoll import *")


def test_the_steps_of_the_image_work_in_an_empty_root(tmp_path: Path) -> None:
    """Without a daemon: copies into a folder, pip into an empty environment, its command."""
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    steps = [line.partition(" ")[::2] for line in lines if line and line[0] != "#"]
    python = empty(tmp_path / "venv")
    for step, rest in steps:
        if step == "COPY":
            *sources, target = rest.split()
            place = tmp_path / target.strip("/")
            for source in sources:
                is_folder = (ROOT / source).is_dir()
                place.mkdir(parents=True, exist_ok=True)
                sh("cp", "-r", f"{ROOT / source}/." if is_folder else ROOT / source, place)
        elif step == "RUN":
            install = rest.partition(" && ")[0].replace("/src", f"{tmp_path}/src").split()
            assert install[:2] == ["pip", "install"]
            pip(python, *(word.strip('"') for word in install[2:]))
    (command,) = [json.loads(rest) for step, rest in steps if step == "CMD"]
    assert command[0] == "python"
    assert "--port" in sh(python, *command[1:4], "--help")
