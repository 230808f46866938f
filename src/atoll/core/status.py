"""The status of a training. Times are seconds since the epoch, durations are seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from atoll.core import html
from atoll.core.clock import Now
from atoll.core.mesh import MeshState
from atoll.core.model import Model
from atoll.core.phase import ConditionType, Phase
from atoll.core.settings import Setting, Settings, merge_settings
from atoll.core.spec import TrainingSpec, WorldSize

SILENT_S = 1.0  # how much later than it happened a death by signal may be noticed

RankPhase = Literal["Pending", "Running", "Succeeded", "Failed", "Stopped"]
ConditionStatus = Literal["True", "False", "Unknown"]
EventType = Literal["Normal", "Warning"]


class Exit(Model, frozen=True):
    """How one attempt of one rank ended. `code` is None when it could not be learned."""

    code: int | None
    at: float
    reason: str
    signal: str | None = None
    is_stopped: bool = False  # atoll asked for it: scale-down, cancel, or another rank's failure
    failed_at: float | None = (
        None  # when the rank failed, as its error file has it: before it unwound
    )
    message: str = ""
    log_tail: list[str] = []
    stack: list[str] = []  # where a rank was that did not move, or that atoll had to kill
    # The rank was to leave a record of its own, and left none: code and time are the backend's.
    is_from_backend: bool = False

    @property
    def is_success(self) -> bool:
        return self.code == 0

    @property
    def order(self) -> float:
        """When this failure began, for telling the first from those it caused.

        A rank killed by a signal says nothing, and its end is noticed late on a busy machine;
        its peers date their own failures exactly.
        """
        if self.failed_at is not None:
            return min(self.at, self.failed_at)
        return self.at - SILENT_S if self.signal and not self.is_stopped else self.at


class WorldStatus(Model, frozen=True):
    """`ready` counts wanted ranks that run or have exited 0, so a finished world keeps it.

    A rank that stops is not ready; if it is wanted again, its successor is.
    """

    ready: int = 0
    """Ranks that run or have exited with code 0."""
    target: int = 0
    """Number of ranks wanted."""
    min: int = 0
    """Minimum number of ranks."""
    max: int = 0
    """Maximum number of ranks."""
    below_minimum: bool = True
    """Whether fewer than min ranks are ready."""

    def _repr_html_(self) -> str:
        return html.world_html(self)

    @classmethod
    def of(cls, ready: int, size: WorldSize) -> WorldStatus:
        """`ready` as observed, the other numbers from the spec."""
        return cls(
            ready=ready,
            target=size.target,
            min=size.min,
            max=size.max,
            below_minimum=ready < size.min,
        )


class RankStatus(Model, frozen=True):
    """One rank now. `message` says what it waits for, or how it ended."""

    rank: int
    phase: RankPhase = "Pending"
    pod_name: str = ""
    node: str | None = None
    pid: int | None = None  # of its newest attempt, on `node`; None where nobody knows it
    provider: str | None = None
    region: str | None = None
    restarts: int = 0
    message: str = ""
    attempt: int = -1
    started_at: float | None = None
    exit: Exit | None = None
    previous_exit: Exit | None = None  # how the attempt before this one ended
    metered_s: float = 0.0  # of attempts that have ended
    missing_since: float | None = None
    is_stopping: bool = False  # this attempt must stop, and its end is not known yet

    @property
    def is_alive(self) -> bool:
        return self.started_at is not None and self.exit is None

    @property
    def is_ready(self) -> bool:
        """Whether it runs and nothing has asked it to stop, or it has exited 0."""
        return self.phase == "Succeeded" or (self.phase == "Running" and not self.is_stopping)


class RankExit(Model, frozen=True):
    """The final record of one rank that ran. `exit_code` is None when it could not be learned."""

    rank: int
    """Number of the rank."""
    exit_code: int | None
    """Exit code; null if nobody knows it."""
    termination_reason: str
    """How the rank ended."""
    restart_count: int = 0
    """How often the rank had been restarted."""
    signal: str | None = None
    """Signal that killed the rank."""
    started_at: float | None = None
    """When the rank started, in seconds since 1970."""
    ended_at: float | None = None
    """When the rank ended, in seconds since 1970."""
    host: str | None = None
    """Host on which the rank ran."""
    collateral: bool = False
    """Whether the rank ended because another one had failed."""
    message: str = ""
    """Details for people."""
    log_tail: list[str] = []
    """Last lines of the log."""
    stack: list[str] = []
    """Where a rank was that did not move or that atoll had to kill, or why that is unknown."""

    @property
    def is_failure(self) -> bool:
        return self.exit_code != 0

    def _repr_html_(self) -> str:
        return html.exits_html([self])


class Condition(Model, frozen=True):
    type: str
    status: ConditionStatus
    reason: str = ""
    message: str = ""
    last_transition_at: float = 0.0


class Resize(Model, frozen=True):
    from_target: int
    """Target before the change."""
    to_target: int
    """Target after the change."""
    at: float
    """When the target changed, in seconds since 1970."""


class WorldPoint(Model, frozen=True):
    at: float
    """When the world changed, in seconds since 1970."""
    target: int
    """Number of ranks wanted."""
    ready: int
    """Number of ranks ready."""


class Usage(Model, frozen=True):
    rank_seconds: float = 0.0
    gpu_seconds: float = 0.0


class BenchResult(Model, frozen=True):
    """One measurement of the link between two hosts. Bandwidths in Gbit/s."""

    measured_at: float
    """When the link was measured, in seconds since 1970."""
    probe_node_a: str
    """The first host."""
    probe_node_b: str
    """The second host."""
    size_bytes_swept: list[int] = []
    """Message sizes in bytes."""
    busbw_gbps_p10: float | None = None
    """Bus bandwidth in Gbit/s, 10th percentile."""
    busbw_gbps_p50: float | None = None
    """Bus bandwidth in Gbit/s, median."""
    busbw_gbps_p90: float | None = None
    """Bus bandwidth in Gbit/s, 90th percentile."""
    algbw_gbps_p50: float | None = None
    """Bandwidth that a program gets, in Gbit/s, median."""
    latency_us_at_1mib: float | None = None
    """Time of a message of 1 MiB in microseconds."""
    is_worker_pair: bool = True
    """Whether both hosts run ranks."""
    points: list[tuple[int, float]] = []
    """Pairs of a message size in bytes and a bandwidth in Gbit/s."""


BenchPhase = Literal["", "Pending", "Running", "Succeeded", "Failed", "TimedOut", "Skipped"]
BENCH_DONE: frozenset[BenchPhase] = frozenset({"Succeeded", "Failed", "TimedOut", "Skipped"})
BENCH_LIMIT_S = 120.0  # from the start of a measurement


class BenchStatus(Model, frozen=True):
    phase: BenchPhase = ""
    """How far the measurement is."""
    message: str = ""
    """Details for people."""
    result: BenchResult | None = None
    """The measurement."""
    started_at: float | None = None
    """When the measurement started, in seconds since 1970."""
    completed_at: float | None = None
    """When the measurement ended, in seconds since 1970."""


class ObservedBench(Model, frozen=True):
    """The bench as the executor sees it. `waiting`: it cannot be run yet; `message` says why."""

    state: Literal["idle", "waiting", "running", "done", "failed"]
    message: str = ""
    result: BenchResult | None = None


class MeshStatus(Model, frozen=True):
    """Whether the hosts of a training can reach each other; `message` names pairs that cannot."""

    state: MeshState
    """Whether every host can reach every other."""
    message: str = ""
    """Which hosts cannot reach each other."""
    hosts: int = 1
    """Number of hosts."""
    foreign_writes: int = 0
    """Keys of the gate that somebody else wrote and that were corrected."""


class DesiredState(Model, frozen=True):
    """The ranks an executor is to run: `0..size-1`. Size 0 stops them all.

    Attempts in `discarded_attempts` (by rank) no longer count: such a rank starts again with its
    full restart budget. Versions grow, so an executor can refuse an older state.
    """

    version: int
    """Grows with every change."""
    size: int
    """Ranks 0 to size-1 are wanted."""
    discarded_attempts: dict[int, int] = {}
    """By rank, an attempt that does not count."""


class StatusHead(Model, frozen=True):
    """The status of a training."""

    phase: Phase = Phase.NONE
    """Phase of the training."""
    reason: str = ""
    """Why the training is in its phase."""
    message: str = ""
    """The same for people, in one sentence."""
    observed_generation: int = 0
    """Newest generation of the spec that this status reflects."""
    world: WorldStatus = WorldStatus()
    """How many ranks there are and how many are wanted."""
    root_cause: RankExit | None = None
    """Exit of the rank that made the training fail."""
    conditions: list[Condition] = []
    """What is true of the training, for `kubectl wait --for=condition=Ready`."""
    started_at: float | None = None
    """When the first rank ran, in seconds since 1970."""
    ended_at: float | None = None
    """When the training ended, in seconds since 1970."""
    gate_opened_at: float | None = None
    """When the start gate opened, in seconds since 1970."""
    failing: str = ""
    """Reason of a decision to fail, until every rank has stopped."""
    failing_message: str = ""
    """The same for people."""
    # By the monotonic clock: when an executor that showed no ranks was last asked for them.
    desired_at: float | None = None
    """When the executor was last asked for ranks that it does not show."""
    desired: DesiredState | None = None
    """What the executor was last asked to run."""
    discarded_attempts: dict[int, int] = {}
    """By rank, an attempt that does not count."""
    stalled: dict[int, float] = {}
    """Stalled ranks and since when, in seconds since 1970."""
    warnings: list[str] = []
    """Problems with the training itself, in sentences."""
    settings: dict[str, Setting] = {}
    """All settings: of the flags of the command, of the spec, and those that ranks reported."""
    world_size_history: list[WorldPoint] = []
    """The latest changes of the world's size."""
    last_resize: Resize | None = None
    """The latest change of the target."""
    is_released: bool = False
    """Whether the executor has removed everything but the logs."""
    rendezvous_endpoint: str = ""
    """Where ranks find each other."""
    mesh: MeshStatus | None = None
    """Whether the hosts can reach each other."""
    bench: BenchStatus = BenchStatus()
    """The measurement of the link between two hosts."""
    # The monotonic time of "created", "ended" and "bench" (its start), where the wall's differs.
    started_monotonic: dict[str, float] = {}
    """Monotonic times of creation, end and bench."""
    clock_skew: float = 0.0
    """Seconds by which the clock of the ranks is ahead."""


