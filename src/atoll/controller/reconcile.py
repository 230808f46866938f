"""One pass over one training: observe, plan, write the status once, then act.

It may be killed between any two steps: the next pass starts from what is stored and what is
really running.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from atoll.core.errors import Conflict, NotFound, Permanent
from atoll.core.plan import Action, Apply, Forget, Measure, Plan, Release, plan
from atoll.core.ports import Executor, Key, Measuring, Store
from atoll.core.status import Seen, Training

Clock = Callable[[], float]


class Reconciler:
    def __init__(self, store: Store, executors: Mapping[str, Executor], clock: Clock) -> None:
        self._store = store
        self._executors = executors
        self._clock = clock
        self._faults: dict[str, str] = {}  # what an executor will never do, by training

    async def reconcile(self, key: Key) -> float | None:
        """Seconds until the next look, or None: not until something changes."""
        try:
            training = await self._store.get(key)
        except NotFound:
            return None
        made = plan(training, await self._observe(training), self._clock())
        try:
            training = await self._write(training, made)
        except (Conflict, NotFound):
            return 0.0  # changed under us: what was planned is out of date
        for action in made.actions:
            if not await self._perform(training, action):
                return 0.0
        return made.requeue_after_s

    async def _observe(self, training: Training) -> Seen:
        if training.status.is_released:
            return Seen()
        executor = self._executors.get(training.executor)
        if executor is None:
            known = ", ".join(sorted(self._executors))
            return Seen(fault=f"no executor named {training.executor!r}: there is {known}")
        if fault := self._faults.get(training.uid):
            seen = await executor.observe(training)
            return Seen(
                ranks=seen.ranks, wish=seen.wish, is_supervised=seen.is_supervised, fault=fault
            )
        return await executor.observe(training)

    async def _write(self, training: Training, made: Plan) -> Training:
        if made.status == training.status:
            return training
        return await self._store.update_status(training, made.status, made.events)

    async def _whole(self, training: Training) -> Training:
        """With the code itself, where the store shows only its digest."""
        source = training.spec.source
        if source is None or not source.is_digest:
            return training
        source = replace(source, content=await self._store.source(training))
        return replace(training, spec=replace(training.spec, source=source))

    async def _perform(self, training: Training, action: Action) -> bool:
        """False when the action will never work; the next pass fails the training."""
        executor = self._executors.get(training.executor)
        try:
            match action:
                case Apply(wish) if executor:
                    await executor.apply(await self._whole(training), wish)
                case Measure() if isinstance(executor, Measuring):
                    await executor.measure(training)
                case Release() if executor:
                    await executor.release(training)
                case Forget():
                    if executor:
                        await executor.purge(training)
                    await self._store.remove(training)
                    self._faults.pop(training.uid, None)
        except Permanent as error:
            if not isinstance(action, Apply) or action.wish.size == 0:
                raise  # what may still run has not ended
            self._faults[training.uid] = str(error)
            return False
        return True
