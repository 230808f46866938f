"""One pass over one training: observe, plan, write the status once, then act.

It may be killed between any two steps: the next pass starts from what is stored and what is
really running. Nothing is done before what was seen is stored, and nothing is done at all where
the status was written by somebody else meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from atoll.core.absent import left_alone, out_of_reach, rejoined, return_of
from atoll.core.clock import Now
from atoll.core.errors import (
    AtollError,
    BackendError,
    Conflict,
    Denied,
    NotFound,
    Permanent,
    StatusRefused,
)
from atoll.core.hindrance import hindered, is_hindered, unhindered
from atoll.core.plan import Action, Apply, Delete, Measure, Plan, Stop, plan
from atoll.core.ports import Executor, Key, Store
from atoll.core.stall import with_idle_times
from atoll.core.status import Observation, ObservedRounds, Status, Training, sooner

ReadClock = Callable[[], Now]
# Seconds since ranks of a training moved, by its uid and when the attempts of its ranks began.
IdleTimes = Callable[[str, Mapping[int, float | None]], Mapping[int, float]]
Rounds = Callable[[str], ObservedRounds | None]

MAX_FAILED_OBSERVATIONS = 2  # that fail in a row before the status mentions it: one may be a blip
MAX_FAILED_ACTIONS, LASTING_S = 3, 10.0  # of an action that fails before the status mentions it
REPORT_AGAIN_S = 30.0  # an error whose words change with every look is written no more often


class Failures:
    """Failures in a row, by training: tells which of them the status should mention."""

    def __init__(self, *, tries: int, lasting_s: float) -> None:
        self._tries, self._lasting_s = tries, lasting_s
        self._since: dict[Key, float] = {}
        self._number: Counter[Key] = Counter()
        self._written_at: dict[Key, float] = {}

    def note(self, key: Key, now: float) -> bool:
        """Whether it lasts, and was not written lately."""
        self._number[key] += 1
        is_lasting = now >= self._since.setdefault(key, now) + self._lasting_s
        is_due = now >= self._written_at.get(key, float("-inf")) + REPORT_AGAIN_S
        return self._number[key] >= self._tries and is_lasting and is_due

    def note_written(self, key: Key, now: float) -> None:
        self._written_at[key] = now

    def clear(self, key: Key) -> None:
        for memory in (self._since, self._number, self._written_at):
            memory.pop(key, None)


def no_rounds(uid: str) -> ObservedRounds | None:
    """Nobody keeps rounds."""
    return None


def unknown(uid: str, started: Mapping[int, float | None]) -> Mapping[int, float]:
    """Nobody knows whether ranks move."""
    return {}


class Reconciler:
    def __init__(
        self,
        store: Store,
        executors: Mapping[str, Executor],
        clock: ReadClock,
        idle_s: IdleTimes = unknown,
        rounds: Rounds = no_rounds,
    ) -> None:
        """`quiet_s`: for how long ranks have not moved, as far as what they report tells; `rounds`:
        what is known of a training's outer rounds."""
        self._idle_s = idle_s
        self._rounds = rounds
        self.keys: dict[str, Key] = {}  # by uid, of all trainings looked at
        self._store = store
        self._executors = executors
        self._clock = clock
        self._faults: dict[str, str] = {}  # what an executor will never do, by training
        self._failed_observations = Failures(tries=MAX_FAILED_OBSERVATIONS, lasting_s=0.0)
        self._failed_actions = Failures(tries=MAX_FAILED_ACTIONS, lasting_s=LASTING_S)
        self._unwritten: dict[str, Status] = {}  # what a store refused to keep, by training

    async def reconcile(self, key: Key) -> float | None:
        """Seconds until the next look, or None: not until something changes."""
        try:
            training = self._with_unwritten_status(await self._store.get(key))
        except NotFound:
            self._failed_observations.clear(key)
            self._failed_actions.clear(key)
            return None
        self.keys[training.uid] = key
        try:
            observation, decision = await self._decide(training)
        except Conflict:
            return 0.0  # another process has changed it, and the store has that by now
        try:
            training = await self._write(training, decision)
        except (Conflict, NotFound):
            return 0.0  # changed under us: what was planned is out of date
        try:
            is_done = await self._do(training, observation, decision.actions)
        except AtollError as error:
            report = hindered(training, error, self._clock().wall)
            await self._note_failure(self._failed_actions, training, report)
            raise
        self._failed_actions.clear(key)
        if is_hindered(training.status) and Delete() not in decision.actions:
            await self._note_success(training)
        return sooner(decision.requeue_after_s, observation.again_in_s) if is_done else 0.0

    async def _decide(self, training: Training) -> tuple[Observation, Plan]:
        """What is seen of the training, and what is to be done. Without its executor, nothing."""
        if training.executor not in self._executors:
            return Observation(), left_alone(training, self._clock().wall)
        observation = await self._observe_training(training)
        decision = plan(rejoined(training), observation, self._clock())
        returned = return_of(training, self._clock().wall)
        return observation, decision._replace(events=(*returned, *decision.events))

    async def _do(
        self, training: Training, observation: Observation, actions: Sequence[Action]
    ) -> bool:
        """False when an action will never work.

        Chores come first: an action may have to wait for one, as for the last pod of a rank to go.
        But one that fails keeps nobody from being stopped: it is raised after the actions.
        """
        trouble = await self._perform_followups(training, observation)
        for action in actions:
            if not await self._act(training, action):
                return False
        if trouble is not None:
            raise trouble
        return True

    async def _note_failure(self, failures: Failures, training: Training, report: Plan) -> None:
        """Writes the report of a failure that comes again and again, not of one that passes."""
        now = self._clock().monotonic
        if failures.note(training.key, now) and report.status != training.status:
            with contextlib.suppress(Conflict, NotFound):  # then the next pass tells of it
                await self._write(training, report)
                failures.note_written(training.key, now)

    async def _note_success(self, training: Training) -> None:
        with contextlib.suppress(Conflict, NotFound):  # then the next pass tells of it
            await self._write(training, unhindered(training, self._clock().wall))

    async def _observe_training(self, training: Training) -> Observation:
        """One that fails is raised; the status says so if it is not the first in a row."""
        try:
            observation = await self._observe_backend(training)
        except (BackendError, Denied) as error:
            report = out_of_reach(training, error, self._clock().wall)
            await self._note_failure(self._failed_observations, training, report)
            raise
        self._failed_observations.clear(training.key)
        return observation

    async def _observe_backend(self, training: Training) -> Observation:
        rounds = self._rounds(training.uid)
        if training.status.is_released:
            return Observation(rounds=rounds)
        executor = self._executors[training.executor]
        if fault := self._faults.get(training.uid):
            return _only_ranks(await executor.observe(training), fault)
        observation = replace(await executor.observe(training), rounds=rounds)
        if training.spec.stall_s is None:
            return observation
        started = {
            observed_rank.rank: observed_rank.started_at for observed_rank in observation.ranks
        }
        return with_idle_times(training, observation, self._idle_s(training.uid, started))

    async def _write(self, training: Training, decision: Plan) -> Training:
        if decision.status == training.status:
            return training
        try:
            stored = await self._store.update_status(
                training, decision.status, decision.events, decision.attempts
            )
        except StatusRefused:
            if training.deletion_requested_at is None:
                raise
            # Its record is to go: what the store will not keep is not needed, its end is.
            self._unwritten[training.uid] = decision.status
            return replace(training, status=decision.status)
        self._unwritten.pop(training.uid, None)
        return stored

    def _with_unwritten_status(self, training: Training) -> Training:
        """The training that is being removed, with the status that its store refused to keep."""
        status = self._unwritten.get(training.uid)
        return training if status is None else replace(training, status=status)

    async def _with_code(self, training: Training) -> Training:
        """With the code itself, where the store shows only its digest."""
        spec = training.spec
        if spec.source is not None and spec.source.is_digest:
            source = replace(spec.source, content=await self._store.source(training))
            spec = replace(spec, source=source)
        if spec.code is not None and spec.code.is_digest:
            code = replace(spec.code, content=await self._store.code(training))
            spec = replace(spec, code=code)
        return replace(training, spec=spec)

    async def _perform_followups(
        self, training: Training, observation: Observation
    ) -> AtollError | None:
        """The first error of a chore; the chores after it are left to the next look."""
        try:
            for followup in observation.followups:
                await self._executors[training.executor].perform(training, followup)
        except AtollError as error:
            return error
        return None

    async def _act(self, training: Training, action: Action) -> bool:
        """False when the action will never work; the next pass fails the training."""
        executor = self._executors[training.executor]
        try:
            match action:
                case Apply(desired):
                    await executor.apply(await self._with_code(training), desired)
                case Measure():
                    await executor.measure(training)
                case Stop():
                    await executor.release(training)
                case Delete():
                    await executor.purge(training)
                    await self._store.remove(training)
                    for memory in (self._faults, self._unwritten, self.keys):
                        memory.pop(training.uid, None)
        except Permanent as error:
            if not isinstance(action, Apply) or action.desired.size == 0:
                raise  # what may still run has not ended
            self._faults[training.uid] = str(error)
            return False
        return True


def _only_ranks(observation: Observation, fault: str) -> Observation:
    """What counts of a look at a training that the executor will never run as it is asked to."""
    return Observation(
        ranks=observation.ranks,
        desired=observation.desired,
        is_supervised=observation.is_supervised,
        fault=fault,
        has_gate=observation.has_gate,
        gate_opened_at=observation.gate_opened_at,
        unsettled=observation.unsettled,
        followups=observation.followups,
        again_in_s=observation.again_in_s,
        at=observation.at,
    )