class Status(StatusHead, frozen=True):
    """All that is known of a training. Written by the controller alone, once a pass."""

    ranks: list[RankStatus] = []
    removed_ranks: list[RankStatus] = []  # ranks scaled away, for their exits
    rank_exits: list[RankExit] = []

    @property
    def has_run(self) -> bool:
        """Whether any rank has ever started."""
        return any(r.attempt >= 0 for r in (*self.ranks, *self.removed_ranks))

    def ran_for(self, now: float) -> float | None:
        """Seconds from the first rank's start to the last one's end, or to now.

        `ended_at` is when the end was noticed, which may be long after it.
        """
        if self.started_at is None:
            return None
        ends = [e.ended_at for e in self.rank_exits if e.ended_at is not None]
        until = now if self.ended_at is None else max(ends, default=self.ended_at)
        return max(0.0, until - self.started_at)


class Training(Model, frozen=True):
    """The user's object: what they want (`spec`), and what was observed (`status`)."""

    namespace: str
    uid: str
    spec: TrainingSpec
    status: Status = Status()
    generation: int = 1  # bumped by every change of the spec
    resource_version: int = 0  # bumped by every write
    created_at: float = 0.0
    deletion_requested_at: float | None = None

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def display_name(self) -> str:
        """The name as it was given."""
        return self.spec.display_name or self.spec.name

    @property
    def settings(self) -> Settings:
        """What was varied, as far as it is known by now."""
        return self.settings_with({})

    def settings_with(self, reported: Mapping[str, Setting]) -> Settings:
        """The settings once ranks have reported these."""
        command = (*(self.spec.command or ("source",)), *self.spec.args)
        known = {**self.status.settings, **reported}
        return merge_settings(command, self.spec.settings, known)

    @property
    def key(self) -> tuple[str, str]:
        return self.namespace, self.spec.name

    @property
    def is_settled(self) -> bool:
        """Whether it is over and its ranks are released: nothing happens until it is deleted."""
        is_retained = self.spec.ttl_seconds is None and self.deletion_requested_at is None
        return self.status.is_released and is_retained

    @property
    def world(self) -> WorldStatus:
        """`ready` as observed, the rest from the spec: a scale shows at once in `target`."""
        return WorldStatus.of(self.status.world.ready, self.spec.world_size)

    @property
    def has_surplus(self) -> bool:
        """Whether a rank above the target is alive, or may be."""
        target = self.spec.world_size.target
        return any(r.rank >= target and (r.is_alive or r.is_stopping) for r in self.status.ranks)

    @property
    def is_cancelling(self) -> bool:
        return self.spec.cancel or self.deletion_requested_at is not None

    @property
    def executor(self) -> str:
        """The name of the executor. Records without one are of releases that had only `local`."""
        return "local" if self.spec.executor is None else self.spec.executor


