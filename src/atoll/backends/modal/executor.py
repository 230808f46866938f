"""The Modal backend: each attempt of a rank is a Sandbox, and its records are in an object store.

The desired state is in the store before the first sandbox is asked for, and a sandbox has its name
and tags from it: whoever comes after a controller that was killed knows what was meant, and finds
what runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from atoll.backends.base import UID, StoreBackend, key_of
from atoll.backends.modal.client import AlreadyStarted, Sandboxes, check_credentials
from atoll.backends.modal.options import ModalOptions
from atoll.backends.modal.render import planned_lifetime_s, render_sandbox, sandbox_name
from atoll.backends.recorded import Json
from atoll.backends.records import AttemptKey, JobState
from atoll.core.errors import Permanent, Temporary
from atoll.core.status import Training

REFUSAL_S = 2.0  # how long a start waits for a refusal; what lasts longer goes on beside
AT_ONCE = 32  # questions under way at a time: few for Modal's rate limit, enough to hide latency


class _Gang:
    """What this process knows of the sandboxes of one training."""

    def __init__(self) -> None:
        self.keys: dict[str, AttemptKey] = {}  # by the id of the sandbox
        self.ends: dict[AttemptKey, JobState] = {}
        self.requested: dict[AttemptKey, asyncio.Task[None]] = {}
        self.refusal: Permanent | None = None
        self.trouble = ""

    def ids_of(self, keys: Sequence[AttemptKey]) -> list[str]:
        wanted = set(keys)
        return [id for id, key in self.keys.items() if key in wanted]

    def raise_refusal(self) -> None:
        if (error := self.refusal) is not None:
            self.refusal = None
            raise error


class ModalBackend(StoreBackend):
    """The Executor of Modal. Ranks do not reach each other."""

    name = "modal"
    options_type = ModalOptions
    SUPPORTS = ModalOptions.SUPPORTS
    job_variable = "MODAL_TASK_ID"
    unclaimed_hint = "does its image have Python and atoll[store], and does it reach the store?"
    options: ModalOptions

    def __init__(self, options: ModalOptions, *, clock: Callable[[], float] | None = None) -> None:
        super().__init__(options, clock=clock)
        self.sandboxes = Sandboxes(options)
        self._gangs: dict[str, _Gang] = {}
        self._creates = asyncio.Semaphore(options.creates)
        self._questions = asyncio.Semaphore(AT_ONCE)

    def check_machine(self) -> None:
        check_credentials()

    @classmethod
    def render(cls, training: Training, key: AttemptKey, options: ModalOptions) -> Json:
        return render_sandbox(training, *key, options)._asdict()

    async def probe(self) -> None:
        await self.sandboxes.hello()

    async def close(self) -> None:
        tasks = [task for gang in self._gangs.values() for task in gang.requested.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def start_jobs(self, training: Training, attempt: int, ranks: Sequence[int]) -> None:
        """Asks for all at once, and goes on where one of them has to wait for room."""
        gang = self._gang(training)
        gang.raise_refusal()
        new = [(rank, attempt) for rank in ranks if (rank, attempt) not in gang.requested]
        for key in new:
            gang.requested[key] = asyncio.create_task(self._create(training, gang, key))
        if new:
            await asyncio.wait([gang.requested[key] for key in new], timeout=REFUSAL_S)
        gang.raise_refusal()

    async def list_jobs(self, training: Training) -> Mapping[AttemptKey, JobState]:
        gang = self._gang(training)
        lives = {id for id, key in gang.keys.items() if key not in gang.ends}
        running = await self.sandboxes.running({UID: training.uid}, lives)
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
        reader = self._readers.get(training.uid)
        known = {*gang.keys.values(), *(reader.claims() if reader else ())}
        departed = sorted(key for key in known if key not in jobs)
        ends = await asyncio.gather(*(self._end(training, gang, key) for key in departed))
        return {**jobs, **dict(zip(departed, ends, strict=True))}

    async def stop_jobs(self, training: Training, attempts: Sequence[AttemptKey]) -> None:
        gang = self._gang(training)
        for key in attempts:
            if (task := gang.requested.get(key)) is not None:
                task.cancel()
        await asyncio.gather(*map(self._terminate, gang.ids_of(attempts)))

    def launch(self, training: Training) -> Json:
        life_s = planned_lifetime_s(self.options, training.spec.stop_grace_s)
        return {**super().launch(training), "life_s": life_s}

    async def clear(self, training: Training, *, with_logs: bool) -> None:
        gang = self._gangs.pop(training.uid, None)
        for task in gang.requested.values() if gang else ():
            task.cancel()
        await super().clear(training, with_logs=with_logs)

    # One sandbox

    def _gang(self, training: Training) -> _Gang:
        return self._gangs.setdefault(training.uid, _Gang())

    async def _create(self, training: Training, gang: _Gang, key: AttemptKey) -> None:
        request = render_sandbox(training, *key, self.options)
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
            key = key_of(await self.sandboxes.tags(sandbox_id))
        if key is not None:
            gang.keys[sandbox_id] = key

    async def _end(self, training: Training, gang: _Gang, key: AttemptKey) -> JobState:
        """How a sandbox ended that is in no list. Where its rank's record says all, nobody is
        asked."""
        if key not in gang.ends:
            job = JobState("ended")
            if not self.is_recorded(training, key):
                ids = gang.ids_of([key])
                async with self._questions:
                    name = sandbox_name(training.uid, *key)
                    end = await self.sandboxes.end_of(id=ids[-1] if ids else "", name=name)
                if end is None:
                    return JobState("running")  # the listing was late
                job = JobState("ended", reason=end.reason, message=end.detail)
            gang.ends[key] = job
        return gang.ends[key]

    async def _terminate(self, sandbox_id: str) -> None:
        async with self._questions:
            await self.sandboxes.terminate(sandbox_id)
