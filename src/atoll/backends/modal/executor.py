"""The Modal backend: each attempt of a rank is a Sandbox, and its records are in an object store.

The wish is in the store before the first sandbox is asked for, and a sandbox has its name and tags
from it: whoever comes after a controller that was killed knows what was meant, and finds what runs.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from atoll.agent.bucket import Objects
from atoll.backends.bucket_backend import StoreBackend
from atoll.backends.modal.client import AlreadyStarted, Sandboxes, check_credentials
from atoll.backends.modal.options import SUPPORTS, ModalOptions
from atoll.backends.modal.render import (
    ATTEMPT,
    RANK,
    planned_lifetime_s,
    prefix_of,
    render_sandbox,
    sandbox_name,
    tags_of,
)
from atoll.backends.recorded import Json
from atoll.backends.records import AttemptKey, JobState, has_open_cause
from atoll.core.config import options_of
from atoll.core.errors import Permanent, Temporary
from atoll.core.executors import PlaneContext
from atoll.core.spec import TrainingSpec
from atoll.core.status import LogLine, Training
from atoll.logs.bucket import ObjectLogs

REFUSAL_S = 2.0  # how long a start waits for a refusal; what lasts longer goes on beside
AT_ONCE = 32  # questions under way at a time
UNSAID = "does its image have Python and atoll[store], and does it reach the store?"


class _Gang:
    """What this process knows of the sandboxes of one training."""

    def __init__(self) -> None:
        self.keys: dict[str, AttemptKey] = {}  # by the id of the sandbox
        self.ends: dict[AttemptKey, JobState] = {}
        self.requested: dict[AttemptKey, asyncio.Task[None]] = {}
        self.refusal: Permanent | None = None
        self.trouble = ""

    @property
    def lives(self) -> set[str]:
        """The ids of those that have not ended, as far as is known."""
        return {id for id, key in self.keys.items() if key not in self.ends}

    def ids_of(self, keys: Sequence[AttemptKey]) -> list[str]:
        wanted = set(keys)
        return [id for id, key in self.keys.items() if key in wanted]


class ModalBackend(StoreBackend):
    """The Executor of Modal. Ranks do not reach each other."""

    name = "modal"
    options_type = ModalOptions
    SUPPORTS = SUPPORTS
    job_variable = "MODAL_TASK_ID"

    def __init__(self, options: ModalOptions, *, clock: Callable[[], float] | None = None) -> None:
        super().__init__(python=options.python, poll_s=options.poll_s, clock=clock)
        self.options = options
        self.sandboxes = Sandboxes(options)
        self._gangs: dict[str, _Gang] = {}
        self._creates = asyncio.Semaphore(options.creates)
        self._questions = asyncio.Semaphore(AT_ONCE)

    @classmethod
    def configured(cls, name: str, options: dict[str, Any], home: PlaneContext) -> ModalBackend:
        """Built from `[executors.NAME]`. Raises Permanent without credentials."""
        backend = cls(options_of(ModalOptions, options))
        check_credentials()
        backend.name = name
        return backend

    @classmethod
    def preview(cls, options: ModalOptions, home: PlaneContext, training: Training) -> str:
        """The sandboxes of the first attempts, as JSON. Modal is not asked."""
        options.check(training.spec)
        records = prefix_of(training, options, "records")
        ranks = range(training.spec.world_size.target)
        created = [render_sandbox(training, rank, 0, records, options)._asdict() for rank in ranks]
        return json.dumps(created, indent=2, default=repr) + "\n"

    async def probe(self) -> None:
        await self.sandboxes.hello()

    def check(self, spec: TrainingSpec) -> None:
        self.options.check(spec)

    async def close(self) -> None:
        tasks = [task for gang in self._gangs.values() for task in gang.requested.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # The verbs

    async def start_jobs(self, training: Training, attempt: int, ranks: Sequence[int]) -> None:
        """Asks for all at once, and goes on where one of them has to wait for room."""
        gang = self._gang(training)
        self._raise_refusal(gang)
        tasks = []
        for key in ((rank, attempt) for rank in ranks):
            if key not in gang.requested:
                gang.requested[key] = asyncio.create_task(self._create(training, gang, key))
                tasks.append(gang.requested[key])
        if tasks:
            await asyncio.wait(tasks, timeout=REFUSAL_S)
        self._raise_refusal(gang)

    async def list_jobs(self, training: Training) -> Mapping[AttemptKey, JobState]:
        gang = self._gang(training)
        running = await self.sandboxes.running(tags_of(training.uid), gang.lives)
        await asyncio.gather(
            *(self._learn(gang, each) for each in running if each not in gang.keys)
        )
        jobs = {
            gang.keys[each]: JobState("running", message="Modal has not started it yet")
            for each in running
            if each in gang.keys
        }
        detail = gang.trouble or "Modal is asked for it, and waits for room"
        for key in gang.requested:
            jobs.setdefault(key, JobState("pending", message=detail))
        known = {*gang.keys.values(), *self._claims(training)}
        departed = sorted(key for key in known if key not in jobs)
        ends = await asyncio.gather(*(self._end(training, gang, key) for key in departed))
        return {**jobs, **dict(zip(departed, ends, strict=True))}

    async def stop_jobs(self, training: Training, attempts: Sequence[AttemptKey]) -> None:
        gang = self._gang(training)
        for key in attempts:
            if (task := gang.requested.get(key)) is not None:
                task.cancel()
        await asyncio.gather(*map(self._terminate, gang.ids_of(attempts)))

    # Where things are

    def launch(self, training: Training) -> Json:
        return {
            **super().launch(training),
            "logs": self.prefix(training, "logs"),
            "life_s": planned_lifetime_s(self.options, training.spec.stop_grace_s),
        }

    async def clear(self, training: Training, *, with_logs: bool) -> None:
        gang = self._gangs.pop(training.uid, None)
        if gang is not None:
            for task in gang.requested.values():
                task.cancel()
        await super().clear(training, with_logs=with_logs)

    def prefix(self, training: Training, part: str) -> str:
        return prefix_of(training, self.options, part)

    # Logs

    async def log_offsets(
        self, training: Training, tail: int, *, ranks: Sequence[int] | None = None
    ) -> dict[int, int]:
        return await self._logs_of(training, ranks).offsets(tail)

    def logs_after(
        self,
        training: Training,
        offsets: Mapping[int, int],
        *,
        ranks: Sequence[int] | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        return self._logs_of(training, ranks).lines(offsets, follow)

    def _logs_of(self, training: Training, ranks: Sequence[int] | None) -> ObjectLogs:
        prefix = self.prefix(training, "logs")
        wanted = range(training.spec.world_size.max) if ranks is None else ranks
        return ObjectLogs(lambda rank: Objects.open(f"{prefix}/{rank}"), list(wanted))

    # One sandbox

    def _gang(self, training: Training) -> _Gang:
        return self._gangs.setdefault(training.uid, _Gang())

    def _raise_refusal(self, gang: _Gang) -> None:
        if gang.refusal is not None:
            error, gang.refusal = gang.refusal, None
            raise error

    async def _create(self, training: Training, gang: _Gang, key: AttemptKey) -> None:
        request = render_sandbox(training, *key, self.prefix(training, "records"), self.options)
        try:
            async with self._creates:
                gang.keys[await self.sandboxes.create(request)] = key
            gang.trouble = ""
        except AlreadyStarted:  # by somebody before: the next listing has its id
            return
        except Permanent as error:
            gang.refusal = error
        except Temporary as error:
            gang.trouble = str(error)
        finally:
            del gang.requested[key]

    async def _learn(self, gang: _Gang, sandbox_id: str) -> None:
        """Which attempt a sandbox is that somebody else has started."""
        async with self._questions:
            tags = await self.sandboxes.tags(sandbox_id)
        rank, attempt = tags.get(RANK, ""), tags.get(ATTEMPT, "")
        if rank.isdigit() and attempt.isdigit():
            gang.keys[sandbox_id] = int(rank), int(attempt)

    def _claims(self, training: Training) -> set[AttemptKey]:
        """The attempts that were claimed, whoever has started them."""
        reader = self._readers.get(training.uid)
        return set() if reader is None else reader.claims()

    async def _end(self, training: Training, gang: _Gang, key: AttemptKey) -> JobState:
        """How a sandbox ended that is in no list. Where its rank's record says all, nobody is
        asked."""
        if key in gang.ends:
            return gang.ends[key]
        reader = self._readers.get(training.uid)
        record = None if reader is None else reader.exit_of(key)
        if record is not None and not has_open_cause(record):
            job = JobState("ended")
        else:
            ids = gang.ids_of([key])
            async with self._questions:
                if ids:
                    end = await self.sandboxes.end_of(ids[-1])
                else:
                    name = sandbox_name(training.uid, *key)
                    end = await self.sandboxes.end_by_name(name)
            if end is None:
                return JobState("running")  # the listing was late
            is_claimed = key in self._claims(training)
            detail = end.detail if is_claimed else f"{end.detail}: {UNSAID}"
            job = JobState("ended", reason=end.reason, message=detail)
        gang.ends[key] = job
        return job

    async def _terminate(self, sandbox_id: str) -> None:
        async with self._questions:
            await self.sandboxes.terminate(sandbox_id)