class TrainingList(
    Model, frozen=True, rename={"resource_version": "resourceVersion", "continue_": "continue"}
):
    """One page. `continue` is there when there are more; watch from `resource_version`."""

    items: list[Training]
    resource_version: int
    continue_: str | None = None


UNSUPPORTED_FIELDS = (
    "UnsupportedFields"  # reason of an event: the executor does not support all of a spec
)


class Event(Model, frozen=True):
    """Something that happened to a training, for people to read."""

    type: EventType
    """Normal or Warning."""
    reason: str
    """What happened, in one word."""
    message: str
    """What happened, in one sentence."""
    at: float
    """When it happened last, in seconds since 1970."""
    count: int = 1
    """How often it happened in a row."""
    id: int = 0
    """Number of the event."""


class AttemptStatus(Model, frozen=True):
    """One start of a rank's process. `ended_at` is None while it runs; `exit_code` is None, too,
    where it could not be learned."""

    rank: int
    """Number of the rank."""
    attempt: int
    """Number of the attempt, from 0."""
    started_at: float | None = None
    """When the attempt started, in seconds since 1970."""
    ended_at: float | None = None
    """When the attempt ended, in seconds since 1970."""
    exit_code: int | None = None
    """Exit code; null if nobody knows it."""
    reason: str = ""
    """How the attempt ended."""
    signal: str | None = None
    """Signal that killed it."""
    is_stopped: bool = False
    """Whether atoll stopped it."""
    message: str = ""
    """Details for people."""
    host: str | None = None
    """Host on which it ran."""


