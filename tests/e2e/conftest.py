"""A shell for tests: `atoll` as a user runs it, on a control plane of the tests' own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = str(Path(__file__).parents[2] / "src")
ATOLL = [sys.executable, "-m", "atoll.cli"]
PATIENCE_S = 60.0
WITHHELD = ("ATOLL_CONFIG", "ATOLL_URL", "ATOLL_TOKEN", "NO_COLOR", "FORCE_COLOR", "COLUMNS")


class Shell:
    """Runs `atoll …` with one state directory, from one working directory."""

    def __init__(self, state: Path, cwd: Path) -> None:
        self.state = state
        self.cwd = cwd
        self.env = {name: value for name, value in os.environ.items() if name not in WITHHELD}
        config = Path(f"{state}-config")
        self.toml = config / "atoll" / "atoll.toml"  # the user's own
        self.env |= {"ATOLL_STATE_DIR": str(state), "XDG_CONFIG_HOME": str(config)}
        self.env["COLUMNS"] = "120"
        paths = [SOURCE, *self.env.get("PYTHONPATH", "").split(os.pathsep)]
        self.env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))

    def configure(self, text: str) -> None:
        """Writes the user's own atoll.toml, which a control plane is started with."""
        self.toml.parent.mkdir(parents=True, exist_ok=True)
        self.toml.write_text(text)

    def start(self, *words: str, **env: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*ATOLL, *words],
            cwd=self.cwd,
            env=self.env | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        with self.start(*words, **env) as process:
            try:
                out, err = process.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def json(self, *words: str, code: int = 0, **env: str) -> Any:
        """The one JSON document that a command prints with `--json`."""
        done = self(*words, "--json", **env)
        assert done.returncode == code, done.stderr
        assert done.stdout.count("\n") == 1, done.stdout
        return json.loads(done.stdout)

    def in_terminal(self, *words: str, **env: str) -> Terminal:
        return Terminal([*ATOLL, *words], self.cwd, self.env | {"TERM": "xterm"} | env)

    def server_pid(self) -> int:
        return int(json.loads((self.state / "endpoint.json").read_bytes())["pid"])

    def stop(self) -> None:
        """Nothing of this control plane is left: no training, no rank, no server."""
        if not (self.state / "endpoint.json").exists():
            return
        names = [training["name"] for training in self.json("ps")]
        if names:
            assert self("rm", "-f", *names).returncode == 0
        pid = self.server_pid()
        os.kill(pid, signal.SIGTERM)
        until(lambda: not is_alive(pid))


class Terminal:
    """A command on a pseudo-terminal of 100 columns."""

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str]) -> None:
        self.text = ""
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            try:
                os.chdir(cwd)
                self._fd = 0
                self.resize(100, 30)
                os.execvpe(command[0], command, env)
            finally:
                os._exit(127)

    def read_until(self, wanted: str) -> str:
        until(lambda: wanted in self._read())
        return self.text

    def press(self, key: str) -> None:
        os.write(self._fd, key.encode())

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def code(self) -> int:
        """The exit code, once it has ended; all it wrote is in `text`."""
        status: list[int] = []

        def is_over() -> bool:
            self._read()
            pid, found = os.waitpid(self.pid, os.WNOHANG)
            status.extend([found] if pid else [])
            return bool(pid)

        until(is_over)
        self._read()
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status[0])

    def _read(self) -> str:
        with contextlib.suppress(OSError):  # EIO once the other side is gone
            while select.select([self._fd], [], [], 0.05)[0]:
                chunk = os.read(self._fd, 65_536)
                if not chunk:
                    break
                self.text += chunk.decode(errors="replace")
        return self.text


def until(is_true: Callable[[], object], timeout: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout
    while not is_true():
        assert time.monotonic() < deadline, f"not true within {timeout:g} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The state directory of a control plane that all tests of this process share."""
    state = tmp_path_factory.mktemp("state")
    yield state
    Shell(state, state).stop()


@pytest.fixture
def atoll(plane: Path, tmp_path: Path) -> Shell:
    return Shell(plane, tmp_path)


@pytest.fixture
def lone_atoll(tmp_path: Path) -> Iterator[Shell]:
    """With a control plane of its own, not yet started."""
    (tmp_path / "work").mkdir()
    shell = Shell(tmp_path / "state", tmp_path / "work")
    yield shell
    shell.stop()
