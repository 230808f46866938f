"""The executor for this machine: ranks are processes, and each training has its own supervisor.

The supervisor's journal is the truth: the executor reads it, hands the desired state to the
supervisor and passes on that something changed. Slots, CPUs and memory that ranks ask for are
counted when they are admitted, and not fenced; GPUs they have for themselves. The `StartQueue` has
the order in which trainings get them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from atoll.agent.metric_sinks import METRICS
from atoll.agent.records import AttemptFacts, Facts
from atoll.agent.stack_text import summary_of
from atoll.backends.folder_logs import FolderLogs
from atoll.backends.launch import (
    ETCD_BACKEND,
    NO_BACKEND,
    TOGETHER,
    RankLayout,
    render_launch,
    store_uri_of,
    unset_variables,
)
from atoll.backends.local import processes
from atoll.backends.local.adoption import (
    Reserve,
    adopt,
    catch_up,
    delete,
    find_record,
    is_marked_deleted,
    lock_directory,
    mark_deleted,
    quarantine,
    read_record,
    write_record,
)
from atoll.backends.local.bench import LocalBench
from atoll.backends.local.capacity import (
    CPU,
    MILLI,
    SLOTS,
    Assignment,
    Capacity,
    Devices,
    DeviceShare,
    Machine,
    StartQueue,
    Waiting,
    amount_text,
    count_visible,
    describe_lack,
    describe_use,
    fitting,
    ids_of,
    present,
    requested,
)
from atoll.backends.local.journal import time_of
from atoll.backends.local.machine_use import IdleTracker, UseMeter
from atoll.backends.local.options import LIMITS_FILE, LocalOptions, amounts_of, read_limits
from atoll.backends.local.processes import boot_id
from atoll.backends.local.protocol import (
    DESIRED_FILE,
    read_stacks,
    result_file,
    stacks_file,
    waiting_message,
)
from atoll.backends.local.rank_access import open_process, run_in_rank
from atoll.backends.local.rendezvous import find_etcd, read_rendezvous
from atoll.backends.local.stacks import keep_stacks, stored_stacks, take_stacks
from atoll.backends.local.supervisor_client import RESTORED_S, SupervisorClient
from atoll.backends.reader import read_result
from atoll.backends.records import desired_of
from atoll.core.config import options_of
from atoll.core.errors import (
    AtollError,
    BackendError,
    Conflict,
    Permanent,
    Temporary,
    ValidationError,
)
from atoll.core.executors import Limits, PlaneContext, ResourceUse
from atoll.core.mesh import READY_DIR, MeshState, split_endpoint
from atoll.core.metrics import RankUsage
from atoll.core.plan import check_again_s
from atoll.core.ports import Key, StopCause, Store, ignore, refuse
from atoll.core.rank_access import ExecRequest, ExecResult
from atoll.core.spec import TrainingSpec
from atoll.core.status import (
    DesiredState,
    Followup,
    MeshStatus,
    Observation,
    ObservedBench,
    ObservedRank,
    RankStatus,
    Training,
    sooner,
)
from atoll.core.stores import own_keys_only
from atoll.files.ownership import make_private
from atoll.files.writing import write_file
from atoll.logs.files import LogGrowth
from atoll.mesh.etcd import EtcdKeys

# The control plane's own secrets and addresses are not passed on to ranks, nor, where it runs in a
# replica, the variables of its own launch.
WITHHELD = (
    *("ATOLL_CONFIG", "ATOLL_TOKEN", "ATOLL_URL"),
    *("ATOLL_QUORUM", "ATOLL_RANK_ENV", "ATOLL_ENTRYPOINT_ARGS"),
    *("ATOLL_REPORTS", "ATOLL_REPORTS_TOKEN", "ATOLL_RUN_ID"),
)
RUNS = "runs"  # the folder of runs with an id, beside that of the ranks
NO_GPU = "this machine has no GPU that is known, see [executors.local] gpus in atoll.toml"
SHARED = "ranks are processes of this machine, and share it"
SUPPORTS = (
    refuse("code", f"expected none: ranks on {socket.gethostname()} run where the code is"),
    *(ignore(field, SHARED) for field in ("image", "gpu_models")),
    *(ignore(f, SHARED) for f in ("min_gpu_memory_gb", "provider_filter", "topology_spread")),
    ignore(
        "gpu_count",
        NO_GPU,
        when=lambda spec, devices: devices.share(spec.resources.gpu_count, spec.env) is None,
    ),
)
CONFIGURED_ETCD = "ATOLL_ETCD_ENDPOINT"  # in the control plane's environment: used by all trainings
CAPACITY_EVERY_S = 2.0  # nobody reports when a machine has capacity again; a reading takes 1 ms

log = logging.getLogger(__name__)


def render_desired(
    training: Training,
    desired: DesiredState,
    *,
    directory: Path,
    host: str,
    rendezvous: dict[str, Any],
    base: dict[str, str],
    started_together: str | None = None,
    devices: Assignment | None = None,
    machine_devices: int = 0,
) -> dict[str, Any]:
    """The desired state as a supervisor reads it. `started_together`: as the first one had it.

    `devices`: of each rank; None: ranks share what their environment names, else all
    `machine_devices`.
    """
    spec, shared = training.spec, None
    if devices is None:
        shared = count_visible(base | spec.nccl_env | spec.env, machine_devices)
    launch = render_launch(training, rank_layout(directory, shared))
    filled_in = {
        **dict.fromkeys(launch.size_variables, str(spec.world_size.target)),
        **dict.fromkeys(launch.node_variables, host),
        TOGETHER: spec.env.get(TOGETHER) or started_together or str(desired.size),
    }
    inherited = {
        name: value
        for name, value in own_keys_only(base, launch.env).items()
        if name not in launch.later
    }
    return {
        "uid": training.uid,
        "version": desired.version,
        "size": desired.size,
        "discarded": {str(rank): attempt for rank, attempt in desired.discarded_attempts.items()},
        "command": launch.command,
        "env": {**inherited, **launch.env, **filled_in},
        "rank_variables": list(launch.rank_variables),
        "defaults": launch.defaults,
        "local_ranks": launch.local_ranks,
        "working_dir": spec.working_dir,
        "max_restarts": spec.max_restarts,
        "stop_grace_s": spec.stop_grace_s,
        "rendezvous": rendezvous,
        **({} if devices is None else {"devices": devices}),
    }


def rank_layout(directory: Path, shared_devices: int | None = None) -> RankLayout:
    """Where ranks run. Their meeting point is known once the supervisor has leased a port."""
    return RankLayout(
        python=sys.executable,
        shell="/bin/sh",
        source=str(directory / "source"),
        packages=str(directory / "packages"),
        has_atoll=True,
        rendezvous_uri=f"file://{directory}/rendezvous",
        runs_uri=(directory.parents[1] / RUNS).as_uri(),
        meeting=None,
        is_one_host=True,
        shared_devices=shared_devices,
        metrics_uri=(directory / METRICS).as_uri(),
    )


class LocalBackend(FolderLogs):
    """The Executor of this machine."""

    name = "local"
    options_type = LocalOptions
    SUPPORTS = SUPPORTS

    def __init__(
        self,
        root: Path,
        *,
        slots: int | None = None,
        limits: Mapping[str, int] | None = None,
        log_bytes: int | None = None,
        gpus: Sequence[str] | None = None,
    ) -> None:
        self.root = root
        self._state_dir: Path | None = None  # of the control plane, which ranks find there
        self._devices = Devices(
            present(os.environ) if gpus is None else gpus, is_configured=gpus is not None
        )
        self.options = self._devices  # all that SUPPORTS asks of this machine
        # Ranks that ask for none see all that the machine has.
        self._machine_devices = len(present({})) or len(set(self._devices.ids))
        self._machine = Machine()
        self._limits = {**self._machine.totals(), **(limits or {})}
        if slots is not None:
            self._limits[SLOTS] = slots
        self._log_bytes = log_bytes
        self._host = socket.gethostname()
        self._supervisors: dict[str, SupervisorClient] = {}
        self._assigned: dict[str, int] = {}  # ranks admitted, by training
        self._each: dict[str, dict[str, int]] = {}  # what one rank of a training takes
        self._keys: dict[str, Key] = {}  # by uid, of the same trainings
        self._queue = StartQueue()
        self._changed: asyncio.Queue[Key] = asyncio.Queue()
        self._bench = LocalBench(root, self._host)
        self._meter = UseMeter()
        self._idle = IdleTracker()
        self._reserve = Reserve(root.parent)
        self._stacks_turn = asyncio.Lock()
        self._quarantined: list[str] = []  # what is of no known training: a sentence for each

    @classmethod
    def configured(cls, name: str, options: dict[str, Any], home: PlaneContext) -> LocalBackend:
        """An executor with the options of `[executors.local]`."""
        table = options_of(LocalOptions, options)
        gpus = None if table.gpus is None else ids_of("gpus", table.gpus)
        root = home.state_dir / "ranks"
        limits = {**table.limits, **read_limits(home.state_dir)}
        local = cls(root, limits=limits, log_bytes=table.log_bytes, gpus=gpus)
        local._state_dir = home.state_dir
        return local

    def check(self, spec: TrainingSpec) -> None:
        """Refuses more ranks than this machine can ever hold, too."""
        super().check(spec)
        ranks, why = self._machine.most()
        if (target := spec.world_size.target) > ranks:
            raise ValidationError(
                "world_size.target", target, f"{self._host} can hold {ranks} ranks at most: {why}"
            )
        self._check_amounts(spec)

    def _check_amounts(self, spec: TrainingSpec) -> None:
        """Refuses what the machine does not have for the fewest ranks that the training runs with.
        A training with too many ranks for the slots waits: that limit is not the machine's."""
        least, needs = spec.world_size.min, spec.resources
        for name, amount in requested(needs).items():
            total = self._limits.get(name)
            if name != SLOTS and total is not None and least * amount > total:
                is_own = total == self._machine.totals().get(name)
                limit = "" if is_own else " for all ranks ('atoll limits')"
                ranks = f"{limit}, and {least} ranks" if least > 1 else f"{limit}, and a rank"
                asked = amount_text(name, least * amount)
                expected = f"{self._host} has {amount_text(name, total)}{ranks} would need {asked}"
                raise ValidationError(name, getattr(needs, name), expected)
        share = self._devices.share(needs.gpu_count, spec.env)
        if share is not None and least * share.each > len(share.of):
            expected = f"{self._host} has {len(share.of)} GPUs, and {least} ranks would need"
            raise ValidationError("gpu_count", needs.gpu_count, f"{expected} {least * share.each}")

    def check_gpus(self, spec: TrainingSpec) -> None:
        count = spec.resources.gpu_count
        is_known = self._devices.is_configured or self._devices.share(count, spec.env) is not None
        if count and not is_known:
            remedy = "expected 0, or gpus = 0 in that file to train on the CPU"
            raise ValidationError("gpu_count", count, f"{NO_GPU}: {remedy}")

    def set_limits(self, limits: Limits) -> None:
        changes = amounts_of(limits.slots, limits.cpu, limits.memory)
        self._limits |= changes
        if self._state_dir is not None:
            kept = {**read_limits(self._state_dir), **changes}
            write_file(self._state_dir / LIMITS_FILE, json.dumps(kept).encode())
        for key in self._keys.values():  # also those that could never start until now
            self._changed.put_nowait(key)

    def capacity(self) -> list[ResourceUse]:
        units = {CPU: MILLI}
        uses = [
            ResourceUse(
                name=name,
                used=self._used(name) / units.get(name, 1),
                total=total / units.get(name, 1),
            )
            for name, total in self._limits.items()
        ]
        if self._devices.ids:
            free = len(self._devices.free(DeviceShare(1, self._devices.ids)))
            total = len(self._devices.ids)
            uses.append(ResourceUse(name="gpus", used=total - free, total=total))
        return uses

    def missing_path(self, spec: TrainingSpec) -> str | None:
        where = spec.working_dir or "/"
        directory = None if spec.source is None else spec.source.directory
        scripts = [part for part in spec.command or () if part.endswith((".py", ".sh"))]
        paths = (where, directory or where, *(os.path.join(where, s) for s in scripts[:1]))
        return next((path for path in paths if not os.path.exists(path)), None)

    def notes(self) -> Sequence[str]:
        return self._quarantined

    def renew_reserve(self) -> None:
        self._reserve.renew()

    async def start(self, store: Store) -> None:
        """Takes over the ranks of an earlier control plane.

        What the store does not know is adopted, or quarantined and reported; what was removed is
        deleted.
        """
        self.renew_reserve()
        snapshot = await store.snapshot()
        stored, uids = {training.uid: training for training in snapshot.active}, snapshot.uids
        for directory in self._directories():
            supervisor = SupervisorClient(directory, lambda: None)
            try:
                if is_marked_deleted(directory):
                    await self._delete(supervisor)
                elif directory.name not in uids:
                    await adopt(directory, store)
                elif (known := stored.get(directory.name)) and not known.status.phase.is_terminal:
                    await catch_up(directory, known, store)
                if supervisor.is_requested():
                    self._assigned[directory.name] = _holds(supervisor)
                    self._devices.take_over(
                        directory.name, supervisor.document().get("devices", {})
                    )
                    self._devices.keep(directory.name, _holds(supervisor))
            except Temporary as error:  # it is tried again at the next start
                log.warning("%s: %s", directory, error)
            except (AtollError, ValueError) as error:
                self._quarantined.append(quarantine(directory, str(error)))
                log.warning("%s", self._quarantined[-1])
        for training in stored.values():  # all of them before the first may start
            if training.executor == self.name:
                self._enter_queue(training)

    async def clear_all(self) -> None:
        """Ends and deletes everything: for an owner that has ended."""
        for directory in self._directories():
            with contextlib.suppress(Temporary):
                await self._delete(SupervisorClient(directory, lambda: None))

    def _directories(self) -> list[Path]:
        """The directories of trainings; empty ones are removed."""
        if not self.root.is_dir():
            return []
        for directory in self.root.iterdir():
            with contextlib.suppress(OSError):
                directory.rmdir()
        return sorted(directory for directory in self.root.iterdir() if directory.is_dir())

    async def _delete(self, supervisor: SupervisorClient) -> None:
        await supervisor.clear()
        await asyncio.to_thread(delete, supervisor.directory)

    async def close(self) -> None:
        """Closes the connections to the supervisors; they and their ranks keep running."""
        await self._bench.close()
        for supervisor in self._supervisors.values():
            supervisor.close()

    async def apply(self, training: Training, desired: DesiredState) -> None:
        if not self.is_shared:
            await self._apply(training, desired)
            return
        async with lock_directory(self.root / training.uid):
            await self._apply(training, desired)

    async def _apply(self, training: Training, desired: DesiredState) -> None:
        supervisor = self._supervisor(training)
        async with supervisor.turn:
            if desired.size == 0 and not supervisor.is_requested():
                return
            if training.status.has_run:
                if (detail := supervisor.damage()) and supervisor.restore():
                    raise _being_restored(detail)
                if not supervisor.facts.version:
                    raise Permanent(f"all record of the ranks in {supervisor.directory} is lost")
            assigned = self._assigned.get(training.uid, 0)
            each = self._note_needs(training)
            if desired.size > assigned + fitting(each, self._available()):
                raise Temporary("another training took what is left", retry_after_s=0.1)
            share = self._share(training)
            devices = share and self._devices.assign(training.uid, desired.size, share)
            if share is not None and devices is None:
                raise Temporary("another training took the GPUs", retry_after_s=0.1)
            self._assigned[training.uid] = max(desired.size, _holds(supervisor))
            is_new = desired.version > supervisor.document().get("version", 0)
            if is_new:
                write_record(
                    supervisor.directory, training, self._reserve if desired.size == 0 else None
                )
            self._write_source(training, supervisor.directory)
            base = {k: v for k, v in os.environ.items() if k not in WITHHELD}
            if self._state_dir is not None:
                base["ATOLL_STATE_DIR"] = str(self._state_dir)
            before = supervisor.document() if supervisor.is_requested() else {}
            document = render_desired(
                training,
                desired,
                directory=supervisor.directory,
                host=self._host,
                rendezvous=rendezvous_of(training, self._host, before.get("rendezvous", {})),
                base=before.get("env", base),
                started_together=before.get("env", {}).get(TOGETHER),
                devices=devices,
                machine_devices=self._machine_devices,
            )
            document["log_bytes"] = self._log_bytes
            if is_new and desired.size == 0:
                self._reserve.save(
                    supervisor.directory / DESIRED_FILE, json.dumps(document).encode()
                )
            await supervisor.apply(document)
        self._enter_queue(training)
        self._wake_next()

    async def observe(self, training: Training) -> Observation:
        try:
            return self._observed(training, self._supervisor(training))
        except OSError as error:  # of files, most likely
            raise Temporary(waiting_message("observe the ranks", error.strerror)) from error

    def _observed(self, training: Training, supervisor: SupervisorClient) -> Observation:
        is_over, is_led = training.status.phase.is_terminal, False
        if training.status.has_run and (detail := self._lost(training, supervisor)):
            is_led = supervisor.restore()
            # What is to end need not be restored for that.
            if is_led and not training.is_cancelling and not is_over:
                raise _being_restored(detail)
        is_requested = supervisor.is_requested()
        is_supervised = (is_requested and supervisor.is_supervised()) or (is_led and is_over)
        if is_requested:
            self._give_back(training.uid, _holds(supervisor))
        if self._enter_queue(training):
            self._wake_next()
        capacity, message, again_in_s = self._capacity_for(training)
        observation = Observation(
            capacity=capacity,
            message=supervisor.shortage or message,
            bench=self._observed_bench(training),
            again_in_s=again_in_s,
            is_supervised=is_supervised,
        )
        if not is_requested:
            return observation
        facts = supervisor.facts
        silent = self._silent_s(training, supervisor)
        error = read_rendezvous(supervisor.directory).get("error")
        return replace(
            observation,
            ranks=[
                _with_idle(training, rank, silent[rank.rank], supervisor.directory)
                if rank.rank in silent
                else rank
                for rank in supervisor.memory.observe(training, facts, self._host)
            ],
            followups=_stalled(training, supervisor.directory, facts, silent),
            again_in_s=sooner(again_in_s, _next_idle_check_s(training)),
            desired=desired_of(facts),
            message=supervisor.shortage or str(error or message),
            rendezvous_endpoint=observed_endpoint(training, supervisor.directory),
            mesh=observed_mesh(training, supervisor.directory),
            at=time_of(facts, boot_id(), time.monotonic()),
        )

    def _lost(self, training: Training, supervisor: SupervisorClient) -> str:
        """What is amiss with the files of a training that has run. One that was released has none,
        but for its directory."""
        is_over = training.status.phase.is_terminal
        if is_over and not supervisor.is_requested() and supervisor.directory.is_dir():
            return ""
        return supervisor.damage()

    def _silent_s(self, training: Training, supervisor: SupervisorClient) -> dict[int, float]:
        """For how long each rank has not moved, if that is asked for."""
        if training.spec.stall_s is None or training.status.phase.is_terminal:
            return {}
        running, now = supervisor.facts.running(), time.monotonic()
        return self._idle.idle_s(training.uid, supervisor.directory, running, now)

    async def perform(self, training: Training, followup: Followup) -> None:
        """Takes the stacks of a rank that does not move. If it is to be restarted, ends its
        attempt: its supervisor starts the next."""
        assert isinstance(followup, Stalled)
        supervisor = self._supervisor(training)
        one = supervisor.facts.attempt(followup.rank, followup.attempt)
        if one is None or not one.is_running:
            return
        if read_stacks(supervisor.directory, one.rank, one.attempt) is None:
            cause = f"it made no progress for {followup.idle_s:.0f} s"
            await asyncio.to_thread(keep_stacks, supervisor.directory, [one], cause)
            self._changed.put_nowait(training.key)  # the status shows where it is
        if followup.is_ended and processes.start_ticks(one.pid) == one.start_ticks:
            processes.kill_group(one.pid, signal.SIGKILL)

    async def take_stacks(
        self, training: Training, ranks: Sequence[RankStatus]
    ) -> list[dict[str, Any]]:
        facts, numbers = self._supervisor(training).facts, {rank.rank for rank in ranks}
        running = [one for one in facts.running() if one.rank in numbers]
        async with self._stacks_turn:  # processes that were forked share the file of their dumps
            return await asyncio.to_thread(lambda: list(take_stacks(running)))

    async def stored_stacks(self, training: Training) -> list[dict[str, Any]]:
        return await asyncio.to_thread(stored_stacks, self.root / training.uid)

    async def exec(self, training: Training, rank: RankStatus, request: ExecRequest) -> ExecResult:
        one = self._current(training, rank)
        return await run_in_rank(
            one.pid, one.start_ticks, request.command, request.stdin, request.timeout_s
        )

    async def kill(self, training: Training, rank: RankStatus, number: int) -> None:
        one = self._current(training, rank)
        with open_process(one.pid, one.start_ticks) as pidfd:
            signal.pidfd_send_signal(pidfd, number)

    def _current(self, training: Training, rank: RankStatus) -> AttemptFacts:
        """The attempt of a rank that runs. Raises Conflict if none does."""
        one = self._supervisor(training).facts.current(rank.rank)
        if one is None or not one.is_running:
            raise Conflict(f"rank {rank.rank} of {training.name!r} does not run")
        return one

    async def measure(self, training: Training) -> None:
        key = training.key
        self._bench.start(training.uid, lambda: self._changed.put_nowait(key))

    async def find(self, job_name: str, uid: str | None) -> Training | None:
        return find_record(self.root, job_name, uid)

    async def stop_cause(self, training: Training) -> StopCause:
        with contextlib.suppress(Permanent):
            if record := read_record(self.root / training.uid):
                return StopCause(record.status.failing, record.status.failing_message)
        return StopCause()

    async def release(self, training: Training) -> None:
        directory = self.root / training.uid
        if not self.is_shared:
            await self._release(training)
        elif (directory / DESIRED_FILE).exists():  # its files stay, with how it ended
            async with lock_directory(directory):
                write_record(directory, training)

    async def _release(self, training: Training) -> None:
        supervisor = self._supervisor(training)
        await self._bench.stop(training.uid)
        async with supervisor.turn:
            rendezvous = supervisor.document().get("rendezvous", {})
            if supervisor.is_requested() and not is_marked_deleted(supervisor.directory):
                write_record(supervisor.directory, training, self._reserve)
            status = training.status
            await supervisor.clear(has_run=status.desired is not None and not status.is_released)
        self._supervisors.pop(training.uid, None)
        self._assigned.pop(training.uid, None)
        self._each.pop(training.uid, None)
        self._keys.pop(training.uid, None)
        self._devices.keep(training.uid, 0)
        self._queue.remove(training.uid)
        self._idle.forget(training.uid)
        self._wake_next()
        if not self._assigned:  # others on this host wait for the same keys
            with contextlib.suppress(BackendError):  # an etcd that is down must not delay this
                await withdraw(rendezvous)

    async def purge(self, training: Training) -> None:
        directory = self.root / training.uid
        mark_deleted(directory)
        await self._release(training)
        if self.is_shared:  # a script that ends can start no thread
            delete(directory)
        else:
            await asyncio.to_thread(delete, directory)

    async def changes(self) -> AsyncIterator[Key]:
        while True:
            yield await self._changed.get()

    async def result(self, training: Training, rank: int) -> tuple[str, bytes] | None:
        directory = self.root / training.uid
        return await read_result(
            training,
            rank,
            self._supervisor(training).facts,
            lambda attempt: Path(result_file(directory, rank, attempt)).read_bytes(),
        )

    def log_growth(self, training: Training) -> contextlib.AbstractContextManager[LogGrowth]:
        return self._supervisor(training).follow_logs()

    def store_uri(self, training: Training) -> str:
        return store_uri_of(training.spec, rank_layout(self.root / training.uid))

    def metrics_uri(self, training: Training) -> str:
        return rank_layout(self.root / training.uid).metrics_uri

    async def machine_use(self) -> dict[str, list[RankUsage]]:
        """What the ranks that live use of this machine, by the uid of their training."""
        living = [
            (uid, attempt)
            for uid, supervisor in self._supervisors.items()
            for attempt in supervisor.running()
        ]
        # The thread is given values: journals and their readers belong to the event loop.
        measured = await asyncio.to_thread(self._meter.measure, [each for _, each in living])
        use: dict[str, list[RankUsage]] = {}
        for uid, attempt in living:
            if attempt.pid in measured:
                own = RankUsage(attempt.rank, attempt.attempt, measured[attempt.pid])
                use.setdefault(uid, []).append(own)
        return use

    def log_folder(self, training: Training) -> Path:
        return self.root / training.uid / "logs"

    def _supervisor(self, training: Training) -> SupervisorClient:
        if training.uid not in self._supervisors:
            key = training.key
            self._supervisors[training.uid] = SupervisorClient(
                self.root / training.uid, lambda: self._changed.put_nowait(key)
            )
        return self._supervisors[training.uid]

    def _note_needs(self, training: Training) -> dict[str, int]:
        """What one of its ranks takes of what is limited."""
        asked = requested(training.spec.resources)
        each = {name: amount for name, amount in asked.items() if name in self._limits}
        self._each[training.uid] = each
        self._keys[training.uid] = training.key
        return each

    def _used(self, name: str) -> int:
        return sum(
            ranks * self._each.get(uid, {SLOTS: 1}).get(name, 0)
            for uid, ranks in self._assigned.items()
        )

    def _available(self) -> dict[str, int]:
        """What nobody has. Less than nothing is left after a limit was lowered."""
        return {name: total - self._used(name) for name, total in self._limits.items()}

    def _give_back(self, uid: str, needed: int) -> None:
        """Frees the slots beyond `needed`, which counts ranks that are still being stopped."""
        has_devices = self._devices.keep(uid, needed)
        if needed < self._assigned.get(uid, 0) or has_devices:
            self._assigned[uid] = needed
            self._wake_next()

    def _capacity_for(self, training: Training) -> tuple[int | None, str, float | None]:
        """How many ranks it may hold, what bounds them, and when to observe again at the latest."""
        uid, target = training.uid, training.spec.world_size.target
        assigned, capacity, message = self._assigned.get(uid, 0), target, ""
        is_limited = bool(self._note_needs(training)) or self._share(training) is not None
        if is_limited and assigned < target:
            capacity, message = self._turn_of(training, assigned)
            if capacity >= target:
                message = ""  # it is being started, and waits for nothing
        if assigned < min(target, capacity):
            left, why = self._machine.free()
            if assigned + left < min(target, capacity):
                return assigned + left, f"{self._host} has too little left: {why}", CAPACITY_EVERY_S
        return (max(capacity, assigned) if is_limited else None), message, None

    def _turn_of(self, training: Training, assigned: int) -> tuple[int, str]:
        """How many ranks it may hold by now, and what it waits for if that is too few."""
        uid, world, share = training.uid, training.spec.world_size, self._share(training)
        free, message, left = sys.maxsize, "", self._available()
        # Behind others, the same text until its turn comes: each change of it would be written.
        behind = f"older trainings come first on {self._host}"
        for name, amount in self._each.get(uid, {}).items():
            if (fit := fitting({name: amount}, left)) < free:
                limit = self._limits[name]
                used = limit - left[name]
                message = describe_use(name, used, limit, amount, self._host, world.min)
                free = fit
                if name != SLOTS and fit < max(world.min - assigned, 1):
                    behind = describe_lack(name, limit, amount, self._host)
        if share is not None and (fit := len(self._devices.free(share)) // share.each) < free:
            free, message = fit, self._devices.describe(share, self._host, world.min)
        if uid not in self._queue or self._queue.is_first(uid):
            return assigned + free, message
        return assigned + self._queue.ranks_for(uid, self._free()), behind

    def _share(self, training: Training) -> DeviceShare | None:
        spec = training.spec
        return self._devices.share(spec.resources.gpu_count, spec.env)

    def _enter_queue(self, training: Training) -> bool:
        """It waits for the ranks it lacks, if it can have them. Returns whether others may have
        more by that."""
        uid, world, status = training.uid, training.spec.world_size, training.status
        assigned, share = self._assigned.get(uid, 0), self._share(training)
        each = self._note_needs(training)
        is_over = status.phase.is_terminal or bool(status.failing) or training.is_cancelling
        is_limited = bool(each) or share is not None
        if is_over or not is_limited or assigned >= world.target or not self._can_ever(training):
            return self._queue.remove(uid)
        needed = max(world.min - assigned, 1)
        waiting = Waiting(
            training.created_at, uid, training.key, world.target - assigned, needed, each, share
        )
        return self._queue.put(waiting)

    def _can_ever(self, training: Training) -> bool:
        """Whether all there is, devices too, is enough for it to start."""
        least, share = training.spec.world_size.min, self._share(training)
        if least > fitting(self._each.get(training.uid, {}), self._limits):
            return False
        return share is None or least * share.each <= len(share.of)

    def _free(self) -> Capacity:
        return Capacity(self._available(), self._devices.free)

    def _wake_next(self) -> None:
        """Has whoever may have more ranks now reconciled; how many wait behind costs nothing."""
        for turn in self._queue.turns(self._free()):
            self._changed.put_nowait(turn.waiting.key)

    def _write_source(self, training: Training, directory: Path) -> None:
        source = training.spec.source
        if source is None:
            return
        path = directory / "source" / source.filename
        if not path.exists():
            make_private(path.parent)
            write_file(path, source.content)

    def _observed_bench(self, training: Training) -> ObservedBench | None:
        return None if training.spec.bench.mode == "off" else self._bench.observe(training.uid)


class Stalled(Followup, frozen=True):
    """The stacks of a rank that does not move are to be taken. With `is_ended` it has to end then,
    so that its supervisor starts it again."""

    rank: int
    attempt: int
    idle_s: float
    is_ended: bool


def _stalled(
    training: Training, directory: Path, facts: Facts, idle_s: Mapping[int, float]
) -> tuple[Stalled, ...]:
    spec, found = training.spec, []
    for rank, seconds in idle_s.items():
        one = facts.current(rank)
        if one is None or spec.stall_s is None or seconds < spec.stall_s:
            continue
        if spec.stall_restart or not os.path.exists(stacks_file(directory, rank, one.attempt)):
            found.append(
                Stalled(rank=rank, attempt=one.attempt, idle_s=seconds, is_ended=spec.stall_restart)
            )
    return tuple(found)


def _with_idle(
    training: Training, rank: ObservedRank, idle_s: float, directory: Path
) -> ObservedRank:
    """The rank with how long it has not moved, and where it is if that is too long."""
    limit_s, message = training.spec.stall_s, rank.message
    if limit_s is not None and idle_s >= limit_s:
        stacks = read_stacks(directory, rank.rank, rank.attempt)
        message = message if stacks is None else summary_of(stacks)[0]
    return replace(rank, idle_s=idle_s, message=message)


def _next_idle_check_s(training: Training) -> float | None:
    stall_s = training.spec.stall_s
    return None if stall_s is None else check_again_s(stall_s)


def _being_restored(detail: str) -> Temporary:
    return Temporary(f"{detail}; its supervisor writes it again", retry_after_s=RESTORED_S)


def _holds(supervisor: SupervisorClient) -> int:
    """The number of ranks that a training has, or may have under its desired state."""
    wanted: int = supervisor.document().get("size", 0)
    return max([wanted, *(attempt.rank + 1 for attempt in supervisor.facts.running())])


def rendezvous_of(training: Training, host: str, before: dict[str, Any]) -> dict[str, Any]:
    """The rendezvous in the desired state. A part that is there already, `before`, stays.

    Raises Permanent when an etcd is needed and there is none.
    """
    if before:
        return before
    spec = training.spec
    part: dict[str, Any] = {"backend": spec.rendezvous.backend, "etcd": "", "endpoint": ""}
    part["keys"] = [f"{READY_DIR}/{host}"]  # one host, so all of its ranks reach each other
    part["unset"] = list(unset_variables(spec, {**spec.nccl_env, **spec.env}))
    if not spec.needs_etcd:
        return part
    if endpoint := os.environ.get(CONFIGURED_ETCD):
        if split_endpoint(endpoint) is None:
            raise Permanent(f"{CONFIGURED_ETCD}={endpoint!r}: expected host:port")
        return {**part, "endpoint": endpoint}
    return {**part, "etcd": find_etcd()}


def observed_endpoint(training: Training, directory: Path) -> str:
    rendezvous = read_rendezvous(directory)
    if training.spec.rendezvous.backend == NO_BACKEND:
        return ""
    if training.spec.rendezvous.backend == ETCD_BACKEND:
        return str(rendezvous.get("etcd", ""))
    return f"127.0.0.1:{rendezvous['ports'][0]}" if rendezvous.get("ports") else ""


def observed_mesh(training: Training, directory: Path) -> MeshStatus | None:
    """The mesh is ready as soon as its keys are in etcd: all ranks share this host."""
    spec = training.spec
    if not spec.needs_etcd:
        return None
    rendezvous = read_rendezvous(directory)
    has_keys = bool(rendezvous.get("etcd")) and not rendezvous.get("error")
    return MeshStatus(
        state=MeshState.READY if has_keys else MeshState.PENDING,
        foreign_writes=int(rendezvous.get("foreignWrites", 0)),
    )


async def withdraw(wanted: dict[str, Any]) -> None:
    """Deletes the gate's keys from an etcd that outlives the training."""
    if not wanted.get("endpoint"):
        return
    async with EtcdKeys(wanted["endpoint"]) as keys:
        for key in wanted["keys"]:
            await keys.delete(key)
