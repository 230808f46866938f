"""The real basilica-sdk clients, each in an environment of its own, and a server for them."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

VERSIONS = ("0.29.0", "0.36.8")
ROOT = Path(__file__).parents[2]
SCENES = Path(__file__).with_name("scenes.py")


class Server:
    """`atoll serve` as a process; may be killed and started again."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.url = ""
        self.start()

    def start(self) -> None:
        port = self.url.rpartition(":")[2] or "0"
        serve = [sys.executable, "-m", "atoll.cli", "serve", "--json", "--owned"]
        # Without the directory of this Python on PATH: torchrun must be found all the same.
        path = os.pathsep.join(
            entry for entry in os.environ["PATH"].split(os.pathsep)
            if Path(entry) != Path(sys.executable).parent
        )  # fmt: skip
        self.process = subprocess.Popen(
            [*serve, "--port", port, "--state-dir", str(self.where)],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = json.loads(line)["url"]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> None:
        """Its trainings and their ranks go too: it is owned through its standard input."""
        self.process.communicate(timeout=60)

    @property
    def token(self) -> str:
        return (self.where / "token").read_text().strip()


class Client:
    """One version of the client, and what it finds when it plays a scene against the server."""

    def __init__(self, version: str, python: Path, server: Server) -> None:
        self.version = version
        self.server = server
        self._python = python

    @property
    def is_new(self) -> bool:
        """Has phase, rank exits and wait_until_complete."""
        return self.version != VERSIONS[0]

    def play(self, scene: str, **options: Any) -> dict[str, Any]:
        done = subprocess.run(
            [str(self._python), "-W", "ignore", str(SCENES), scene, json.dumps(options)],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(self.server.where),
                "BASILICA_API_URL": self.server.url,
                "BASILICA_API_TOKEN": self.server.token,
            },
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("plane"))
    yield made
    made.stop()


@pytest.fixture(params=VERSIONS)
def client(request: pytest.FixtureRequest, server: Server) -> Client:
    return Client(request.param, installed(request.param), server)


@pytest.fixture
def new_client(server: Server) -> Client:
    return Client(VERSIONS[1], installed(VERSIONS[1]), server)


def installed(version: str) -> Path:
    """The Python that has that version from PyPI, unmodified; made once, then kept."""
    home = ROOT / ".venv" if (ROOT / ".venv").is_dir() else Path(tempfile.gettempdir())
    where = home / f"atoll-interop-{os.getuid()}" / f"basilica-sdk-{version}"
    python = where / "bin" / "python"
    where.parent.mkdir(parents=True, exist_ok=True)
    with (where.parent / f"{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (where / "ready").exists():
            venv.create(where, clear=True)
            pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
            subprocess.run([*pip, f"basilica-sdk=={version}"], check=True)
            (where / "ready").touch()
    return python


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """For tests that kill it."""
    made = Server(tmp_path / "plane")
    yield made
    made.stop()
