"""The release before, as users have it: unpacked from its wheel, run as processes of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from tests.support.control_plane import wait_for

from atoll.local import processes

WHEEL = next((Path(__file__).parents[1] / "releases").glob("*.whl"))
NEW = Path(__file__).parents[2] / "src"
OLD_SERVE = ("-m", "atoll.main", "serve", "--announce")
NEW_SERVE = ("-m", "atoll.cli", "serve", "--json")
WITHHELD = (
    *("ATOLL_URL", "ATOLL_TOKEN", "ATOLL_STATE_DIR", "NO_COLOR", "FORCE_COLOR"),
    *("PYTHONPATH", "VIRTUAL_ENV"),
)
PATIENCE_S = 100.0


def unpack(folder: Path) -> Path:
    with zipfile.ZipFile(WHEEL) as wheel:
        wheel.extractall(folder)
    return folder


def upgrade(folder: Path) -> None:
    """The files of the old release are replaced by the new ones, whoever is using them."""
    shutil.rmtree(folder / "atoll")
    shutil.copytree(NEW / "atoll", folder / "atoll", ignore=shutil.ignore_patterns("__pycache__"))


def environment(folder: Path, path: Path) -> str:
    """The Python of a virtual environment in which the atoll in `path` is installed."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    shared = [entry for entry in sys.path if entry.endswith("site-packages")]
    (packages / "atoll.pth").write_text("\n".join([str(path), *shared]))
    home = Path(os.path.realpath(sys.executable)).parent
    (folder / "pyvenv.cfg").write_text(f"home = {home}\ninclude-system-site-packages = false\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    return str(folder / "bin" / "python")


class Site:
    """One atoll, installed in an environment of its own, and one state directory."""

    def __init__(self, path: Path, state: Path) -> None:
        self.path = path
        self.state = state
        self.python = environment(state.with_name(f"{path.name}-env"), path)
        kept = {name: value for name, value in os.environ.items() if name not in WITHHELD}
        self.env = kept | {"ATOLL_STATE_DIR": str(state)}
        self.env |= {"COLUMNS": "120"}

    def run(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *words],
            cwd=self.state.parent,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def script(self, path: Path, *words: str, **env: str) -> Any:
        """What a program that uses the SDK prints, as JSON."""
        done = self.run(str(path), *words, **env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def atoll(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("-m", "atoll.cli", *words, **env)

    def start(self, *serve: str) -> Plane:
        """A control plane, once it answers."""
        with self.state.with_name("server.log").open("ab") as log:
            process = subprocess.Popen(
                [self.python, *serve, "--state-dir", str(self.state)]
                + ["--port", "0", "--slots", "32"],
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert process.stdout is not None
        with process.stdout as announced:
            line = announced.readline()
        assert line, self.state.with_name("server.log").read_text()
        token = (self.state / "token").read_text().strip()
        return Plane(process, json.loads(line)["url"], token)


class Plane:
    """A control plane that runs."""

    started: ClassVar[list[Plane]] = []

    def __init__(self, process: subprocess.Popen[bytes], url: str, token: str) -> None:
        self.process = process
        self.url = url
        self.token = token
        self.started.append(self)

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait()


@contextlib.contextmanager
def cleared(state: Path) -> Iterator[None]:
    """Afterwards nothing of that state directory runs, whatever the test did."""
    try:
        yield
    finally:
        while pids := left(state):
            for pid in pids:
                processes.kill(pid)
        for plane in Plane.started:
            plane.process.wait()
        Plane.started.clear()


def left(state: Path) -> list[int]:
    """Every process that belongs to the state directory: servers, shims, ranks and theirs."""
    mark = os.fsencode(f"{state}/") + b"|" + os.fsencode(f"{state}\0")
    return [pid for pid in processes.all_pids() if pid != os.getpid() and _is_of(pid, mark)]


def _is_of(pid: int, mark: bytes) -> bool:
    with contextlib.suppress(OSError):
        said = Path(f"/proc/{pid}/cmdline").read_bytes() + Path(f"/proc/{pid}/environ").read_bytes()
        return any(part in said for part in mark.split(b"|"))
    return False


def supervisor(state: Path, uid: str) -> tuple[int, int]:
    """The keeper of a gang and the supervisor below it, once both are there."""
    mark = state / "ranks" / uid / "keeper"
    wait_for(lambda: mark.exists() and mark.read_text().strip())
    keeper = int(mark.read_text().split()[0])
    wait_for(lambda: processes.children(keeper))
    return keeper, processes.children(keeper)[0]
