"""The executor of every backend whose ranks keep their own records.

A backend adds three verbs, start, list and stop, and says where the records are. Everything else is
here: desired state, restarts, the start gate, ends that nobody could write, adoption by
another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

from msgspec.structs import replace

from atoll.agent.process import RECORD_VARIABLE, ROUND_CAUSE, TAIL_LINES, record_line
from atoll.agent.records import (
    ANSWER,
    ASK,
    BY_EXECUTOR,
    CLAIM,
    CODE,
    DESIRED,
    EXIT,
    GATE,
    LAUNCH,
    MAX_RECORD_BYTES,
    RENDEZVOUS,
    RESULT,
    Facts,
    RecordStore,
    claim_record,
    desired_record,
    gate_record,
    name_of,
)
from atoll.agent.wrapper import Folder, code_root, read, write
from atoll.backends.launch import TOGETHER, RankLayout, render_launch, store_uri_of
from atoll.backends.reader import RecordReader, read_result, read_stacks
from atoll.backends.records import (
    AttemptKey,
    DueAttempt,
    Fold,
    JobState,
    Json,
    OpenStartGate,
    StopJobs,
    TakeStacks,
    Timing,
    WriteExit,
    desired_of,
    fold,
    has_open_cause,
)
from atoll.core.config import options_of
from atoll.core.errors import Conflict, Permanent, Temporary, ValidationError
from atoll.core.executors import PlaneContext
from atoll.core.model import decode, encode
from atoll.core.ports import Executor, StopCause
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import DesiredState, Followup, Observation, RankStatus, Training

TAIL_S = 5.0  # how long the executor looks for the last lines of a rank whose exit it writes
# Of a shared training: its spec, and why it was stopped, for the processes that follow it.
TRAINING, CAUSE = "training", "cause"
HAS_ENDED: Json = {"reason": "it has ended"}  # in place of an answer
ANSWER_S = 10.0  # for a dump on a starved machine: py-spy alone has 5 s a process
LAUNCH_PREFIX = "replicas-"  # of the name of a launch, before its uid
RELIST_OBSERVATIONS = 5  # the backend is asked at least so often, whatever the records say
# Where ranks meet, by the name of the variable: filled in by the wrapper from what rank 0 says.
MEETING = {
    "MASTER_ADDR": "host",
    "MASTER_PORT": "port",
    "BASILICA_RDZV_ENDPOINT": "endpoint",
    "PET_RDZV_ENDPOINT": "endpoint",
}


class _Listing(NamedTuple):
    """What the backend said of its jobs, when, and to which desired state."""

    jobs: Mapping[AttemptKey, JobState]
    at: float
    version: int


class RecordedBackend(Executor):
    """The Executor over the verbs of a backend.

    A subclass has `start_jobs`, `list_jobs` and `stop_jobs`. Where records, code and logs are comes
    from `backends/base.py`: `FolderBackend` or `StoreBackend`.
    """

    timing = Timing()
    has_gate = True  # ranks start together; needs nothing of the backend
    has_network = True  # ranks reach each other, and meet at rank 0
    eviction_s = 30.0  # between the backend's own SIGTERM and its SIGKILL
    job_variable = ""  # where a wrapper finds the backend's name of its job
    unclaimed_hint = ""  # what to look at if a job ends before its wrapper claims the attempt
    gang_type: Callable[[], Any] = dict  # what a process remembers of the jobs of a training

    def __init_subclass__(cls) -> None:
        if cls.options_type is not None:
            cls.SUPPORTS = cls.options_type.SUPPORTS

    def __init__(self, options: Any = None, *, clock: Callable[[], float] | None = None) -> None:
        anchor = time.time() - time.monotonic()  # setting the wall clock changes no duration
        self.options = options
        self._clock = clock or (lambda: anchor + time.monotonic())
        self._readers: dict[str, RecordReader] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._ended: dict[str, dict[AttemptKey, float]] = {}  # since when the backend says so
        self._listings: dict[str, _Listing] = {}
        self._gangs: dict[str, Any] = {}
        self._requests: dict[str, asyncio.Lock] = {}

    def gang(self, training: Training) -> Any:
        """What this process knows of the jobs of the training, a `gang_type`."""
        if training.uid not in self._gangs:
            self._gangs[training.uid] = type(self).gang_type()
        return self._gangs[training.uid]

    @classmethod
    def configured(cls, name: str, options: dict[str, Any], home: PlaneContext) -> Self:
        assert cls.options_type is not None
        backend = cls.from_options(options_of(cls.options_type, options), home.state_dir)
        backend.check_machine()
        backend.name = name
        return backend

    @classmethod
    def from_options(cls, options: Any, state_dir: Path) -> Self:
        return cls(options)

    def check_machine(self) -> None:
        """Raises Permanent, with what to do, where this machine lacks commands or credentials."""

    def check(self, spec: TrainingSpec) -> None:
        if self.options is None:
            super().check(spec)
        else:
            self.options.check(spec)

    # The verbs of a backend

    async def start_jobs(self, training: Training, attempt: int, ranks: Sequence[int]) -> None:
        """These ranks are with the backend, which may start them at once or later.

        Raises Permanent for what it will never take. An attempt that was asked for before may be
        asked for again: whoever is second finds it claimed.
        """
        raise NotImplementedError

    async def list_jobs(self, training: Training) -> Mapping[AttemptKey, JobState]:
        """All attempts of the training that the backend knows of, in one question.

        Raises Temporary if it does not answer, or not with all of them.
        """
        raise NotImplementedError

    async def stop_jobs(self, training: Training, attempts: Sequence[AttemptKey]) -> None:
        """The backend ends these. Already gone is success."""
        raise NotImplementedError

    def record_store_of(self, training: Training) -> RecordStore:
        raise NotImplementedError

    def rank_layout(self, training: Training) -> RankLayout:
        raise NotImplementedError

    def result_store(self, training: Training) -> RecordStore:
        """Where ranks leave their results; these stay as long as the logs."""
        return self.record_store_of(training)

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
            reader = await self._refreshed(training)
            facts, before = reader.facts, reader.facts.desired
            if before is None:
                if desired.size == 0:
                    return
                if training.status.has_run:
                    raise Permanent(
                        f"the records of {training.name} are gone: {self.where(training)}"
                    )
                await self.prepare(training)
                await self._put_code(training)
                if self.is_shared:
                    await self._put_bytes(training, TRAINING, encode(_by_digest(training)))
                await self._put(training, LAUNCH, self.launch(training))
            if self.is_shared and before is not None and desired.version > before["version"]:
                # Wrappers act on what is written: one that does not reach the backend is refused
                # before, and as a whole.
                await self.list_jobs(training)
            if self.is_shared and desired.size == 0 and training.status.failing:
                cause = encode([training.status.failing, training.status.failing_message])
                await self._put_bytes(training, CAUSE, cause)
            if before is None or desired.version > before["version"]:
                await self._put_desired(training, facts, desired, facts.newest(), self._clock())
            elif desired.version < before["version"]:
                return
            self._listings.pop(training.uid, None)
            jobs = await self._jobs(training, reader)
            view = self._fold(training, reader, jobs)
            if self._has_unlatched(facts, view):
                # An attempt that had left no record when the state was written: it stops, too.
                at = (facts.desired or {})["at"]
                await self._put_desired(training, facts, desired, view.newest, at)
            followups = view.observation.followups
            # Their ends are written first, by an observation: else they look like somebody's doing.
            unwritten = {(f.rank, f.attempt) for f in followups if isinstance(f, WriteExit)}
            for followup in followups:
                if isinstance(followup, StopJobs):
                    stops = [key for key in followup.attempts if key not in unwritten]
                    if stops:
                        await self._stop(training, stops)
            await self._start(training, view.due)

    async def observe(self, training: Training) -> Observation:
        reader = await self._refreshed(training)
        if reader.facts.desired is None:
            is_left = self._may_hold(training) and training.status.phase.is_terminal
            jobs = await self.list_jobs(training) if is_left else {}
            is_active = any(job.is_active for job in jobs.values())
            # The pass that sees nothing asks for ranks, and nobody tells when they come.
            again_in_s = None if training.status.phase.is_terminal else self.timing.observe_s
            return Observation(
                has_gate=self.has_gate, is_supervised=is_active, again_in_s=again_in_s
            )
        try:
            jobs = await self._jobs(training, reader)
        except Temporary as error:
            # Exits are in the records, whether or not the backend answers.
            hit = self._fold(training, reader, None).observation
            if not has_news(training, hit):
                raise
            return replace(hit, message=str(error), followups=())
        observation = self._fold(training, reader, jobs).observation
        if reader.asking and not training.status.phase.is_terminal:
            stacks = TakeStacks(tuple(sorted(reader.asking)))
            observation = replace(observation, followups=(*observation.followups, stacks))
        return observation

    async def perform(self, training: Training, followup: Followup) -> None:
        match followup:
            case WriteExit(rank=rank, attempt=attempt, record=record):
                await self._write_exit(training, (rank, attempt), record)
            case StopJobs(attempts=attempts):
                await self._stop(training, attempts)
            case OpenStartGate(together=together):
                gate = write(gate_record(together, self._clock()))
                await asyncio.to_thread(self.record_store_of(training).create, GATE, gate)
            case TakeStacks(asking=asking):
                names = [name_of(*key, ASK) for key in asking]
                await asyncio.to_thread(self.record_store_of(training).delete, names)
                without = [rank for rank, _ in asking]
                async with self._turn(training):
                    await self._ask(training, None, without=without, cause=ROUND_CAUSE)

    # Requests to ranks: in the document of the desired state, which their wrappers read anyway.

    async def take_stacks(
        self, training: Training, ranks: Sequence[RankStatus]
    ) -> list[dict[str, Any]]:
        answers = await self._request(training, ranks)
        return [
            {**stacks_of(rank), **(answers.get(rank.rank) or {"reason": self._no_answer()})}
            for rank in ranks
        ]

    async def kill(self, training: Training, rank: RankStatus, number: int) -> None:
        answer = (await self._request(training, [rank], signal=number)).get(rank.rank)
        if answer is None:
            raise Temporary(f"rank {rank.rank} of {training.name!r}: {self._no_answer()}")
        if answer == HAS_ENDED:
            raise Conflict(f"rank {rank.rank} of {training.name!r} does not run: it has ended")

    async def stored_stacks(self, training: Training) -> list[dict[str, Any]]:
        return await asyncio.to_thread(read_stacks, self.result_store(training))

    async def _request(
        self, training: Training, ranks: Sequence[RankStatus], **request: Any
    ) -> dict[int, Json]:
        """What the wrappers of these ranks answer, by rank, as far as they do in time. One request
        of a training at a time: a second one would take the place of the first."""
        store = self.record_store_of(training)
        waiting = {name_of(one.rank, one.attempt, ANSWER): one for one in ranks}
        answers: dict[int, Json] = {}
        async with self._requests.setdefault(training.uid, asyncio.Lock()):
            await asyncio.to_thread(store.delete, list(waiting))
            async with self._turn(training):
                # All of thousands are not listed: wrappers read the document at every poll.
                is_all = len(ranks) == sum(one.is_alive for one in training.status.ranks)
                numbers = None if is_all and not request else [one.rank for one in ranks]
                id = await self._ask(training, numbers, **request)
            deadline = time.monotonic() + self._answer_s()
            while waiting and time.monotonic() < deadline:
                await asyncio.sleep(min(self.timing.observe_s, 0.5) / 2)
                entries = await asyncio.to_thread(store.entries)
                for name, one in list(waiting.items()):
                    has_ended = name_of(one.rank, one.attempt, EXIT) in entries
                    if not has_ended and name not in entries:
                        continue
                    answer = await asyncio.to_thread(read, store, name)
                    if answer is not None and answer.pop("id") == id:
                        answers[waiting.pop(name).rank] = answer
                    elif has_ended:
                        answers[waiting.pop(name).rank] = HAS_ENDED
        return answers

    async def _ask(self, training: Training, ranks: list[int] | None, **request: Any) -> str:
        """Puts the request where wrappers look. Raises Conflict if there is no such document."""
        desired = (await self._refreshed(training)).facts.desired
        if desired is None:
            raise Conflict(f"no rank of {training.name!r} runs")
        id = uuid.uuid4().hex
        document = {**desired, "request": {"id": id, "ranks": ranks, **request}}
        await self._put(training, DESIRED, document)
        return id

    def _answer_s(self) -> float:
        """How long an answer takes at most: two looks at the store, of each side, and the dump."""
        return ANSWER_S + 4 * self.timing.observe_s

    def _no_answer(self) -> str:
        return f"its wrapper did not answer within {self._answer_s():g} s"

    async def release(self, training: Training) -> None:
        if not self.is_shared:
            await self._remove_records(training)
            return
        await self._end_jobs(training)

    async def _end_jobs(self, training: Training) -> None:
        """Raises Temporary until the backend has nothing more of it."""
        jobs = await self.list_jobs(training)
        active = [key for key, job in jobs.items() if job.is_active]
        if active:
            await self._stop(training, active)
            raise Temporary("the last ranks are about to end", retry_after_s=0.3)

    async def _remove_records(self, training: Training) -> None:
        async with self._turn(training):
            facts = (await self._refreshed(training)).facts
            desired = facts.desired
            if desired is None and not self._may_hold(training):
                return
            if desired is not None and desired["size"]:  # wrappers that are still to start find it
                stop = DesiredState(version=desired["version"] + 1, size=0)
                await self._put_desired(training, facts, stop, facts.newest(), self._clock())
            await self._end_jobs(training)
            await self._forget(training)

    async def purge(self, training: Training) -> None:
        await self._remove_records(training)
        await self.clear(training, with_logs=True)

    async def find(self, job_name: str, uid: str | None) -> Training | None:
        own = job_name.removeprefix(LAUNCH_PREFIX)
        if not own.isalnum() or uid not in (None, own):
            return None
        data = await self._get_bytes(_unknown(own), TRAINING)
        if data is None:
            return None
        try:
            training = decode(data, Training)
        except ValidationError as error:
            raise Permanent(f"the launch {job_name} cannot be followed: {error}") from error
        desired = desired_of((await self._refreshed(training)).facts)
        if desired is None:
            return None
        cause = await self.stop_cause(training)
        status = replace(
            training.status,
            desired=desired,
            discarded_attempts=dict(desired.discarded_attempts),
            failing=cause.reason,
            failing_message=cause.message,
        )
        is_cancelled = desired.size == 0 and not cause.reason
        spec = replace(training.spec, cancel=is_cancelled, executor=self.name)
        return replace(training, spec=spec, status=status)

    async def stop_cause(self, training: Training) -> StopCause:
        data = await self._get_bytes(training, CAUSE)
        return StopCause() if data is None else StopCause(*decode(data, tuple[str, str]))

    async def result(self, training: Training, rank: int) -> tuple[str, bytes] | None:
        store, reader = self.result_store(training), self._readers.get(training.uid)
        return await read_result(
            training,
            rank,
            None if reader is None else reader.facts,
            lambda attempt: store.get(name_of(rank, attempt, RESULT)),
        )

    def store_uri(self, training: Training) -> str:
        return store_uri_of(training.spec, self.rank_layout(training))

    def metrics_uri(self, training: Training) -> str:
        return self.rank_layout(training).metrics_uri

    # What is shared

    @staticmethod
    def _may_hold(training: Training) -> bool:
        """Whether the backend may have jobs of it, though all records are lost."""
        return training.status.desired is not None and not training.status.is_released

    def where(self, training: Training) -> str:
        return self.record_store_of(training).uri

    def claims(self, training: Training) -> set[AttemptKey]:
        """The attempts that wrappers have claimed, as of the last observation."""
        reader = self._readers.get(training.uid)
        return set() if reader is None else reader.claims()

    def is_recorded(self, training: Training, key: AttemptKey) -> bool:
        """Whether the rank's own record says all of its end, so that nobody need be asked."""
        reader = self._readers.get(training.uid)
        end = None if reader is None else reader.exit_of(key)
        return end is not None and end.get("by") != BY_EXECUTOR and not has_open_cause(end)

    async def _jobs(
        self, training: Training, reader: RecordReader
    ) -> Mapping[AttemptKey, JobState]:
        """The jobs as the backend lists them. It is not asked again soon where the ranks' own
        records say how every attempt is."""
        last, facts = self._listings.get(training.uid), reader.facts
        patience_s = RELIST_OBSERVATIONS * self.timing.observe_s
        if last is not None and time.monotonic() < last.at + patience_s:
            if last.version == facts.version and self._tell_all(reader, last.jobs):
                return last.jobs
        jobs = dict(await self.list_jobs(training))
        for key, job in jobs.items():
            if self.unclaimed_hint and not job.is_active and not reader.is_claimed(key):
                jobs[key] = job._replace(message=f"{job.message}: {self.unclaimed_hint}")
        self._listings[training.uid] = _Listing(jobs, time.monotonic(), facts.version)
        return jobs

    def _tell_all(self, reader: RecordReader, jobs: Mapping[AttemptKey, JobState]) -> bool:
        """Whether each attempt either runs and shows it, or has ended here and there."""
        facts, late_s = reader.facts, self.timing.heartbeat_timeout_s / 2
        if len(facts.ranks) < (facts.desired or {})["size"]:
            return False
        for key, one in ((k, facts.attempt(*k)) for k in jobs):
            job = jobs[key]
            if one is None or one.claim is None or job.is_repeated or job.is_paused:
                return False
            if one.exit is not None:
                if job.is_active:
                    return False
            elif job.state != "running" or reader.heartbeat_age_s(*key) > late_s:
                return False
        return all(
            one.exit is not None or (one.rank, one.attempt) in jobs
            for attempts in facts.ranks.values()
            for one in attempts.values()
        )

    async def _stop(self, training: Training, attempts: Sequence[AttemptKey]) -> None:
        self._listings.pop(training.uid, None)
        await self.stop_jobs(training, attempts)

    def launch(self, training: Training) -> Json:
        """What a wrapper reads of the training: the command and how its environment is made."""
        spec, layout = training.spec, self.rank_layout(training)
        launch = render_launch(training, layout)
        meets = self.has_network and spec.rendezvous.backend != "none" and layout.meeting is None
        own = {*spec.env, *spec.nccl_env}
        command = self.wrap_command(training, launch.command)
        is_inside = command != launch.command  # of a container, where a folder is one of the image
        return {
            "uid": training.uid,
            "command": command,
            "env": launch.env,
            "rank_variables": list(launch.rank_variables),
            "size_variables": list(launch.size_variables),
            "node_variables": list(launch.node_variables),
            "unset": sorted({*launch.later, RECORD_VARIABLE} - own),
            "meeting": {n: k for n, k in MEETING.items() if n in launch.later} if meets else {},
            "together": "" if TOGETHER in launch.env else TOGETHER,
            "folder": "" if is_inside else spec.working_dir or "",
            "code": spec.code and {"digest": spec.code.digest, "path": spec.code.path},
            "stop_grace_s": spec.stop_grace_s,
            "eviction_s": self.eviction_s,
            "deadline_s": spec.deadline_s,
            "stall_s": spec.stall_s,
            "gated": self.has_gate,
            "job_variable": self.job_variable,
            "results": self.result_store(training).uri,
        }

    def _fold(
        self,
        training: Training,
        reader: RecordReader,
        jobs: Mapping[AttemptKey, JobState] | None,
    ) -> Fold:
        now = time.monotonic()
        since = self._ended.setdefault(training.uid, {})
        for key, job in (jobs or {}).items():
            if job.is_active:
                since.pop(key, None)
            else:
                since.setdefault(key, now)
        return fold(
            training,
            reader.facts,
            jobs,
            now=self._clock(),
            timing=self.timing,
            ages=reader.ages({key: now - at for key, at in since.items()}),
            has_gate=self.has_gate,
            memory=reader.memory,
        )

    async def _put_desired(
        self,
        training: Training,
        facts: Facts,
        desired: DesiredState,
        newest: dict[int, int],
        at: float,
    ) -> None:
        state = desired_record(
            desired.version, desired.size, desired.discarded_attempts, facts.desired, newest, at
        )
        await self._put(training, DESIRED, state)
        facts.add(state)

    @staticmethod
    def _has_unlatched(facts: Facts, view: Fold) -> bool:
        """Whether a rank that is not wanted has an attempt that need not stop yet."""
        assert facts.desired is not None
        size, stops = facts.desired["size"], facts.desired["stops"]
        return any(
            newest > max(stops.get(str(rank), []), default=-1)
            for rank, newest in view.newest.items()
            if rank >= size
        )

    async def _start(self, training: Training, due: Iterable[DueAttempt]) -> None:
        by_attempt: dict[int, list[int]] = {}
        for each in due:
            if each.in_s <= 0:
                by_attempt.setdefault(each.attempt, []).append(each.rank)
        for attempt, ranks in sorted(by_attempt.items()):
            self._listings.pop(training.uid, None)
            await self.start_jobs(training, attempt, ranks)

    async def _write_exit(self, training: Training, key: AttemptKey, record: Json) -> None:
        record_store = self.record_store_of(training)
        if record["ran"] is False:  # what nobody has claimed cannot be claimed any more
            claim = write(
                claim_record(*key, record["at"], token=BY_EXECUTOR, host=record["host"])
            )  # fmt: skip
            is_own = await asyncio.to_thread(record_store.create, name_of(*key, CLAIM), claim)
            reader = await self._refreshed(training)
            age_s = reader.heartbeat_age_s(*key)
            if not is_own and reader.is_claimed(key) and age_s < self.timing.heartbeat_timeout_s:
                return  # a wrapper has it, and will tell
        tail = await self._last_lines(training, key[0])
        line = record_line({**record, "tail": tail} if tail else record, MAX_RECORD_BYTES)
        await asyncio.to_thread(record_store.create, name_of(*key, EXIT), line)

    async def _last_lines(self, training: Training, rank: int) -> list[str]:
        """What the rank printed last, for an end that its wrapper could not write."""
        lines: list[str] = []
        with contextlib.suppress(Exception):  # the end is written with or without them
            async with asyncio.timeout(TAIL_S):
                async for line in self.logs(training, ranks=[rank], tail=TAIL_LINES):
                    lines.append(line.text)
        return lines[-TAIL_LINES:]

    async def _refreshed(self, training: Training) -> RecordReader:
        reader = self._readers.get(training.uid)
        if reader is None:
            reader = self._readers[training.uid] = RecordReader(self.record_store_of(training))
        try:
            reader.take(await asyncio.to_thread(reader.fetch))
        except OSError as error:
            where = self.where(training)
            raise Temporary(f"the records in {where} cannot be read: {error.strerror}") from error
        return reader

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
            await asyncio.to_thread(self.record_store_of(training).put, name, data)
        except OSError as error:
            where = self.where(training)
            raise Temporary(f"cannot write to {where}: {error.strerror}") from error

    async def _get_bytes(self, training: Training, name: str) -> bytes | None:
        try:
            return await asyncio.to_thread(self.record_store_of(training).get, name)
        except OSError as error:
            where = self.where(training)
            raise Temporary(f"the records in {where} cannot be read: {error.strerror}") from error

    async def _forget(self, training: Training) -> None:
        """The desired state goes first: without it there is nothing to observe."""
        record_store = self.record_store_of(training)
        await asyncio.to_thread(record_store.delete, [DESIRED])
        names = [
            n
            for n in await asyncio.to_thread(record_store.entries)
            if "." in n or n in (GATE, LAUNCH)
        ]
        await asyncio.to_thread(record_store.delete, [*names, RENDEZVOUS, CODE, TRAINING, CAUSE])
        if isinstance(record_store, Folder) and training.spec.code is not None:
            root = code_root(record_store, training.uid, training.spec.code.digest)
            await asyncio.to_thread(shutil.rmtree, root, ignore_errors=True)
        await self.clear(training, with_logs=False)
        memories = (self._readers, self._ended, self._listings, self._gangs)
        for memory in (*memories, self._turns, self._requests):
            memory.pop(training.uid, None)

    @contextlib.asynccontextmanager
    async def _turn(self, training: Training) -> AsyncIterator[None]:
        async with self._turns.setdefault(training.uid, asyncio.Lock()):
            yield


def stacks_of(rank: RankStatus) -> Json:
    return {"rank": rank.rank, "attempt": rank.attempt, "at": time.time()}


def _by_digest(training: Training) -> Training:
    """What of the launch another process needs; what runs is with the records already."""
    spec = training.spec
    spec = replace(
        spec,
        source=spec.source and spec.source.by_digest(),
        code=spec.code and spec.code.by_digest(),
    )
    return replace(training, spec=spec)


def _unknown(uid: str) -> Training:
    """Enough of a training to find its records."""
    world = WorldSize(min=1, target=1, max=1)
    spec = TrainingSpec(name="unknown", world_size=world, command=["true"])
    return Training(namespace="", uid=uid, spec=spec)


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
