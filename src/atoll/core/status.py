"""The status of a training. Times are seconds since the epoch, durations are seconds."""

from __future__ import annotations

from typing import Literal

from atoll.core import html
from atoll.core.mesh import MeshState
from atoll.core.model import Model
from atoll.core.phase import Phase
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
    failed_at: float | None = None  # the rank's own word on when it failed, before it unwound
    message: str = ""
    log_tail: list[str] = []
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

    A rank that was told to stop is not ready; if it is wanted again, its successor is.
    """

    ready: int = 0
    target: int = 0
    min: int = 0
    max: int = 0
    below_minimum: bool = True

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
    is_stopping: bool = False  # this attempt was told to stop, and its end is not known yet

    @property
    def is_alive(self) -> bool:
        return self.started_at is not None and self.exit is None

    @property
    def is_ready(self) -> bool:
        """It runs and is to go on, or it has exited 0."""
        return self.phase == "Succeeded" or (self.phase == "Running" and not self.is_stopping)


class RankExit(Model, frozen=True):
    """The final record of one rank that ran. `exit_code` is None when it could not be learned."""

    rank: int
    exit_code: int | None
    termination_reason: str
    restart_count: int = 0
    signal: str | None = None
    started_at: float | None = None
    ended_at: float | None = None
    host: str | None = None
    collateral: bool = False
    message: str = ""
    log_tail: list[str] = []

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
    to_target: int
    at: float


class WorldPoint(Model, frozen=True):
    at: float
    target: int
    ready: int


class Usage(Model, frozen=True):
    rank_seconds: float = 0.0
    gpu_seconds: float = 0.0


class BenchResult(Model, frozen=True):
    """One measurement of the link between two hosts. Bandwidths in Gbit/s."""

    measured_at: float
    probe_node_a: str
    probe_node_b: str
    size_bytes_swept: list[int] = []
    busbw_gbps_p10: float | None = None
    busbw_gbps_p50: float | None = None
    busbw_gbps_p90: float | None = None
    algbw_gbps_p50: float | None = None
    latency_us_at_1mib: float | None = None
    is_worker_pair: bool = True
    points: list[tuple[int, float]] = []  # (bytes, Gbit/s), for the plot


BenchPhase = Literal["", "Pending", "Running", "Succeeded", "Failed", "TimedOut", "Skipped"]


class BenchStatus(Model, frozen=True):
    phase: BenchPhase = ""
    message: str = ""
    result: BenchResult | None = None
    started_at: float | None = None
    completed_at: float | None = None


class ObservedBench(Model, frozen=True):
    """The bench as the executor sees it. `waiting`: it cannot be run yet; `message` says why."""

    state: Literal["idle", "waiting", "running", "done", "failed"]
    message: str = ""
    result: BenchResult | None = None


class MeshStatus(Model, frozen=True):
    """Whether the hosts of a training can reach each other; `message` names pairs that cannot."""

    state: MeshState
    message: str = ""
    hosts: int = 1
    foreign_writes: int = 0  # to keys of the gate, by somebody else; they were put right


class DesiredState(Model, frozen=True):
    """What an executor keeps: ranks `0..size-1`. Size 0 is: stop them all.

    `redo` names attempts that no longer count: such a rank starts anew, its budget whole.
    Versions grow, so an older look is told from a newer one.
    """

    version: int
    size: int
    discarded_attempts: dict[int, int] = {}


class StatusHead(Model, frozen=True):
    """What is known of a training beside its ranks."""

    phase: Phase = Phase.NONE
    reason: str = ""
    message: str = ""
    observed_generation: int = 0
    world: WorldStatus = WorldStatus()
    root_cause: RankExit | None = None
    conditions: list[Condition] = []
    started_at: float | None = None  # first rank running
    ended_at: float | None = None
    gate_opened_at: float | None = None  # when ranks were let go
    failing: str = ""  # a decision to fail, kept until every rank is stopped: the reason
    failing_message: str = ""
    # By the steady clock: when the executor, seen with nothing, was last asked for ranks.
    desired_at: float | None = None
    desired: DesiredState | None = None  # the newest wish
    discarded_attempts: dict[
        int, int
    ] = {}  # rank -> attempt that no longer counts: scaled away, wanted again
    stalled: dict[int, float] = {}  # ranks that do not move, and since when
    warnings: list[str] = []  # what is wrong with how it trains, in sentences
    world_size_history: list[WorldPoint] = []
    last_resize: Resize | None = None
    is_released: bool = False  # the executor holds nothing of it any more
    rendezvous_endpoint: str = ""
    mesh: MeshStatus | None = None  # None for a training without a gate
    bench: BenchStatus = BenchStatus()
    # The steady time of "created", "ended" and "bench" (its start), where it is not the wall's.
    started_monotonic: dict[str, float] = {}
    clock_skew: float = 0.0  # the clock that dates the ranks less the steady one, if over 1 s


class Status(StatusHead, frozen=True):
    """All that is known of a training. Written by the controller alone, once a pass."""

    ranks: list[RankStatus] = []
    removed_ranks: list[RankStatus] = []  # ranks scaled away, kept for their exits
    rank_exits: list[RankExit] = []

    @property
    def has_run(self) -> bool:
        """Whether any rank was ever seen to start."""
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
    """The user's object: a wish, and what was seen of it."""

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
    def key(self) -> tuple[str, str]:
        return self.namespace, self.spec.name

    @property
    def is_settled(self) -> bool:
        """Whether it is over, released, and kept until somebody deletes it."""
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
    "UnsupportedFields"  # reason of an event: the executor will not honour all of a spec
)


