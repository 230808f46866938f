"""Faults at random over every process of the local backend, and what must hold afterwards.

The checker reads the gangs' journals and /proc; the control plane is asked only for what it says,
which is compared with them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import struct
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tests.support.control_plane import ControlPlane, journal_records, make_spec, wait_for

from atoll.backends.local import processes
from atoll.backends.local.processes import cgroup_for
from atoll.core.status import Training

RANKS = 3
RESTARTS = 100  # more than the storm can use up
MAX_STOP_S = 1.5
CALM_S = 120.0  # for everything to come to rest, on a machine that is busy elsewhere
CLOCK_VARIABLE = "ATOLL_STORM_CLOCK"
CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static volatile long *ahead;
__attribute__((constructor)) static void load(void) {
    const char *path = getenv("ATOLL_STORM_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *place = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    if (place != MAP_FAILED) ahead = place;
    close(file);
}
int clock_gettime(clockid_t id, struct timespec *now) {
    long wrong = syscall(SYS_clock_gettime, id, now);
    if (!wrong && ahead && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead;
    return wrong;
}
int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    now->tv_sec = at.tv_sec;
    now->tv_usec = at.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *place) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (place) *place = at.tv_sec;
    return at.tv_sec;
}
"""


class Clock:
    """The wall clock of every process started with `environment`, which can be set at any time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "clock"
        self._path.write_bytes(struct.pack("l", 0))
        source, self._library = folder / "clock.c", folder / "clock.so"
        source.write_text(CLOCK)
        words = ["cc", "-shared", "-fPIC", "-O1", "-o", str(self._library), str(source)]
        subprocess.run(words, check=True, capture_output=True)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), CLOCK_VARIABLE: str(self._path)}

    def jump(self, seconds: int) -> None:
        with self._path.open("r+b") as file:
            (ahead,) = struct.unpack("l", file.read())
            file.seek(0)
            file.write(struct.pack("l", ahead + seconds))


class Gang(NamedTuple):
    name: str
    uid: str
    directory: Path
    made_at: float  # monotonic
    is_spared: bool  # none of its own processes is struck
    seconds: str  # its ranks' daemons sleep this long: they carry no other mark


class Storm:
    def __init__(self, plane: ControlPlane, folder: Path, clock: Clock | None, seed: int) -> None:
        self.plane = plane
        self.clock = clock
        self.chance = random.Random(seed)
        self.folder = folder
        self.faults: Counter[str] = Counter()
        self.gangs: list[Gang] = []
        self._names = itertools.count()
        self._timers: list[threading.Timer] = []
        self._shims: Counter[str] = Counter()  # times that watchdog or supervisor were struck
        self._struck: set[tuple[int, int]] = set()  # ranks, by pid and start time

    def run(self, faults: int, *, round_size: int = 20) -> None:
        """Rounds of faults; after each, everything must come to rest and hold what it should."""
        while (left := faults - sum(self.faults.values())) > 0:
            self._make(spared=1, struck=3)
            for _ in range(min(left, round_size)):
                time.sleep(self.chance.choice([0.0, 0.02, 0.1, 0.3]) * self.chance.random())
                self._strike()
            self._settle()
            for gang in self.gangs:
                self._finish(gang)
            self.gangs.clear()

    # Faults

    def _strike(self) -> None:
        kinds = ["plane", "watchdog", "supervisor", "pair", "rank", "rank"]
        if cgroup_for(
            Path("gang"), "1.2."
        ):  # else nobody finds what outlives reaper, watchdog and supervisor
            kinds.append("reaper")
        kind = self.chance.choice([*kinds, "clock"] if self.clock else kinds)
        how = self.chance.choice(["kill", "pause", "stop"])
        if kind == "clock":
            assert self.clock is not None
            self.clock.jump(self.chance.choice([-1, 1]) * self.chance.choice([5, 3600, 86_400]))
            how = "jump"
        elif kind == "plane":
            self._strike_plane(how)
        else:
            gang = self.chance.choice([gang for gang in self.gangs if not gang.is_spared])
            for pid, start_ticks in self._victims(gang, kind):
                self._hit(pid, start_ticks, how)
        self.faults[f"{kind} {how}"] += 1

    def _strike_plane(self, how: str) -> None:
        if how == "kill":
            self.plane.restart()
            return
        os.kill(self.plane.pid, signal.SIGSTOP)
        time.sleep(MAX_STOP_S * self.chance.random())
        os.kill(self.plane.pid, signal.SIGCONT)

    def _victims(self, gang: Gang, kind: str) -> list[tuple[int, int]]:
        if kind == "rank":
            alive = [
                r for r in self._starts(gang) if processes.is_running(r["pid"], r["startTicks"])
            ]
            picked = [self.chance.choice(alive)] if alive else []
            self._struck |= {(r["pid"], r["startTicks"]) for r in picked}
            return [(r["pid"], r["startTicks"]) for r in picked]
        try:
            watchdog, supervisor = map(_named, self.plane.supervision_pids_of(gang.directory))
        except StopIteration:  # it is being replaced
            return []
        if kind == "reaper":
            reaper = processes.parent(watchdog[0])
            is_reaper = processes.command_line(reaper)[3:4] == [b"reaper"]
            return [_named(reaper)] if is_reaper else []
        self._shims[gang.uid] += 1
        victims = {
            "watchdog": [watchdog],
            "supervisor": [supervisor],
            "pair": [watchdog, supervisor],
        }
        return victims[kind]

    def _hit(self, pid: int, start_ticks: int, how: str) -> None:
        if processes.start_ticks(pid) != start_ticks:
            return
        processes.kill(pid, signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        if how == "pause":
            seconds = MAX_STOP_S * self.chance.random()
            timer = threading.Timer(seconds, self._let_go, (pid, start_ticks))
            timer.start()
            self._timers.append(timer)

    def _let_go(self, pid: int, start_ticks: int) -> None:
        if processes.start_ticks(pid) == start_ticks:
            processes.kill(pid, signal.SIGCONT)

    # What runs

    def _make(self, *, spared: int, struck: int) -> None:
        for number in range(spared + struck):
            name = f"t{next(self._names)}"
            seconds = f"{100_000 + os.getpid()}.{time.time_ns()}"
            # A line when it starts and one when it is done; between them it waits for its end.
            script = f"""echo {name} $RANK $ATOLL_ATTEMPT $$ >> {self.folder}/ran
                env -i setsid sleep {seconds} &
                while [ ! -e {self.folder}/{name}.end ]; do sleep 0.1; done
                echo {name} $RANK $ATOLL_ATTEMPT $$ >> {self.folder}/done
                exit $((RANK % 2))"""
            spec = make_spec(script, RANKS, name=name, min=1, max_restarts=RESTARTS)
            self.plane.call("create", spec=msgspec.to_builtins(spec), key=name)
            uid = self.plane.get(name).uid
            directory = self.plane.state / "trainings" / uid
            is_spared = number < spared
            self.gangs.append(Gang(name, uid, directory, time.monotonic(), is_spared, seconds))

    # What must hold

    def _settle(self) -> None:
        """Waits until each gang is what its status says, and is whole."""
        for timer in self._timers:
            timer.join()
        self._timers.clear()
        for gang in self.gangs:
            wait_for(lambda gang=gang: self._is_whole(gang), timeout=CALM_S)

    def _is_whole(self, gang: Gang) -> bool:
        """All ranks run, by /proc and by the journal, and `ready` counts exactly those."""
        training = self.plane.get(gang.name)
        alive = self._alive(gang)
        assert training.status.phase in ("", "pending", "ready"), training.status
        is_true = training.status.world.ready == len(alive)
        stopped = [r for r in alive.values() if processes.stat_fields(r["pid"])[:1] == ["T"]]
        return is_true and len(alive) == RANKS and not stopped

    def _finish(self, gang: Gang) -> None:
        """Ends it: every rank exits with its own code, all of it is told, and nothing is left."""
        (self.folder / f"{gang.name}.end").touch()
        # Ranks with an odd number fail and are started anew, until the training is stopped.
        wait_for(lambda: self._has_ended(gang, 0) and self._has_ended(gang, 2), timeout=CALM_S)
        self.plane.ask(gang.name, cancel=True)
        training = self.plane.until_over(gang.name, timeout=CALM_S)
        records = self._records(gang)
        check_journal(records, time.monotonic() - gang.made_at)
        self._check_told(gang, training, records)
        self._check_ran(gang, records)
        self.plane.until_released(gang.name)
        self.plane.ask(gang.name, delete=True)
        wait_for(lambda: not gang.directory.exists(), timeout=CALM_S)
        try:
            wait_for(lambda: not left_of(gang), timeout=CALM_S)
        except AssertionError:
            left = [described(pid) for pid in left_of(gang)]
            raise AssertionError(f"left of {gang.name}: {left}") from None

    def _has_ended(self, gang: Gang, rank: int) -> bool:
        ends = [r for r in self._records(gang) if r["t"] == "exit" and r["rank"] == rank]
        return bool(ends) and ends[-1]["code"] == 0

    def _check_told(self, gang: Gang, training: Training, records: list[dict[str, Any]]) -> None:
        """The status tells of every rank what the journal has of its last attempt."""
        last = {r["rank"]: r for r in records if r["t"] == "exit"}
        told = {e.rank: e.exit_code for e in training.status.rank_exits}
        assert told == {rank: record["code"] for rank, record in last.items()}, gang.name

    def _check_ran(self, gang: Gang, records: list[dict[str, Any]]) -> None:
        """What ranks wrote themselves: each attempt ran once, as journalled; no end is made up."""
        starts = {(r["rank"], r["attempt"]): r["pid"] for r in records if r["t"] == "start"}
        ends = {(r["rank"], r["attempt"]): r for r in records if r["t"] == "exit"}
        start_ticks = {
            (r["rank"], r["attempt"]): r["startTicks"] for r in records if r["t"] == "start"
        }
        ran, done = self._said("ran", gang), self._said("done", gang)
        assert len(ran) == len({key for key, _ in ran}), f"{gang.name}: an attempt ran twice"
        assert all(starts[key] == pid for key, pid in ran), gang.name
        finished = {key for key, _ in done}
        for key, record in ends.items():
            if record["code"] == 0:
                assert key in finished, f"{gang.name}: {key} is said to have exited 0"
            is_struck = (starts[key], start_ticks[key]) in self._struck
            is_alone = self._shims[gang.uid] == 0 and not is_struck and not record["stopped"]
            if is_alone:
                assert record["code"] == key[0] % 2, f"{gang.name}: the exit of {key} was lost"

    def _said(self, file: str, gang: Gang) -> list[tuple[tuple[int, int], int]]:
        with contextlib.suppress(FileNotFoundError):
            lines = [line.split() for line in (self.folder / file).read_text().splitlines()]
            return [((int(r), int(a)), int(pid)) for name, r, a, pid in lines if name == gang.name]
        return []

    def _records(self, gang: Gang) -> list[dict[str, Any]]:
        """By a link of our own: the journal itself goes when the training is over."""
        journal = self.folder / f"{gang.name}.journal"
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(gang.directory / "journal", journal)
        if not journal.exists():
            return []
        return journal_records(journal)

    def _starts(self, gang: Gang) -> list[dict[str, Any]]:
        return [record for record in self._records(gang) if record["t"] == "start"]

    def _alive(self, gang: Gang) -> dict[int, dict[str, Any]]:
        """The attempts that the journal holds for alive and that really are, by rank."""
        alive: dict[int, dict[str, Any]] = {}
        for record in self._records(gang):
            if record["t"] == "start":
                alive[record["rank"]] = record
            elif record["t"] == "exit":
                alive.pop(record["rank"], None)
        return {n: r for n, r in alive.items() if processes.is_running(r["pid"], r["startTicks"])}


def check_journal(records: list[dict[str, Any]], lasted_s: float) -> None:
    """Every attempt is started once, and after the end of the one before; every one has an end."""
    open_at: dict[int, dict[str, Any]] = {}
    ended: dict[int, float] = {}
    seen: set[tuple[int, int]] = set()
    for record in records:
        rank = record.get("rank", -1)
        if record["t"] == "start":
            assert rank not in open_at, f"rank {rank} was started while it ran"
            assert (rank, record["attempt"]) not in seen, f"{record} is a second start"
            assert record["at"] >= ended.get(rank, 0.0), f"{record} is before the last end"
            seen.add((rank, record["attempt"]))
            open_at[rank] = record
        elif record["t"] == "exit":
            start = open_at.pop(rank)
            assert start["attempt"] == record["attempt"], record
            ran_s = record["at"] - start["at"]
            assert -0.001 <= ran_s <= lasted_s + 1.0, f"{record} ran for {ran_s} s of {lasted_s}"
            ended[rank] = record["at"]
    assert not open_at, f"no end is known of {open_at}"


def left_of(gang: Gang) -> list[int]:
    """Every process that the gang brought about, by its directory, its uid or its daemons."""
    marks = (os.fsencode(gang.directory), gang.seconds.encode())
    return [
        pid
        for pid in processes.all_pids()
        if any(mark in processes.command_line(pid) for mark in marks)
        or processes.environment_of(pid).get(b"ATOLL_UID") == gang.uid.encode()
    ]


def described(pid: int) -> str:
    words = b" ".join(processes.command_line(pid)[-4:]).decode(errors="replace")
    return f"{pid} {processes.stat_fields(pid)[:2]} {words}"


def _named(pid: int) -> tuple[int, int]:
    return pid, processes.start_ticks(pid)
