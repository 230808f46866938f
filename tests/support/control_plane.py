"""Drives a control plane that is a process of its own (`serve.py`), and sees what it leaves."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from atoll.backends.local import processes
from atoll.backends.local.journal import read_batches
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Event, LogLine, Training

SERVE = Path(__file__).with_name("serve.py")
WAIT_S = 60.0
_names = itertools.count()


class PlaneDied(Exception):
    """The control plane ended before it answered."""


class Refused(Exception):
    """The control plane answered with an error, named in `kind`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class Said(msgspec.Struct):
    id: int
    ok: msgspec.Raw = msgspec.Raw(b"null")
    error: str = ""
    text: str = ""


class ControlPlane:
    """One state directory, and the process that serves it now."""

    def __init__(
        self, state: Path, *, slots: int | None = None, env: dict[str, str] | None = None
    ) -> None:
        self.state = state
        self.slots = slots
        self.env = env or {}
        self._process: subprocess.Popen[bytes] | None = None
        self._ids = itertools.count()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        command = [sys.executable, str(SERVE), str(self.state)]
        with (self.state.parent / f"{self.state.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                command + ([] if self.slots is None else [str(self.slots)]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **self.env},
            )
        self.call("ping")

    def start_refused(self) -> str:
        """What it says when it will not start."""
        done = subprocess.run(
            [sys.executable, str(SERVE), str(self.state)],
            input=b"", capture_output=True, timeout=WAIT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 1, done
        return done.stderr.decode()

    def kill(self, *, is_reaped: bool = True) -> None:
        assert self._process is not None
        self._process.kill()
        if is_reaped:
            self.reap()

    def reap(self) -> None:
        assert self._process is not None
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def restart(self) -> None:
        self.kill()
        self.start()

    def call(self, op: str, kind: Any = Any, **options: Any) -> Any:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"id": next(self._ids), "op": op, "with": options}
        try:
            self._process.stdin.write(msgspec.json.encode(request) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PlaneDied(op) from None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise PlaneDied(op)
        said = msgspec.json.decode(line, type=Said)
        assert said.id == request["id"], said
        if said.error:
            raise Refused(said.error, said.text)
        return msgspec.json.decode(said.ok, type=kind)

    def create(self, script: str | list[str], ranks: int = 1, **options: Any) -> str:
        """A training of `ranks` ranks, each running the shell script or the command given."""
        spec = make_spec(script, ranks, **options)
        self.call("create", spec=msgspec.to_builtins(spec), key=spec.name)
        return spec.name

    def get(self, name: str) -> Training:
        return self.call("get", Training, name=name)

    def ask(self, name: str, **change: Any) -> Training:
        return self.call("ask", Training, name=name, change=change)

    def events(self, name: str) -> list[Event]:
        return self.call("events", list[Event], name=name)

    def reasons(self, name: str) -> list[str]:
        return [event.reason for event in self.events(name)]

    def log_lines(self, name: str, tail: int | None = None) -> list[LogLine]:
        return self.call("log_lines", list[LogLine], name=name, tail=tail)

    def until(
        self, name: str, holds: Callable[[Training], object], *, timeout: float = WAIT_S
    ) -> Training:
        """The first training seen for which `holds`; fails with what it was if that never comes."""
        deadline = time.monotonic() + timeout
        training = self.get(name)
        while not holds(training):
            left = deadline - time.monotonic()
            assert left > 0, f"not after {timeout:g} s: {training.status}"
            after = training.resource_version
            training = self.call(
                "changed", Training, name=name, after=after, within_s=min(left, 5.0)
            )
        return training

    def until_over(self, name: str, *, timeout: float = WAIT_S) -> Training:
        return self.until(name, lambda t: t.status.phase.is_terminal, timeout=timeout)

    def until_ready(self, name: str, ranks: int) -> Training:
        """All `ranks` of them run."""
        return self.until(name, lambda t: sum(r.is_alive for r in t.status.ranks) == ranks)

    def until_released(self, name: str) -> Training:
        return self.until(name, lambda t: t.status.is_released)

    def until_removed(self, name: str) -> None:
        wait_for(lambda: name not in self.call("names"))

    # What runs for this state directory

    def directory(self, training: Training) -> Path:
        return self.state / "trainings" / training.uid

    def supervision_pids(self, training: Training) -> tuple[int, int]:
        """The watchdog and the supervisor."""
        return self.supervision_pids_of(self.directory(training))

    def supervision_pids_of(self, directory: Path) -> tuple[int, int]:
        found = [pid for pid in processes.all_pids() if str(directory) in _command_line(pid)]
        parents = {pid: _parent(pid) for pid in found}
        supervisor = next(pid for pid in found if parents[pid] in found)
        return parents[supervisor], supervisor

    def left(self) -> list[str]:
        """Every process that this state directory has brought about, the control plane aside."""
        return [f"{pid} {_command_line(pid)}" for pid in self.left_pids()]

    def left_of(self, *uids: str) -> list[str]:
        """Every process of these trainings, though nothing may be left of their files."""
        return [
            f"{pid} {_command_line(pid)}"
            for pid in processes.all_pids()
            if any(_is_of(pid, self.state / "trainings" / uid, {uid}) for uid in uids)
        ]

    def left_pids(self) -> list[int]:
        folder = self.state / "trainings"
        uids = {p.name for p in folder.glob("*")}
        own = {self._process.pid} if self._process is not None else set()
        return [pid for pid in processes.all_pids() if pid not in own and _is_of(pid, folder, uids)]

    def clear_away(self) -> None:
        """Nothing of it is left running, whatever the test did."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
            self.reap()
        while pids := self.left_pids():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def make_spec(script: str | list[str], ranks: int = 1, **options: Any) -> TrainingSpec:
    world = WorldSize(
        min=options.pop("min", ranks), target=ranks, max=options.pop("max", max(ranks, 64))
    )
    command = script if isinstance(script, list) else ["sh", "-c", script]
    name = options.pop("name", f"t{next(_names)}")
    return TrainingSpec(name=name, command=command, world_size=world, **options)


def wait_for(holds: Callable[[], object], *, timeout: float = WAIT_S) -> None:
    deadline = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(
    state: Path, *, slots: int | None = None, env: dict[str, str] | None = None
) -> Iterator[ControlPlane]:
    plane = ControlPlane(state, slots=slots, env=env)
    plane.start()
    try:
        yield plane
    finally:
        plane.clear_away()


def journal_records(journal: Path) -> list[dict[str, Any]]:
    """All that the supervisor of a local training has written down so far."""
    data = journal.read_bytes()
    return [record for _, records in read_batches(data, 0) for record in records]


def cpu_seconds(pid: int) -> float:
    """What the process has used of the processor so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_of(pid: int, folder: Path, uids: set[str]) -> bool:
    if processes.environment_of(pid).get(b"ATOLL_UID", b"").decode() in uids:
        return True
    if str(folder) in _command_line(pid):
        return True
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/cwd").startswith(str(folder))
    return False


def _command_line(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode("utf-8", "replace")
        )
    return ""


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