RankState = Literal["waiting", "running", "exited"]


class ObservedRank(Model, frozen=True):
    """The newest attempt of one rank, as the executor sees it."""

    rank: int
    state: RankState
    attempt: int = 0
    restarts: int = 0  # since this rank was last wanted
    started_at: float | None = None
    metered_s: float | None = None  # how long the attempts before this one ran, where known
    previous_exit: Exit | None = None  # how the one before this ended
    attempts: tuple[AttemptStatus, ...] = ()  # those before this one, where they are known
    exit: Exit | None = None
    # For how long it has reported nothing, printed nothing and used no CPU; None: not measured.
    idle_s: float | None = None
    is_stopping: bool = False  # it stops or is about to, and its end is not known yet
    pod_name: str = ""
    host: str | None = None
    pid: int | None = None
    provider: str | None = None
    region: str | None = None
    message: str = ""


class Followup(Model, frozen=True):
    """Work that an observation makes necessary beyond the plan, such as dropping a finalizer.

    Only the executor that returned it knows what it means. It may be repeated and is never stored:
    the next observation asks again for what is still to be done.
    """


class ObservedRounds(Model, frozen=True):
    """What is known of the outer rounds of a training's newest run."""

    newest: int = -1  # round
    recent_since: float | None = None  # when the first of the newest few rounds was decided
    last: dict[int, int] = {}  # by rank: the newest round that it was in
    left: list[int] = []  # ranks that uploaded and left
    bad: dict[int, int] = {}  # by rank: the first round in which its part was not finite
    warnings: list[str] = []  # what replicas reported, in sentences


class Observation(Model, frozen=True):
    """One observation of all ranks. It may be late by less than `plan.STALE_S`.

    An executor with a start gate of its own gets the desired state before ranks may run, and says
    when it opened the gate; for one without, the plan decides when to start.
    """

    ranks: list[ObservedRank] = []
    desired: DesiredState | None = None  # the one accepted; None while there is none
    is_supervised: bool = False  # the executor keeps it so without another pass
    is_closed: bool = False  # every desired rank has ended, and it cannot grow any more
    capacity: int | None = None  # ranks this training may hold now; None is no limit
    message: str = ""  # what holds it up, for the ranks that are not there
    fault: str = ""  # the executor will never do it, and why
    rendezvous_endpoint: str = ""
    mesh: MeshStatus | None = None
    bench: ObservedBench | None = None  # None: this executor cannot measure links
    has_gate: bool = False  # the executor holds ranks back by itself
    gate_opened_at: float | None = None  # and let them go then
    unsettled: int = 0  # ranks being stopped of which it is not known yet whether they ran
    followups: tuple[Followup, ...] = ()  # to be performed once the observation is stored
    again_in_s: float | None = None  # observe again then, though nothing may change
    at: float | None = None  # the time by the clock that dates the ranks; None: the monotonic one
    rounds: ObservedRounds | None = None  # added by the controller, where rounds are stored
    settings: dict[str, Setting] = {}  # that ranks reported; added by the controller, too


