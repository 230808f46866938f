"""The executor of every backend whose ranks keep their own records.

A backend adds three verbs, start, list and stop, and says where the records are. Everything else is
here: wishes, restarts, the start gate, ends that nobody could write, adoption by another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from atoll.agent.process import RECORD_VARIABLE, TAIL_LINES, record_line
from atoll.agent.record_store import RecordPlace
from atoll.agent.wrapper import (
    CLAIM,
    CODE,
    DESIRED,
    EXIT,
    GATE,
    LAUNCH,
    Folder,
    code_root,
    name_of,
    write,
)
from atoll.backends.launch import TOGETHER, RankPlace, render_launch, store_uri_of
from atoll.backends.observe import (
    BackendJob,
    Conclude,
    DueAttempt,
    OpenStartGate,
    Pace,
    StopJobs,
    View,
    observe_gang,
)
from atoll.backends.records import AttemptKey, GangRecords, RecordReader, desired_document
from atoll.core.errors import Permanent, Temporary, ValidationError
from atoll.core.ports import Executor
from atoll.core.status import DesiredState, Followup, LogLine, Observation, Training

Json = dict[str, Any]

RECORD_BYTES = 16_384
TAIL_S = 5.0  # how long the last lines of a rank are looked for
# Where ranks meet, by the name of the variable: filled in by the wrapper from what rank 0 says.
MEETING = {
    "MASTER_ADDR": "host",
    "MASTER_PORT": "port",
    "BASILICA_RDZV_ENDPOINT": "endpoint",
    "PET_RDZV_ENDPOINT": "endpoint",
}


class RecordedBackend(Executor):
    """The Executor over the verbs of a backend.

    A subclass has `start_jobs`, `list_jobs`, `stop_jobs`, `place_of` and `rank_place`, and may
    have `prepare`, `check`, `clear`, and logs with `log_places` and `logs_after`.
    """

    pace = Pace()
    has_gate = True  # ranks start together; needs nothing of the backend
    has_network = True  # ranks reach each other, and meet at rank 0
    eviction_s = 30.0  # between the backend's own SIGTERM and its SIGKILL
    job_variable = ""  # where a wrapper finds the backend's name of its job

    def __init__(self, *, clock: Callable[[], float] | None = None) -> None:
        anchor = time.time() - time.monotonic()  # setting the wall clock changes no duration
        self._clock = clock or (lambda: anchor + time.monotonic())
        self._readers: dict[str, RecordReader] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._ended: dict[str, dict[AttemptKey, float]] = {}  # since when the backend says so

    # The verbs of a backend

    async def start_jobs(self, training: Training, attempt: int, ranks: Sequence[int]) -> None:
        """These ranks are with the backend, which may start them at once or later.

        Raises Permanent for what it will never take. An attempt that was asked for before may be
        asked for again: whoever is second finds it claimed.
        """
        raise NotImplementedError

    async def list_jobs(self, training: Training) -> Mapping[AttemptKey, BackendJob]:
        """All attempts of the training that the backend knows of, in one question.

        Raises Temporary if it does not answer, or not with all of them.
        """
        raise NotImplementedError

    async def stop_jobs(self, training: Training, attempts: Sequence[AttemptKey]) -> None:
        """The backend ends these. Already gone is success."""
        raise NotImplementedError

    def place_of(self, training: Training) -> RecordPlace:
        raise NotImplementedError

    def rank_place(self, training: Training) -> RankPlace:
        raise NotImplementedError

    def wrap_command(self, training: Training, command: list[str]) -> list[str]:
        """What the wrapper runs: the command, or something that runs it, such as a container."""
        return command

    async def prepare(self, training: Training) -> None:
        """Whatever ranks need beside their records is where they look for it. May be repeated."""

    async def clear(self, training: Training, *, with_logs: bool) -> None:
        """Removes what `prepare` made. Already removed is success."""

    # The port

    async def apply(self, training: Training, desired: DesiredState) -> None:
        try:
            self.check(training.spec)
        except ValidationError as error:
            raise Permanent(str(error)) from error
        async with self._turn(training):
            records = await self._records(training)
            before = records.desired
            if before is None:
                if desired.size == 0:
                    return
                if training.status.has_run:
                    raise Permanent(
                        f"the records of {training.name} are gone: {self.where(training)}"
                    )
                await self.prepare(training)
                await self._put_code(training)
                await self._put(training, LAUNCH, self.launch(training))
            if before is None or desired.version > before["version"]:
                known = max_attempts(records.attempts)
                document = desired_document(desired, before, known, self._clock())
                await self._put(training, DESIRED, document)
                records = records._replace(desired=document)
            elif desired.version < before["version"]:
                return
            jobs = await self.list_jobs(training)
            view = self._view(training, records, jobs)
            if any(view.newest[rank] > known for rank, known in self._unlatched(records, view)):
                # An attempt that had left no record when the wish was written: it stops, too.
                assert records.desired is not None
                at = records.desired["at"]
                document = desired_document(desired, records.desired, view.newest, at)
                await self._put(training, DESIRED, document)
            stops = [
                followup
                for followup in view.observation.followups
                if isinstance(followup, StopJobs)
            ]
            for followup in stops:
                await self.stop_jobs(training, followup.attempts)
            await self._start(training, view.due)

    async def observe(self, training: Training) -> Observation:
        records = await self._records(training)
        if records.desired is None:
            is_left = self._may_hold(training) and training.status.phase.is_terminal
            jobs = await self.list_jobs(training) if is_left else {}
            is_active = any(job.is_active for job in jobs.values())
            return Observation(has_gate=self.has_gate, is_supervised=is_active)
        try:
            jobs = await self.list_jobs(training)
        except Temporary as error:
            # Exits are in the records, whether or not the backend answers.
            view = self._view(training, records, None)
            if not has_news(training, view.observation):
                raise
            return _with_message(view.observation, str(error))
        return self._view(training, records, jobs).observation

    async def perform(self, training: Training, followup: Followup) -> None:
        match followup:
            case Conclude(rank=rank, attempt=attempt, record=record):
                await self._conclude(training, (rank, attempt), record)
            case StopJobs(attempts=attempts):
                await self.stop_jobs(training, attempts)
            case OpenStartGate(together=together):
                gate = {"at": self._clock(), "together": together}
                await asyncio.to_thread(self.place_of(training).create, GATE, write(gate))

    async def release(self, training: Training) -> None:
        async with self._turn(training):
            records = await self._records(training)
            desired = records.desired
            if desired is None and not self._may_hold(training):
                return
            if desired is not None and desired["size"]:  # wrappers that are still to start find it
                stop = DesiredState(version=desired["version"] + 1, size=0)
                desired = desired_document(
                    stop, desired, max_attempts(records.attempts), self._clock()
                )
                await self._put(training, DESIRED, desired)
            jobs = await self.list_jobs(training)
            active = [key for key, job in jobs.items() if job.is_active]
            if active:
                await self.stop_jobs(training, active)
                raise Temporary("the last ranks are about to end", retry_after_s=0.3)
            await self._forget(training)

    async def purge(self, training: Training) -> None:
        await self.release(training)
        await self.clear(training, with_logs=True)

    def store_uri(self, training: Training) -> str:
        return store_uri_of(training.spec, self.rank_place(training))

    def metrics_uri(self, training: Training) -> str:
        return self.rank_place(training).figures

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

    # What is shared

    @staticmethod
    def _may_hold(training: Training) -> bool:
        """Whether the backend may have jobs of it, though all records are lost."""
        return training.status.desired is not None and not training.status.is_released

    def where(self, training: Training) -> str:
        place: Any = self.place_of(training)
        return str(getattr(place, "path", None) or getattr(place, "name", place))

    def launch(self, training: Training) -> Json:
        """What a wrapper reads of the training: the command and how its environment is made."""
        spec, place = training.spec, self.rank_place(training)
        launch = render_launch(training, place)
        meets = self.has_network and spec.rendezvous.backend != "none" and place.meeting is None
        own = {*spec.env, *spec.nccl_env}
        return {
            "uid": training.uid,
            "command": self.wrap_command(training, launch.command),
            "env": launch.env,
            "rank_variables": list(launch.rank_variables),
            "size_variables": list(launch.size_variables),
            "node_variables": list(launch.node_variables),
            "unset": sorted({*launch.later, RECORD_VARIABLE} - own),
            "meeting": {n: k for n, k in MEETING.items() if n in launch.later} if meets else {},
            "together": "" if TOGETHER in launch.env else TOGETHER,
            "folder": spec.working_dir or "",
            "code": spec.code and {"digest": spec.code.digest, "path": spec.code.path},
            "stop_grace_s": spec.stop_grace_s,
            "eviction_s": self.eviction_s,
            "deadline_s": spec.deadline_s,
            "gated": self.has_gate,
            "job_variable": self.job_variable,
        }

    def _view(
        self,
        training: Training,
        records: GangRecords,
        jobs: Mapping[AttemptKey, BackendJob] | None,
    ) -> View:
        now = time.monotonic()
        since = self._ended.setdefault(training.uid, {})
        for key, job in (jobs or {}).items():
            if job.is_active:
                since.pop(key, None)
            else:
                since.setdefault(key, now)
        return observe_gang(
            training,
            records,
            jobs,
            now=self._clock(),
            pace=self.pace,
            ended_for_s={key: now - at for key, at in since.items()},
            has_gate=self.has_gate,
        )

    @staticmethod
    def _unlatched(records: GangRecords, view: View) -> Iterable[tuple[int, int]]:
        """Ranks above the wish with the newest attempt that the wish tells to stop."""
        assert records.desired is not None
        stops = records.desired["stops"]
        for rank in view.newest:
            if rank >= records.desired["size"]:
                yield rank, max(stops.get(str(rank), []), default=-1)

    async def _start(self, training: Training, due: Iterable[DueAttempt]) -> None:
        by_attempt: dict[int, list[int]] = {}
        for each in due:
            if each.in_s <= 0:
                by_attempt.setdefault(each.attempt, []).append(each.rank)
        for attempt, ranks in sorted(by_attempt.items()):
            await self.start_jobs(training, attempt, ranks)

    async def _conclude(self, training: Training, key: AttemptKey, record: Json) -> None:
        place = self.place_of(training)
        if record["ran"] is False:  # what nobody has claimed cannot be claimed any more
            claim = write({"token": "executor", "host": record["host"], "at": record["at"]})
            is_own = await asyncio.to_thread(place.create, name_of(*key, CLAIM), claim)
            records = await self._records(training)
            claimed = records.attempts.get(key)
            if not is_own and claimed is not None and claimed.quiet_s < self.pace.silent_s:
                return  # a wrapper has it, and will tell
        tail = await self._last_lines(training, key[0])
        line = record_line({**record, "tail": tail} if tail else record, RECORD_BYTES)
        await asyncio.to_thread(place.create, name_of(*key, EXIT), line)

    async def _last_lines(self, training: Training, rank: int) -> list[str]:
        """What the rank printed last, for an end that its wrapper could not write."""
        lines: list[str] = []
        with contextlib.suppress(Exception):  # the end is written with or without them
            async with asyncio.timeout(TAIL_S):
                async for line in self.logs(training, ranks=[rank], tail=TAIL_LINES):
                    lines.append(line.text)
        return lines[-TAIL_LINES:]

    async def _records(self, training: Training) -> GangRecords:
        reader = self._readers.get(training.uid)
        if reader is None:
            reader = self._readers[training.uid] = RecordReader(self.place_of(training))
        try:
            return await asyncio.to_thread(reader.read)
        except OSError as error:
            where = self.where(training)
            raise Temporary(f"the records in {where} cannot be read: {error.strerror}") from error

    async def _put_code(self, training: Training) -> None:
        """The archive that travels with the training is where its ranks look for it."""
        code = training.spec.code
        if code is None:
            return
        if code.is_digest:
            raise Permanent(f"the code of {training.name} is not with the control plane any more")
        await self._put_bytes(training, CODE, code.content)

    async def _put(self, training: Training, name: str, document: Json) -> None:
        await self._put_bytes(training, name, write(document))

    async def _put_bytes(self, training: Training, name: str, data: bytes) -> None:
        try:
            await asyncio.to_thread(self.place_of(training).put, name, data)
        except OSError as error:
            where = self.where(training)
            raise Temporary(f"cannot write to {where}: {error.strerror}") from error

    async def _forget(self, training: Training) -> None:
        """The wish goes first: without it there is nothing to see."""
        place = self.place_of(training)
        await asyncio.to_thread(place.delete, [DESIRED])
        names = [
            n for n in await asyncio.to_thread(place.entries) if "." in n or n in (GATE, LAUNCH)
        ]
        await asyncio.to_thread(place.delete, [*names, "meeting", CODE])
        if isinstance(place, Folder) and training.spec.code is not None:
            root = code_root(place, training.uid, training.spec.code.digest)
            await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)
        await self.clear(training, with_logs=False)
        for memory in (self._readers, self._turns, self._ended):
            memory.pop(training.uid, None)

    @contextlib.asynccontextmanager
    async def _turn(self, training: Training) -> AsyncIterator[None]:
        async with self._turns.setdefault(training.uid, asyncio.Lock()):
            yield


def max_attempts(keys: Iterable[AttemptKey]) -> dict[int, int]:
    """The newest attempt of each rank."""
    newest: dict[int, int] = {}
    for rank, attempt in keys:
        newest[rank] = max(newest.get(rank, -1), attempt)
    return newest


def has_news(training: Training, observation: Observation) -> bool:
    """Whether a rank has ended that the status does not know of."""
    status = training.status
    known = {r.rank: r for r in (*status.ranks, *status.removed_ranks)}
    for rank in observation.ranks:
        before = known.get(rank.rank)
        is_known = before is not None and before.exit is not None
        if rank.exit is not None and not (is_known and before.attempt >= rank.attempt):  # type: ignore[union-attr]
            return True
    return False


def _with_message(observation: Observation, message: str) -> Observation:
    from msgspec.structs import replace

    return replace(observation, message=message, followups=())
