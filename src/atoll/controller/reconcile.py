"""One pass over one training: observe, plan, write the status once, then act.

The process may be killed between any two steps: the next pass starts from what is stored and what
really runs. Nothing is done before the observation is stored, and nothing at all if somebody else
wrote the status meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

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
from atoll.core.phase import ConditionType, Phase
from atoll.core.plan import Action, Apply, Delete, Measure, Plan, Stop, plan, with_idle_times
from atoll.core.ports import Executor, Key, Store
from atoll.core.settings import Setting
from atoll.core.status import (
    Event,
    EventType,
    Observation,
    ObservedRounds,
    Status,
    Training,
    clear_condition,
    has_condition,
    set_condition,
    sooner,
)

ReadClock = Callable[[], Now]
# Seconds since each rank was last active, by the training's uid and the starts of its ranks.
IdleTimes = Callable[[str, Mapping[int, float | None]], Mapping[int, float]]
Rounds = Callable[[str], ObservedRounds | None]
ReportedSettings = Callable[[str], Mapping[str, Setting]]

# Failures in a row before the status mentions them. One failed observation may be a blip of the
# network; an action may fail for some seconds while a backend restarts.
MAX_FAILED_OBSERVATIONS = 2
MAX_FAILED_ACTIONS, LASTING_S = 3, 10.0
# An error may carry a request id or a time, so its text differs each time. Each report is a status
# write that every watcher receives: twice a minute is enough for people.
REPORT_AGAIN_S = 30.0


class Failures:
    """Counts failures in a row by training, and decides which of them the status mentions."""

    def __init__(self, *, count: int, lasting_s: float) -> None:
        self._count, self._lasting_s = count, lasting_s
        self._since: dict[Key, float] = {}
        self._number: Counter[Key] = Counter()
        self._reported_at: dict[Key, float] = {}

    def add(self, key: Key, now: float) -> bool:
        """Whether to report it: the failure lasts, and was not reported lately."""
        self._number[key] += 1
        is_lasting = now >= self._since.setdefault(key, now) + self._lasting_s
        is_due = now >= self._reported_at.get(key, float("-inf")) + REPORT_AGAIN_S
        return self._number[key] >= self._count and is_lasting and is_due

    def set_reported(self, key: Key, now: float) -> None:
        self._reported_at[key] = now

    def clear(self, key: Key) -> None:
        for memory in (self._since, self._number, self._reported_at):
            memory.pop(key, None)


def no_rounds(uid: str) -> ObservedRounds | None:
    """For a control plane that stores no rounds."""
    return None


def no_settings(uid: str) -> Mapping[str, Setting]:
    """For a control plane that stores no metrics."""
    return {}


def no_idle_times(uid: str, started: Mapping[int, float | None]) -> Mapping[int, float]:
    """For a control plane that stores no metrics."""
    return {}


class Reconciler:
    def __init__(
        self,
        store: Store,
        executors: Mapping[str, Executor],
        clock: ReadClock,
        idle_s: IdleTimes = no_idle_times,
        rounds: Rounds = no_rounds,
        settings: ReportedSettings = no_settings,
    ) -> None:
        """`idle_s` and `settings` know what ranks reported, `rounds` the outer rounds."""
        self._store = store
        self._executors = executors
        self._clock = clock
        self._idle_s = idle_s
        self._rounds = rounds
        self._settings = settings
        self.keys: dict[str, Key] = {}  # by uid, of all trainings that had a pass
        self._faults: dict[str, str] = {}  # by uid: what an executor will never do, and why
        self._failed_observations = Failures(count=MAX_FAILED_OBSERVATIONS, lasting_s=0.0)
        self._failed_actions = Failures(count=MAX_FAILED_ACTIONS, lasting_s=LASTING_S)
        self._unwritten: dict[str, Status] = {}  # by uid: what the store refused

    async def reconcile(self, key: Key) -> float | None:
        """Seconds until the next pass; None: not until something changes."""
        try:
            training = await self._read(key)
        except NotFound:
            self._failed_observations.clear(key)
            self._failed_actions.clear(key)
            return None
        try:
            observation, decision = await self._decide(training)
        except Conflict:
            return 0.0  # another process changed it, and the store has that by now
        try:
            training = await self._write(training, decision)
        except (Conflict, NotFound):
            return 0.0  # somebody else changed it: the plan is out of date
        is_possible = await self._act(training, observation, decision.actions)
        if not is_possible:
            return 0.0  # the next pass fails the training
        return sooner(decision.requeue_after_s, observation.again_in_s)

    async def _read(self, key: Key) -> Training:
        training = await self._store.get(key)
        self.keys[training.uid] = key
        status = self._unwritten.get(training.uid)
        return training if status is None else replace(training, status=status)

    async def _decide(self, training: Training) -> tuple[Observation, Plan]:
        if training.executor not in self._executors:
            return Observation(), plan_without_executor(training, self._clock().wall)
        observation = await self._observe(training)
        now = self._clock()
        decision = plan(clear_unavailable(training), observation, now)
        events = (*reachable_again(training, now.wall), *decision.events)
        return observation, decision._replace(events=events)

    async def _observe(self, training: Training) -> Observation:
        """Raises what the executor raises; the status says so from the second failure on."""
        rounds, settings = self._rounds(training.uid), dict(self._settings(training.uid))
        if training.status.is_released:
            return Observation(rounds=rounds, settings=settings)
        try:
            observation = await self._executors[training.executor].observe(training)
        except (BackendError, Denied) as error:
            report = report_unreachable(training, error, self._clock().wall)
            await self._report(self._failed_observations, training, report)
            raise
        self._failed_observations.clear(training.key)
        if fault := self._faults.get(training.uid):
            return _only_ranks(observation, fault)
        observation = replace(observation, rounds=rounds, settings=settings)
        if training.spec.stall_s is None:
            return observation
        started = {rank.rank: rank.started_at for rank in observation.ranks}
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
            # The record is to be deleted: its end matters, what the store refuses does not.
            self._unwritten[training.uid] = decision.status
            return replace(training, status=decision.status)
        self._unwritten.pop(training.uid, None)
        return stored

    async def _act(
        self, training: Training, observation: Observation, actions: Sequence[Action]
    ) -> bool:
        """Followups first, then actions. False if the executor will never do one of them.

        An action may have to wait for a followup, as for the last pod of a rank to go. But a
        followup that fails keeps no rank from being stopped: its error is raised at the end.
        """
        try:
            error = await self._perform_followups(training, observation)
            for action in actions:
                if not await self._perform(training, action):
                    return False
            if error is not None:
                raise error
        except AtollError as error:
            report = report_failing(training, error, self._clock().wall)
            await self._report(self._failed_actions, training, report)
            raise
        self._failed_actions.clear(training.key)
        if (
            has_condition(training.status, ConditionType.BACKEND_FAILING)
            and Delete() not in actions
        ):
            with contextlib.suppress(Conflict, NotFound):  # then the next pass reports it
                await self._write(training, report_working(training, self._clock().wall))
        return True

    async def _perform_followups(
        self, training: Training, observation: Observation
    ) -> AtollError | None:
        """The first error; the next observation asks again for the followups after it."""
        try:
            for followup in observation.followups:
                await self._executors[training.executor].perform(training, followup)
        except AtollError as error:
            return error
        return None

    async def _perform(self, training: Training, action: Action) -> bool:
        """False if the executor will never do it."""
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
                raise  # ranks may still run: their end is not known
            self._faults[training.uid] = str(error)
            return False
        return True

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

    async def _report(self, failures: Failures, training: Training, report: Plan) -> None:
        """Writes the report of a failure that lasts."""
        now = self._clock().monotonic
        if failures.add(training.key, now) and report.status != training.status:
            with contextlib.suppress(Conflict, NotFound):  # then the next pass reports it
                await self._write(training, report)
                failures.set_reported(training.key, now)


def _only_ranks(observation: Observation, fault: str) -> Observation:
    """The part that counts once the executor refuses the training: its ranks, until they end."""
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


# What the status says while an executor is missing, does not answer, or fails at an action. Pure.
#
# The ranks may be running where nobody can observe them. So the status says what is wrong and
# nothing else happens: the training does not fail, none of its ranks is stopped, and its record
# stays until the executor is back.

# A status repeats this much of an error: a sentence and a path, not a page of HTML from a proxy.
MAX_ERROR_CHARS = 500


def plan_without_executor(training: Training, now: float) -> Plan:
    """Nothing until the control plane is started again with this executor configured."""
    status = training.status
    if status.is_released and training.deletion_requested_at is None:
        return Plan(status)  # no executor has anything left to do
    message = _missing_message(training)
    after = _set_unavailable(
        status, ConditionType.EXECUTOR_MISSING, ConditionType.EXECUTOR_MISSING, message, now
    )
    if after.phase is Phase.NONE:
        after = replace(after, phase=Phase.PENDING)
    events = (
        ()
        if after == status
        else (_event("Warning", ConditionType.EXECUTOR_MISSING, message, now),)
    )
    return Plan(after, events=events)


def report_unreachable(training: Training, error: Exception, now: float) -> Plan:
    """The executor does not answer. The rest of the status stays as last observed."""
    status, name = training.status, training.executor
    message = f"the executor {name!r} cannot be reached: {_shorten(error)}"
    after = _set_unavailable(
        status, ConditionType.EXECUTOR_UNREACHABLE, "Unreachable", message, now
    )
    is_new = not has_condition(status, ConditionType.EXECUTOR_UNREACHABLE)
    event = _event("Warning", ConditionType.EXECUTOR_UNREACHABLE, message, now)
    return Plan(after, events=(event,) if is_new else ())


def clear_unavailable(training: Training) -> Training:
    """The training without the conditions of an executor that is back."""
    status = training.status
    conditions = clear_condition(
        status.conditions, ConditionType.EXECUTOR_MISSING, ConditionType.EXECUTOR_UNREACHABLE
    )
    if conditions == status.conditions:
        return training
    return replace(training, status=replace(status, conditions=conditions))


def reachable_again(training: Training, now: float) -> tuple[Event, ...]:
    """The event of an executor that did not answer and now does."""
    if not has_condition(training.status, ConditionType.EXECUTOR_UNREACHABLE):
        return ()
    message = f"the executor {training.executor!r} answers again"
    return (_event("Normal", "ExecutorReachable", message, now),)


def report_failing(training: Training, error: Exception, now: float) -> Plan:
    """An action fails again and again. It is retried without end."""
    status, name = training.status, training.executor
    message = f"the executor {name!r} fails, and atoll tries again: {_shorten(error)}"
    conditions = set_condition(
        status.conditions, ConditionType.BACKEND_FAILING, "ExecutorError", message, now
    )
    is_new = not has_condition(status, ConditionType.BACKEND_FAILING)
    event = _event("Warning", ConditionType.BACKEND_FAILING, message, now)
    return Plan(replace(status, conditions=conditions), events=(event,) if is_new else ())


def report_working(training: Training, now: float) -> Plan:
    """The action that failed has succeeded."""
    conditions = clear_condition(training.status.conditions, ConditionType.BACKEND_FAILING)
    message = f"the executor {training.executor!r} works again"
    event = _event("Normal", "BackendWorking", message, now)
    return Plan(replace(training.status, conditions=conditions), events=(event,))


def _set_unavailable(
    status: Status, type: ConditionType, reason: str, message: str, now: float
) -> Status:
    """With one of the two conditions; an executor is either missing or unreachable."""
    other = {ConditionType.EXECUTOR_MISSING, ConditionType.EXECUTOR_UNREACHABLE} - {type}
    others = clear_condition(status.conditions, *other)
    after = replace(status, conditions=set_condition(others, type, reason, message, now))
    return after if status.phase.is_terminal else replace(after, message=message)


def _missing_message(training: Training) -> str:
    effect = "nothing happens to the training"
    if training.deletion_requested_at is not None:
        effect = "the deletion waits"
    elif training.spec.cancel and not training.status.phase.is_terminal:
        effect = "the cancellation waits"
    return f"the executor {training.executor!r} is not configured: {effect} until it is"


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split())[:MAX_ERROR_CHARS]


def _event(type: EventType, reason: str, message: str, now: float) -> Event:
    return Event(type=type, reason=reason, message=message, at=now)
