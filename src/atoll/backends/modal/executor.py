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
from atoll.backends.records import AttemptKey, JobState, Json
from atoll.core.errors import Permanent, Temporary
from atoll.core.status import Training

REFUSAL_S = 2.0  # how long a start waits for a refusal; what lasts longer goes on beside


class _Gang:
    def __init__(self) -> None:
        self.keys: dict[str, AttemptKey] = {}  # by the id of the sandbox
        self.ends: dict[AttemptKey, JobState] = {}
        self.requested: dict[AttemptKey, asyncio.Task[None]] = {}
        self.refusal: Permanent | None = None
        self.trouble = ""

    def ids_of(self, keys: Sequence[AttemptKey]) -> list[str]:
        wanted = set(keys)
        return [id for id, key in self.keys.items() if key in wanted]

    def cancel(self) -> list[asyncio.Task[None]]:
        """What is requested and not yet there."""
        return [task for task in self.requested.values() if task.cancel()]

    def raise_refusal(self) -> None:
        error, self.refusal = self.refusal, None
        if error is not None:
            raise error


class ModalBackend(StoreBackend):
    """The Executor of Modal. Ranks do not reach each other."""

    name = "modal"
    options_type = ModalOptions
    gang_type = _Gang
    job_variable = "MODAL_TASK_ID"
    options: ModalOptions
    render = staticmethod(render_sandbox)
    check_machine = staticmethod(check_credentials)

    def __init__(self, options: ModalOptions, *, clock: Callable[[], float] | None = None) -> None:
        super().__init__(options, clock=clock)
        self.sandboxes = Sandboxes(options)

    async def probe(self) -> None:
        await self.sandboxes.running({UID: "none"})

    async def close(self) -> None:
        tasks = [task for gang in self._gangs.values() for task in gang.cancel()]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def start_jobs(self, training: Training, attempt: int, ranks: Sequence[int]) -> None:
        """Asks for all at once, and goes on where one of them has to wait for room."""
        gang: _Gang = self.gang(training)
        gang.raise_refusal()
        new = [(rank, attempt) for rank in ranks if (rank, attempt) not in gang.requested]
        for key in new:
            gang.requested[key] = asyncio.create_task(self._create(training, gang, key))
        if new:
            await asyncio.wait([gang.requested[key] for key in new], timeout=REFUSAL_S)
        gang.raise_refusal()

    async def list_jobs(self, training: Training) -> Mapping[AttemptKey, JobState]:
        gang: _Gang = self.gang(training)
        lives = {id for id, key in gang.keys.items() if key not in gang.ends}
        running = await self.sandboxes.running({UID: training.uid}, lives)
        unknown = [each for each in running if each not in gang.keys]  # started by somebody else
        for each, tags in zip(
            unknown, await asyncio.gather(*map(self.sandboxes.tags, unknown)), strict=True
        ):
            if (key := key_of(tags)) is not None:
                gang.keys[each] = key
        jobs = {
            gang.keys[each]: JobState("running", message="Modal has not started it yet")
            for each in running
            if each in gang.keys
        }
        detail = gang.trouble or "Modal waits for capacity"
        for key in gang.requested:
            jobs.setdefault(key, JobState("pending", message=detail))
        known = {*gang.keys.values(), *self.claims(training)}
        departed = sorted(key for key in known if key not in jobs)
        ends = await asyncio.gather(*(self._end(training, gang, key) for key in departed))
        return {**jobs, **dict(zip(departed, ends, strict=True))}

    async def stop_jobs(self, training: Training, attempts: Sequence[AttemptKey]) -> None:
        gang: _Gang = self.gang(training)
        for key in attempts:
            if (task := gang.requested.get(key)) is not None:
                task.cancel()
        await asyncio.gather(*map(self.sandboxes.terminate, gang.ids_of(attempts)))

    def launch(self, training: Training) -> Json:
        life_s = planned_lifetime_s(self.options, training.spec.stop_grace_s)
        return {**super().launch(training), "life_s": life_s}

    async def clear(self, training: Training, *, with_logs: bool) -> None:
        self.gang(training).cancel()
        await super().clear(training, with_logs=with_logs)

    async def _create(self, training: Training, gang: _Gang, key: AttemptKey) -> None:
        try:
            request = render_sandbox(training, key, self.options)
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

    async def _end(self, training: Training, gang: _Gang, key: AttemptKey) -> JobState:
        """How a sandbox ended that is in no list. Where its rank's record says all, nobody is
        asked."""
        if key not in gang.ends:
            end: JobState | None = JobState("ended")
            if not self.is_recorded(training, key):
                id, name = (["", *gang.ids_of([key])])[-1], sandbox_name(training.uid, key)
                end = await self.sandboxes.end_of(id=id, name=name)
            if end is None:
                return JobState("running")  # the listing was late
            gang.ends[key] = end
        return gang.ends[key]