def sooner(*seconds: float | None) -> float | None:
    """The shortest of these times; None is never."""
    return min((s for s in seconds if s is not None), default=None)


class LogLine(Model, frozen=True):
    """One line that a rank wrote. `print(line)` prints the line."""

    rank: int
    text: str
    time: float | None = (
        None  # when the copier of the log had all of it; None where that is unknown
    )

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return html.line_html(self)


class OffsetLine(LogLine, frozen=True):
    """A line with the offset after it in its rank's log, where an executor has offsets."""

    at: int | None = None


class LogMatch(OffsetLine, frozen=True):
    """A hit of a search, with the offset where the line starts. A long one is cut."""

    start: int | None = None


def in_ms(seconds: float) -> float:
    """Whole milliseconds: what is stored of a thousand times stays small."""
    return round(seconds * 1000) / 1000


# The one writer of conditions. A condition keeps its time of change until its status changes.


def set_condition(
    conditions: Iterable[Condition],
    type: ConditionType,
    reason: str,
    message: str,
    now: float,
    *,
    is_true: bool = True,
) -> list[Condition]:
    """The conditions with this one replaced, or added as the last."""
    by_type = {condition.type: condition for condition in conditions}
    status: ConditionStatus = "True" if is_true else "False"
    known = by_type.get(type)
    is_same = known is not None and known.status == status
    by_type[type] = Condition(
        type=type,
        status=status,
        reason=reason,
        message=message,
        last_transition_at=known.last_transition_at if known and is_same else in_ms(now),
    )
    return list(by_type.values())


def clear_condition(conditions: Iterable[Condition], *types: ConditionType) -> list[Condition]:
    """The conditions without those of these types."""
    return [condition for condition in conditions if condition.type not in types]


def has_condition(status: Status, type: ConditionType) -> bool:
    return any(condition.type == type for condition in status.conditions)


# The numbers of a training, all computed from its status.


class TrainingStats(Model, frozen=True, omit_defaults=False):
    """Counters of a training, all from its status. Durations in seconds."""

    ready: int
    target: int
    ranks_running: int
    ranks_succeeded: int
    ranks_failed: int
    restarts: int
    resizes: int
    generation: int
    observed_generation: int
    age_s: float
    running_s: float
    time_to_first_rank_s: float | None
    rank_seconds: float
    gpu_seconds: float


def training_stats(training: Training, time: Now) -> TrainingStats:
    status = training.status
    spent = usage(training, time)
    created_at = status.started_monotonic.get("created", training.created_at)
    started = status.started_at
    phases = [rank.phase for rank in status.ranks]
    targets = [point.target for point in status.world_size_history]
    return TrainingStats(
        ready=status.world.ready,
        target=training.spec.world_size.target,
        ranks_running=phases.count("Running"),
        ranks_succeeded=phases.count("Succeeded"),
        ranks_failed=phases.count("Failed"),
        restarts=sum(rank.restarts for rank in (*status.ranks, *status.removed_ranks)),
        resizes=sum(a != b for a, b in zip(targets, targets[1:], strict=False)),
        generation=training.generation,
        observed_generation=status.observed_generation,
        age_s=max(0.0, time.monotonic - created_at),
        running_s=status.ran_for(time.monotonic + status.clock_skew) or 0.0,
        time_to_first_rank_s=None if started is None else max(0.0, started - training.created_at),
        rank_seconds=spent.rank_seconds,
        gpu_seconds=spent.gpu_seconds,
    )


def usage(training: Training, time: Now) -> Usage:
    """A clock that was set, or a machine that slept, adds nothing."""
    status = training.status
    ranks, now = (*status.ranks, *status.removed_ranks), time.monotonic + status.clock_skew
    running = sum(max(now - (r.started_at or now), 0.0) for r in ranks if r.is_alive)
    seconds = running + sum(r.metered_s for r in ranks)
    gpus = training.spec.resources.gpu_count
    return Usage(rank_seconds=seconds, gpu_seconds=seconds * gpus)
