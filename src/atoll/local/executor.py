"""The executor for this machine: ranks are processes, and each training has its own shim.

The shim's journal is the truth: the executor reads it, hands wishes to the shim and passes on that
something changed. Ranks share CPU and memory of the machine; GPUs they have for themselves. `slots`
limits how many ranks may run at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from atoll.core.checks import check_int
from atoll.core.config import options_of
from atoll.core.errors import AtollError, BackendError, Permanent, Temporary, ValidationError
from atoll.core.executors import Home
from atoll.core.model import SpecModel
from atoll.core.ports import Key, Store
from atoll.core.series import RankUse
from atoll.core.spec import TrainingSpec
from atoll.core.status import (
    BenchSeen,
    Chore,
    LogLine,
    Seen,
    Training,
    Wish,
    sooner,
)
from atoll.core.stores import apart
from atoll.local import processes
from atoll.local.adoption import (
    adopt,
    bury,
    catch_up,
    delete,
    is_buried,
    set_aside,
    write_record,
)
from atoll.local.bench import LocalBench
from atoll.local.capacity import Machine
from atoll.local.devices import Devices, DeviceShare, Held, ids_of, present
from atoll.local.machine_use import UseMeter
from atoll.local.processes import boot_id
from atoll.local.rendezvous_file import read_rendezvous
from atoll.local.rendezvous_view import (
    seen_endpoint,
    seen_mesh,
    wanted_rendezvous,
    withdraw,
)
from atoll.local.seen import EndStalled, next_look_s, seen_rank, stalled_chores, wish_of
from atoll.local.shortage import waiting_words
from atoll.local.stillness import Stillness
from atoll.local.supervision import Supervision
from atoll.rank.launch import TOGETHER, RankPlace, render_launch
from atoll.rank.logs import read_lines, tail_places
from atoll.rank.sinks import FIGURES

# The control plane's own secrets and addresses are not passed on to ranks, nor, where it runs in a
# replica, what that one was told of its launch.
WITHHELD = (
    *("ATOLL_CONFIG", "ATOLL_TOKEN", "ATOLL_URL", "ATOLL_STATE_DIR"),
    *("ATOLL_QUORUM", "ATOLL_RANK_ENV", "ATOLL_ENTRYPOINT_ARGS"),
    *("ATOLL_REPORTS", "ATOLL_REPORTS_TOKEN", "ATOLL_RUN_ID"),
)
IGNORED = (
    *("image", "cpu", "memory", "gpu_models", "min_gpu_memory_gb"),
    *("provider_filter", "topology_spread"),
)
RUNS = "runs"  # the folder of runs with an id, beside that of the ranks
MAX_SLOTS = 10_000
MIN_LOG_BYTES, MAX_LOG_BYTES = 64 * 2**10, 2**40
ROOM_EVERY_S = 2.0  # nobody tells when a machine has room again

log = logging.getLogger(__name__)


def render_gang(
    training: Training,
    wish: Wish,
    *,
    directory: Path,
    host: str,
    rendezvous: dict[str, Any],
    base: dict[str, str],
    started_together: str | None = None,
    devices: Held | None = None,
) -> dict[str, Any]:
    """The document a shim works from. `started_together`: as first told; None: this wish is it."""
    spec = training.spec
    launch = render_launch(training, rank_place(directory))
    filled_in = {
        **dict.fromkeys(launch.size_variables, str(spec.world_size.target)),
        **dict.fromkeys(launch.node_variables, host),
        TOGETHER: spec.env.get(TOGETHER) or started_together or str(wish.size),
    }
    inherited = {
        name: value for name, value in apart(base, launch.env).items() if name not in launch.later
    }
    return {
        "uid": training.uid,
        "version": wish.version,
        "size": wish.size,
        "redo": {str(rank): attempt for rank, attempt in wish.redo.items()},
        "command": launch.command,
        "env": {**inherited, **launch.env, **filled_in},
        "rank_variables": list(launch.rank_variables),
        "working_dir": spec.working_dir,
        "max_restarts": spec.max_restarts,
        "stop_grace_s": spec.stop_grace_s,
        "rendezvous": rendezvous,
        **({} if devices is None else {"devices": devices}),
    }


def rank_place(directory: Path) -> RankPlace:
    """Where ranks run. Their meeting point is known once the supervisor has leased a port."""
    return RankPlace(
        python=sys.executable,
        shell="/bin/sh",
        source=str(directory / "source"),
        packages=str(directory / "packages"),
        has_atoll=True,
        rendezvous_uri=f"file://{directory}/rendezvous",
        runs_uri=(directory.parents[1] / RUNS).as_uri(),
        meeting=None,
        is_one_host=True,
        figures=(directory / FIGURES).as_uri(),
    )


class LocalOptions(SpecModel, frozen=True):
    """What `[executors.local]` may say."""

    slots: int | None = None  # largest number of ranks at the same time
    log_bytes: int | None = None  # kept of the log of each rank, the newest; None: 64 MiB
    gpus: int | list[int | str] | None = None  # that ranks may use; None: all there are

    def __post_init__(self) -> None:
        if self.log_bytes is not None:
            check_int("log_bytes", self.log_bytes, MIN_LOG_BYTES, MAX_LOG_BYTES)
        if self.slots is not None:
            check_int("slots", self.slots, 1, MAX_SLOTS)
        if self.gpus is not None:
            ids_of("gpus", self.gpus)


class LocalBackend:
    """The Executor of `core/ports.py` for this machine."""

    name = "local"
    restarts_stalled = True

    def __init__(
        self,
        root: Path,
        *,
        slots: int | None = None,
        log_bytes: int | None = None,
        gpus: Sequence[str] | None = None,
    ) -> None:
        self._root = root
        self._devices = Devices(present(os.environ) if gpus is None else gpus)
        self._slots = slots
        self._log_bytes = log_bytes
        self._host = socket.gethostname()
        self._gangs: dict[str, Supervision] = {}
        self._held: dict[str, int] = {}  # ranks admitted, by training
        self._waiting: dict[str, Key] = {}  # trainings that found too little room
        self._changed: asyncio.Queue[Key] = asyncio.Queue()
        self._bench = LocalBench(root, self._host)
        self._machine = Machine()
        self._meter = UseMeter()
        self._stillness = Stillness()
        self.set_aside: list[str] = []  # what is of no known training: a sentence for each

    @classmethod
    def configured(cls, name: str, options: dict[str, Any], home: Home) -> LocalBackend:
        """An executor with the options of `[executors.local]`."""
        table = options_of(LocalOptions, options)
        gpus = None if table.gpus is None else ids_of("gpus", table.gpus)
        root = home.state_dir / "ranks"
        return cls(root, slots=table.slots, log_bytes=table.log_bytes, gpus=gpus)

    def check(self, spec: TrainingSpec) -> None:
        """Refuses more ranks than this machine can ever hold, and code: its ranks run in place."""
        if spec.code is not None:
            expected = f"expected none: ranks on {self._host} run where the code is"
            raise ValidationError("code", f"{spec.code.files} files", expected)
        ranks, why = self._machine.most()
        if (target := spec.world_size.target) > ranks:
            raise ValidationError(
                "world_size.target", target, f"{self._host} can hold {ranks} ranks at most: {why}"
            )

    def ignored(self, spec: TrainingSpec) -> dict[str, str]:
        table = dict.fromkeys(IGNORED, "ranks are processes of this machine, and share it")
        if self._devices.share(spec.resources.gpu_count, spec.env) is None:
            table["gpu_count"] = (
                "this machine has no GPU that is known, see [executors.local] gpus in atoll.toml"
            )
        return table

    def gone(self, spec: TrainingSpec) -> str:
        where = spec.working_dir or "/"
        directory = None if spec.source is None else spec.source.directory
        scripts = [word for word in spec.command or () if word.endswith((".py", ".sh"))]
        for path in (where, directory or where, *(os.path.join(where, s) for s in scripts[:1])):
            if not os.path.exists(path):
                return path
        return ""

    async def probe(self) -> None:
        """Never raises: this machine is always reachable."""

    async def start(self, store: Store) -> None:
        """Takes over the gangs of an earlier control plane.

        What the store does not know is adopted, or set aside and told of; what was removed is
        cleared away.
        """
        stored = {training.uid: training for training in await store.list()}
        for directory in self._directories():
            gang = Supervision(directory, lambda: None)
            try:
                if is_buried(directory):
                    await self._delete(gang)
                elif directory.name not in stored:
                    await adopt(directory, store)
                elif not stored[directory.name].status.phase.is_terminal:
                    await catch_up(directory, stored[directory.name], store)
                if gang.is_asked():
                    self._held[directory.name] = _holds(gang)
                    self._devices.take_over(directory.name, gang.gang().get("devices", {}))
                    self._devices.keep(directory.name, _holds(gang))
            except Temporary as error:  # it is tried again at the next start
                log.warning("%s: %s", directory, error)
            except (AtollError, ValueError) as error:
                self.set_aside.append(set_aside(directory, str(error)))
                log.warning("%s", self.set_aside[-1])

    async def clear_all(self) -> None:
        """Ends and deletes every gang: for an owner that is gone."""
        for directory in self._directories():
            with contextlib.suppress(Temporary):
                await self._delete(Supervision(directory, lambda: None))

    def _directories(self) -> list[Path]:
        """The directories of gangs; empty ones are removed."""
        if not self._root.is_dir():
            return []
        for directory in self._root.iterdir():
            with contextlib.suppress(OSError):
                directory.rmdir()
        return sorted(directory for directory in self._root.iterdir() if directory.is_dir())

    async def _delete(self, gang: Supervision) -> None:
        await gang.clear()
        await asyncio.to_thread(delete, gang.directory)

    async def close(self) -> None:
        """Closes the connections to the shims; they and their ranks keep running."""
        await self._bench.close()
        for gang in self._gangs.values():
            gang.close()

    async def apply(self, training: Training, wish: Wish) -> None:
        gang = self._gang(training)
        async with gang.turn:
            if wish.size == 0 and not gang.is_asked():
                return
            if training.status.has_run and not gang.is_asked():
                raise Permanent(f"{gang.directory} is gone, and with it all record of the ranks")
            if wish.size > self._room(training.uid):
                raise Temporary("another training took the slots", retry_after_s=0.1)
            share = self._share(training)
            devices = share and self._devices.assign(training.uid, wish.size, share)
            if share is not None and devices is None:
                raise Temporary("another training took the GPUs", retry_after_s=0.1)
            self._held[training.uid] = max(wish.size, _holds(gang))
            if wish.version > gang.gang().get("version", 0):
                write_record(gang.directory, training)
            self._place_source(training, gang.directory)
            base = {k: v for k, v in os.environ.items() if k not in WITHHELD}
            before = gang.gang() if gang.is_asked() else {}
            document = render_gang(
                training,
                wish,
                directory=gang.directory,
                host=self._host,
                rendezvous=wanted_rendezvous(training, self._host, before.get("rendezvous", {})),
                base=before.get("env", base),
                started_together=before.get("env", {}).get(TOGETHER),
                devices=devices,
            )
            await gang.wish({**document, "log_bytes": self._log_bytes})
        self._tell_waiting()

    async def observe(self, training: Training) -> Seen:
        try:
            return self._seen(training, self._gang(training))
        except OSError as error:  # of files, most likely
            raise Temporary(waiting_words("look at the ranks", error.strerror)) from error

    def _seen(self, training: Training, gang: Supervision) -> Seen:
        is_asked = gang.is_asked()
        is_supervised = is_asked and gang.is_supervised()
        if is_asked:
            self._give_back(training.uid, _holds(gang))
        room, message, again_in_s = self._room_for(training)
        if room is not None and room < training.spec.world_size.target:
            self._waiting[training.uid] = training.key
        seen = Seen(
            room=room,
            message=gang.shortage or message,
            bench=self._bench_seen(training),
            again_in_s=again_in_s,
        )
        if not is_asked:
            return seen
        state = gang.state
        quiet = self._quiet_s(training, gang)
        error = read_rendezvous(gang.directory).get("error")
        return replace(
            seen,
            ranks=[
                replace(
                    seen_rank(training.name, self._host, attempt, state.past.get(rank, ())),
                    quiet_s=quiet.get(rank),
                )
                for rank, attempt in state.attempts.items()
            ],
            chores=stalled_chores(training, state, quiet),
            again_in_s=sooner(again_in_s, next_look_s(training)),
            wish=wish_of(state),
            is_supervised=is_supervised,
            message=gang.shortage or str(error or message),
            rendezvous_endpoint=seen_endpoint(training, gang.directory),
            mesh=seen_mesh(training, gang.directory),
            at=state.time(boot_id(), time.monotonic()),
        )

    def _quiet_s(self, training: Training, gang: Supervision) -> dict[int, float]:
        """For how long each rank has not moved, if that is asked for."""
        if training.spec.stall_s is None or training.status.phase.is_terminal:
            return {}
        attempts, now = gang.state.attempts.values(), time.monotonic()
        return self._stillness.quiet_s(training.uid, gang.directory, attempts, now)

    async def perform(self, training: Training, chore: Chore) -> None:
        """Ends the attempt of a rank that does not move; its supervisor starts the next."""
        assert isinstance(chore, EndStalled)
        attempt = self._gang(training).state.attempts.get(chore.rank)
        is_it = attempt is not None and attempt.attempt == chore.attempt and attempt.exit is None
        if attempt is not None and is_it and processes.born(attempt.pid) == attempt.born:
            processes.kill_group(attempt.pid, signal.SIGKILL)

    async def measure(self, training: Training) -> None:
        key = training.key
        self._bench.start(training.uid, lambda: self._changed.put_nowait(key))

    async def release(self, training: Training) -> None:
        gang = self._gang(training)
        await self._bench.stop(training.uid)
        async with gang.turn:
            rendezvous = gang.gang().get("rendezvous", {})
            if gang.is_asked() and not is_buried(gang.directory):
                write_record(gang.directory, training)
            await gang.clear()
        self._gangs.pop(training.uid, None)
        self._held.pop(training.uid, None)
        self._devices.keep(training.uid, 0)
        self._waiting.pop(training.uid, None)
        self._stillness.forget(training.uid)
        self._tell_waiting()
        if not self._held:  # others on this host wait for the same keys
            with contextlib.suppress(BackendError):  # an etcd that is down must not delay this
                await withdraw(rendezvous)

    async def purge(self, training: Training) -> None:
        directory = self._root / training.uid
        bury(directory)
        await self.release(training)
        await asyncio.to_thread(delete, directory)

    async def changes(self) -> AsyncIterator[Key]:
        while True:
            yield await self._changed.get()

    async def logs(
        self,
        training: Training,
        *,
        ranks: Sequence[int] | None = None,
        tail: int | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        places = {} if tail is None else await self.log_places(training, tail, ranks=ranks)
        async for line in self.logs_after(training, places, ranks=ranks, follow=follow):
            yield line

    async def log_places(
        self, training: Training, tail: int, *, ranks: Sequence[int] | None = None
    ) -> dict[int, int]:
        return tail_places(self.log_folder(training), ranks, tail)

    def logs_after(
        self,
        training: Training,
        places: Mapping[int, int],
        *,
        ranks: Sequence[int] | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        return read_lines(self.log_folder(training), places, ranks=ranks, follow=follow)

    def rank_place(self, training: Training) -> RankPlace:
        return rank_place(self._root / training.uid)

    def machine_use(self) -> dict[str, list[RankUse]]:
        """What the ranks that live use of this machine, by the uid of their training."""
        use: dict[str, list[RankUse]] = {}
        living = [
            (uid, attempt)
            for uid, gang in list(self._gangs.items())
            if gang.is_asked()
            for attempt in gang.state.alive()
        ]
        figures = self._meter.measure([attempt for _, attempt in living])
        for uid, attempt in living:
            if attempt.pid in figures:
                own = RankUse(attempt.rank, attempt.attempt, figures[attempt.pid])
                use.setdefault(uid, []).append(own)
        return use

    def log_folder(self, training: Training) -> Path:
        return self._root / training.uid / "logs"

    def _gang(self, training: Training) -> Supervision:
        if training.uid not in self._gangs:
            key = training.key
            self._gangs[training.uid] = Supervision(
                self._root / training.uid, lambda: self._changed.put_nowait(key)
            )
        return self._gangs[training.uid]

    def _room(self, uid: str) -> int:
        if self._slots is None:
            return sys.maxsize
        return self._slots - sum(held for other, held in self._held.items() if other != uid)

    def _give_back(self, uid: str, needed: int) -> None:
        """Frees the slots beyond `needed`, which counts ranks that are still being stopped."""
        has_devices = self._devices.keep(uid, needed)
        if needed < self._held.get(uid, 0) or has_devices:
            self._held[uid] = needed
            self._tell_waiting()

    def _room_for(self, training: Training) -> tuple[int | None, str, float | None]:
        """How many ranks it may hold, what bounds them, and when to look again if nobody tells."""
        uid, message = training.uid, ""
        room: int | None = None
        if self._slots is not None:
            room = max(self._room(uid), 0)
            message = (
                f"{sum(self._held.values())} of {self._slots} slots of {self._host} are in use"
            )
        share = self._share(training)
        if share is not None:
            ranks = self._devices.ranks(uid, share)
            if room is None or ranks < room:
                least = training.spec.world_size.min
                room, message = ranks, self._devices.in_words(share, self._host, least)
        held = self._held.get(uid, 0)
        if training.spec.world_size.target > held:
            wanted = min(training.spec.world_size.target, sys.maxsize if room is None else room)
            left, why = self._machine.free()
            if held + left < wanted:
                return held + left, f"{self._host} has too little left: {why}", ROOM_EVERY_S
        return room, message, None

    def _share(self, training: Training) -> DeviceShare | None:
        spec = training.spec
        return self._devices.share(spec.resources.gpu_count, spec.env)

    def _tell_waiting(self) -> None:
        for key in self._waiting.values():
            self._changed.put_nowait(key)
        self._waiting.clear()

    def _place_source(self, training: Training, directory: Path) -> None:
        source = training.spec.source
        if source is None:
            return
        path = directory / "source" / source.filename
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            draft = path.with_name(path.name + ".new")
            draft.write_bytes(source.content)
            draft.replace(path)

    def _bench_seen(self, training: Training) -> BenchSeen | None:
        return None if training.spec.bench.mode == "off" else self._bench.seen(training.uid)


def _holds(gang: Supervision) -> int:
    """The number of ranks that a gang has, or may have under its wish."""
    wanted: int = gang.gang().get("size", 0)
    return max([wanted, *(attempt.rank + 1 for attempt in gang.state.alive())])