class Event(Model, frozen=True):
    """Something worth telling, as it happened."""

    type: EventType
    reason: str
    message: str
    at: float
    count: int = 1
    id: int = 0


class AttemptStatus(Model, frozen=True):
    """One start of a rank's process. `ended_at` is None while it runs; `exit_code` is None, too,
    where it could not be learned."""

    rank: int
    attempt: int
    started_at: float | None = None
    ended_at: float | None = None
    exit_code: int | None = None
    reason: str = ""
    signal: str | None = None
    is_stopped: bool = False  # atoll asked for its end
    message: str = ""
    host: str | None = None


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
    # For how long it has reported nothing, printed nothing and used no CPU; None: not looked at.
    idle_s: float | None = None
    is_stopping: bool = False  # told to stop, or about to be, and its end is not known yet
    pod_name: str = ""
    host: str | None = None
    provider: str | None = None
    region: str | None = None
    message: str = ""


class Followup(Model, frozen=True):
    """What a look makes necessary beside the plan. Only the executor that asks knows what it is.

    It may be repeated, and is never stored: the next look asks for what is still to be done.
    """


class ObservedRounds(Model, frozen=True):
    """What is known of the outer rounds of a training's newest run."""

    newest: int = -1  # round
    recent_since: float | None = None  # when the first of the newest few rounds was decided
    last: dict[int, int] = {}  # by rank: the newest round that it was in
    gone: list[int] = []  # ranks that handed in and left
    bad: dict[int, int] = {}  # by rank: the first round in which its part was not finite
    warnings: list[str] = []  # what replicas said, in sentences


class Observation(Model, frozen=True):
    """One look at a whole gang. May be late, by less than `plan.STALE_S`.

    An executor with a start gate of its own is asked for ranks before they may run, and tells when
    it let them go; for one without, the plan decides that.
    """

    ranks: list[ObservedRank] = []
    desired: DesiredState | None = None  # the one accepted; None while there is none
    is_supervised: bool = False  # something acts on the wish without being asked again
    is_closed: bool = False  # every rank of the wish has ended, and it can take no larger one
    capacity: int | None = None  # ranks this training may hold now; None is no limit
    message: str = ""  # what holds it up, for the ranks that are not there
    fault: str = ""  # the executor will never do it, and why
    rendezvous_endpoint: str = ""
    mesh: MeshStatus | None = None
    bench: ObservedBench | None = None  # None: this executor cannot measure links
    has_gate: bool = False  # the executor holds ranks back by itself
    gate_opened_at: float | None = None  # and let them go then
    unsettled: int = 0  # ranks being stopped of which it is not known yet whether they ran
    followups: tuple[Followup, ...] = ()  # to be performed once what was seen is stored
    again_in_s: float | None = None  # look again then, though nothing may change
    at: float | None = None  # the time by the clock that dates the ranks; None: the steady one
    rounds: ObservedRounds | None = None  # added by the controller, where rounds are kept


def sooner(*seconds: float | None) -> float | None:
    """The shortest of these times; None is never."""
    return min((s for s in seconds if s is not None), default=None)


class LogLine(Model, frozen=True):
    """One line that a rank wrote. `print(line)` prints the line."""

    rank: int
    text: str
    time: float | None = None  # when whoever copied it had all of it; None where nobody says

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return html.line_html(self)


class OffsetLine(LogLine, frozen=True):
    """As it travels: with the place after it in its rank's log, where an executor has places."""

    at: int | None = None


class LogMatch(OffsetLine, frozen=True):
    """A line that was searched for: with the place where it starts, too. A long one is cut."""

    start: int | None = None
