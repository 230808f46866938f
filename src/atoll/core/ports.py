"""What the controller works through: a store of trainings, and executors.

`main.py` builds the real ones. Every implementation passes the contract suite under
`tests/contract/`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from atoll.core.errors import Permanent, ValidationError
from atoll.core.executors import Limits, PlaneContext, ResourceUse
from atoll.core.metrics import RankUsage
from atoll.core.model import Model
from atoll.core.rank_access import ExecRequest, ExecResult, ExecTarget
from atoll.core.spec import TrainingSpec
from atoll.core.status import (
    AttemptStatus,
    DesiredState,
    Event,
    Followup,
    LogLine,
    Observation,
    RankStatus,
    Status,
    Training,
)

# What a backend does not support of a spec: a table of limits for each, which is read here alone.
#
# A limit refuses a training that could not do what it is for, or lets it run and says what has no
# effect.

Test = Callable[[TrainingSpec, Any], bool]  # of a spec and the options of an executor
Reason = str | Callable[[TrainingSpec, Any], str]


def always(spec: TrainingSpec, options: Any) -> bool:
    return True


class Limit(NamedTuple):
    """A field, by its name in Python, that a backend does not support, or not `when` this holds."""

    field: str
    reason: Reason
    when: Test
    is_refused: bool


def refuse(field: str, expected: Reason, *, when: Test = always) -> Limit:
    return Limit(field, expected, when, is_refused=True)


def ignore(field: str, reason: Reason, *, when: Test = always) -> Limit:
    return Limit(field, reason, when, is_refused=False)


NO_STALL_RESTART = refuse(
    "stall_restart", "expected none: this executor cannot restart stalled ranks"
)


def no_way_into(ranks: str) -> tuple[Limit, ...]:
    """The rows of a backend whose ranks the control plane cannot enter; `core/rank_access.py`
    reads them."""
    return tuple(refuse(action, f"it has no way into {ranks}") for action in ACTIONS)


ACTIONS = ("exec", "kill", "stacks")


def optional_fields(spec: TrainingSpec) -> dict[str, object]:
    """What the spec asks for of those fields that some backend ignores."""
    needs, providers = spec.resources, spec.provider_filter
    chosen = providers.include or providers.exclude
    fields = {
        "image": spec.image,
        "cpu": needs.cpu,
        "memory": needs.memory,
        "gpu_count": needs.gpu_count,
        "gpu_models": needs.gpu_models,
        "min_gpu_memory_gb": needs.min_gpu_memory_gb,
        "topology_spread": "" if spec.topology_spread == "none" else spec.topology_spread,
        "bench": "" if spec.bench.mode == "off" else spec.bench.mode,
        "stall_s": spec.stall_s,
    }
    requested: dict[str, object] = {name: value for name, value in fields.items() if value}
    if chosen or providers.include is not None:  # an empty list of providers is a filter, too
        requested["provider_filter"] = chosen
    return requested


def check_supported(spec: TrainingSpec, limits: Sequence[Limit], options: Any) -> None:
    """Raises ValidationError, naming the first field that the backend refuses."""
    values = _all_fields(spec)
    for limit in limits:
        if limit.is_refused and limit.field in values and limit.when(spec, options):
            reason = _reason(limit, spec, options)
            raise ValidationError(limit.field, values[limit.field], reason)


def unsupported_fields(
    spec: TrainingSpec, limits: Sequence[Limit], options: Any
) -> dict[str, tuple[object, str]]:
    """Of what the spec asks for, what has no effect: the value and why, by field."""
    values = optional_fields(spec)
    return {
        limit.field: (values[limit.field], _reason(limit, spec, options))
        for limit in limits
        if not limit.is_refused and limit.field in values and limit.when(spec, options)
    }


def describe_unsupported(executor: str, fields: dict[str, tuple[object, str]]) -> str:
    """One line; empty without any."""
    by_reason: dict[str, list[str]] = {}
    for name, (value, reason) in fields.items():
        by_reason.setdefault(reason, []).append(f"{name} {_as_text(value)}")
    if not by_reason:
        return ""
    parts = [f"{', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    return f"{executor} does not support {'; nor '.join(parts)}"


def _all_fields(spec: TrainingSpec) -> dict[str, object]:
    """What the spec asks for of all fields that a limit may name."""
    fields: dict[str, object] = {
        "mesh": spec.mesh,
        "bench_require_gbps": spec.bench.require_gbps if spec.bench.has_floor else None,
        "bench_placement": spec.bench.placement if spec.bench.has_floor else None,
        "rendezvous_backend": spec.rendezvous.backend,
        "code": spec.code and f"{spec.code.files} files",
        "stop_grace_s": spec.stop_grace_s,
        "deadline_s": spec.deadline_s,
        "stall_restart": spec.stall_restart,
    }
    return optional_fields(spec) | {name: value for name, value in fields.items() if value}


def _reason(limit: Limit, spec: TrainingSpec, options: Any) -> str:
    return limit.reason if isinstance(limit.reason, str) else limit.reason(spec, options)


def _as_text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


Key = tuple[str, str]  # namespace, name
PAGE_BYTES = 2 * 2**20  # one training of 10,000 ranks, or hundreds of small ones


class StopCause(NamedTuple):
    """Why a training was stopped, as in `Status.failing`; empty if it was cancelled."""

    reason: str = ""
    message: str = ""


class Executor:
    """Where ranks run: the base of every backend. A backend has `apply`, `observe`, `release`,
    `purge` and `logs`; all else does nothing unless a backend has it.

    Every call may be repeated, and the caller may die between any two.
    """

    name: str = ""
    options: Any = None
    options_type: ClassVar[type[Any] | None] = None
    # What of a spec the backend does not support; read by `core/ports.py`.
    SUPPORTS: ClassVar[Sequence[Limit]] = (NO_STALL_RESTART, *no_way_into("its ranks"))
    # Whether other processes follow its trainings, too: launches from scripts. `release` then
    # leaves what they read, and `purge` removes it.
    is_shared: bool = False

    @classmethod
    def configured(cls, name: str, options: dict[str, Any], home: PlaneContext) -> Executor:
        """Built from `[executors.NAME]`, not yet connected to anything. Raises ValidationError
        naming the option that is wrong, and Permanent where this machine lacks something, such as
        credentials."""
        raise NotImplementedError

    @classmethod
    def preview(cls, options: Any, home: PlaneContext, training: Training) -> str | None:
        """What the backend would be sent, as text; None where nothing is submitted."""
        return None

    # Ranks

    async def apply(self, training: Training, desired: DesiredState) -> None:
        """Starts ranks `0..size-1` that do not run, and stops higher ones, politely for
        the spec's grace. Size 0 stops them all; their records stay.

        A state with an older version than the one in force changes nothing.
        A failed rank is started again until `max_restarts` is used up. Returns once the state is
        durable where it will be carried out. Raises Permanent where it can never be, and where
        `training.status.has_run` but there is no record of it: it would run twice. (Size 0 is
        then already true.)
        """
        raise NotImplementedError

    async def observe(self, training: Training) -> Observation:
        """All ranks of the training, in one request to the backend. Raises Temporary if it fails.

        It changes nothing: work that the observation makes necessary is in `Observation.followups`.
        """
        raise NotImplementedError

    async def perform(self, training: Training, followup: Followup) -> None:
        """Performs the followup, unless it is no longer necessary. The status of `training` already
        holds the observation."""

    async def measure(self, training: Training) -> None:
        """Starts the link bench. It takes no slot of a rank."""

    async def release(self, training: Training) -> None:
        """Removes everything but the logs from the backend. Already removed is success."""
        raise NotImplementedError

    async def purge(self, training: Training) -> None:
        """Removes the logs as well."""
        raise NotImplementedError

    async def changes(self) -> AsyncIterator[Key]:
        """Yields trainings that may have changed. May repeat one, never leaves one out. Ends where
        nobody tells, and `observe` says how soon to look again."""
        return
        yield

    async def find(self, job_name: str, uid: str | None) -> Training | None:
        """The training that another process has launched under this name; None if there is none.
        Only where `is_shared`."""
        return None

    async def stop_cause(self, training: Training) -> StopCause:
        """Why another process has stopped it."""
        return StopCause()

    # The backend as a whole

    async def start(self, store: Store) -> None:
        """Takes over what a control plane before this one has left."""

    async def close(self) -> None:
        """Ends connections and tasks. Ranks keep running."""

    async def probe(self) -> None:
        """Raises BackendError or Denied if the backend does not answer, with the cause."""

    async def sweep(self, known: Callable[[], Awaitable[set[str]]]) -> None:
        """Removes leftovers of trainings that were removed by force: of all but those whose uids
        `known` returns."""

    def renew_reserve(self) -> None:
        """Renews the reserve with which ranks can be stopped on a full disk, if there is space."""

    def notes(self) -> Sequence[str]:
        """What a user should know of the backend, in sentences."""
        return ()

    def capacity(self) -> list[ResourceUse]:
        """What is counted when ranks are admitted, and how much of it is in use."""
        return []

    def set_limits(self, limits: Limits) -> None:
        """Changes what ranks may ask for in all, for now and for the next start. Raises
        ValidationError where nothing is counted."""
        raise ValidationError("executor", self.name, "expected one of kind local: no other counts")

    def check_gpus(self, spec: TrainingSpec) -> None:
        """Raises ValidationError if ranks want GPUs that are not there: they would train on the
        CPU, which nobody asked for."""

    async def machine_use(self) -> dict[str, list[RankUsage]]:
        """What ranks on this machine use of it, by the uid of their training."""
        return {}

    # A way into a rank that runs, for actions that `SUPPORTS` does not refuse

    async def exec_target(self, training: Training, rank: RankStatus) -> ExecTarget:
        """Where the caller can enter the rank by themselves."""
        return ExecTarget(rank=rank.rank, host=rank.node, pid=rank.pid)

    async def exec(self, training: Training, rank: RankStatus, request: ExecRequest) -> ExecResult:
        """Runs a command in the environment and directory of the rank, until one of them ends.
        Raises Conflict if the rank has ended."""
        raise NotImplementedError

    async def kill(self, training: Training, rank: RankStatus, number: int) -> None:
        """Sends a signal to the process of the rank. Raises Conflict if it has ended."""
        raise NotImplementedError

    async def take_stacks(
        self, training: Training, ranks: Sequence[RankStatus]
    ) -> list[dict[str, Any]]:
        """Where these ranks and the processes they started are, as `agent/stacks.py` has it."""
        raise NotImplementedError

    async def stored_stacks(self, training: Training) -> list[dict[str, Any]]:
        """The stacks that were taken of ranks that did not move or had to be killed."""
        return []

    # Specs

    def check(self, spec: TrainingSpec) -> None:
        """Raises ValidationError, naming the field, for a spec that can never run here."""
        check_supported(spec, self.SUPPORTS, self.options)

    async def dry_run(self, spec: TrainingSpec, namespace: str = "default") -> None:
        """Asks the backend whether it would take a training with this spec, and creates nothing.

        Raises ValidationError with the backend's reason if it never will. A backend that does not
        answer refuses nothing.
        """

    def missing_path(self, spec: TrainingSpec) -> str | None:
        """A directory or script of this machine that the spec names and that is not there."""
        return None

    # Where things are; empty where the backend has no such place

    def store_uri(self, training: Training) -> str:
        """The store where ranks of the training meet."""
        return ""

    def metrics_uri(self, training: Training) -> str:
        """Where ranks of the training report to."""
        return ""

    def log_folder(self, training: Training) -> Path | None:
        """It has a folder of segments for each rank, which can be read from any offset."""
        return None

    # Results and logs

    async def result(self, training: Training, rank: int) -> tuple[str, bytes] | None:
        """Return the encoding and the bytes of what the newest attempt of a rank set as its result.

        None if it set none. Raises Temporary if it set one that cannot be read now.
        """
        return None

    async def logs(
        self,
        training: Training,
        *,
        ranks: Sequence[int] | None = None,
        tail: int | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        """Lines with their true rank; `tail` is per rank. A backend has this or `logs_after`.

        With `follow`, waits for new lines until the training is over.
        """
        offsets = {} if tail is None else await self.log_offsets(training, tail, ranks=ranks)
        async for line in self.logs_after(training, offsets, ranks=ranks, follow=follow):
            yield line

    async def log_offsets(
        self, training: Training, tail: int, *, ranks: Sequence[int] | None = None
    ) -> dict[int, int]:
        """The offset (`OffsetLine.at`) of the last `tail` lines of each rank that has a log."""
        return {}

    def logs_after(
        self,
        training: Training,
        offsets: Mapping[int, int],
        *,
        ranks: Sequence[int] | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        """As `logs`, from these offsets on; a rank without one from the start of its log."""
        return self.logs(training, ranks=ranks, follow=follow)


class Change(Model, frozen=True):
    """One write: the training after it, or as it was when it was removed."""

    version: int
    training: Training
    is_removed: bool = False


class SettledTraining(NamedTuple):
    """A training for which there is nothing left to do: the rest is read when somebody asks."""

    uid: str
    key: Key
    phase: str


class Snapshot(NamedTuple):
    """All trainings of one version of a store."""

    version: int
    active: Sequence[Training]  # which are not settled
    settled: Sequence[SettledTraining]

    @property
    def uids(self) -> set[str]:
        return {each.uid for each in self.active} | {each.uid for each in self.settled}


class Update(NamedTuple):
    """An update of one training: as it is now, or was when it was removed."""

    version: int
    uid: str
    key: Key
    training: Training | None  # None: it was settled, and nobody saw it removed
    is_removed: bool = False
    is_listed: bool = False  # it may have been so for long


class TrainingIndex(Protocol):
    """The trainings of a store, in memory; `controller/informer.py` implements it."""

    async def uids(self) -> set[str]:
        """Of all trainings, once they are known."""

    def updates(self) -> AsyncIterator[Update]:
        """All active trainings, then what changes, in order; of several changes that were not
        taken yet, the last. After a gap, all active trainings once more."""


class TrainingPage(NamedTuple):
    """At most so many trainings and so many bytes of them, but at least one if there is one.

    A page may be short, or empty, though there are more.
    """

    items: Sequence[Training]
    more: str | None = None  # where the next page begins; None at the end


class Store(Protocol):
    """Stores trainings. Every write has a version; versions only grow."""

    async def create(
        self,
        training: Training,
        *,
        idempotency_key: str | None = None,
        events: Sequence[Event] = (),
    ) -> Training:
        """Stores it with its first events. A repeated key returns the training it created, and adds
        nothing. Raises Conflict if the name is taken, and NotFound if its code is a digest of code
        that is not stored."""

    async def get(self, key: Key) -> Training:
        """Raises NotFound."""

    async def list(self, namespace: str | None = None) -> Sequence[Training]:
        """All trainings in order of name, for those who need every one."""

    async def snapshot(self) -> Snapshot:
        """Where a watch may begin. Settled trainings cost next to nothing."""

    async def page(
        self,
        namespace: str,
        *,
        after: str = "",
        limit: int = 100,
        max_bytes: int = PAGE_BYTES,
        phase: str | None = None,
        prefix: str = "",
    ) -> TrainingPage:
        """Trainings in order of name, in that phase and with that prefix; `after` is the `more` of
        the page before. Costs the same however many are stored.

        Raises ValidationError for an `after` that is none, Gone for one that has expired.
        """

    async def update_spec(self, training: Training) -> Training:
        """Writes spec and deletion mark. Raises Conflict if `training` is not the stored version.

        A changed spec gets a new generation.
        """

    async def update_status(
        self,
        training: Training,
        status: Status,
        events: Sequence[Event] = (),
        attempts: Sequence[AttemptStatus] = (),
    ) -> Training:
        """Writes status, events and attempts in one step, under the same condition."""

    async def attempts(self, key: Key) -> Sequence[AttemptStatus]:
        """The attempts before the newest of each rank, the last ones, in order of rank."""

    async def remove(self, training: Training) -> None:
        """Removes it with its events. Already removed is success."""

    async def record(self, key: Key, event: Event) -> None:
        """Adds an event without a status change."""

    async def events(self, key: Key, *, since: float | None = None) -> Sequence[Event]:
        """Newest first."""

    def watch(self, after: int, key: Key | None = None) -> AsyncIterator[Change]:
        """Every change after that version, in order. Raises Gone if the log begins later.

        Of one training, of all in a namespace (`key` with an empty name), or of all (None).
        """

    async def source(self, training: Training) -> bytes:
        """The code shipped with the training: its spec may have the digest alone."""

    async def code(self, training: Training) -> bytes:
        """The archive that travels with the training; its digest, where the executor has it."""

    async def version(self) -> int:
        """The newest version."""


class Token(Model, frozen=True, omit_defaults=False):
    """The record of a token, which never holds the token itself."""

    id: str  # the beginning of its hash
    namespace: str
    label: str
    created_at: float


class Tokens(Protocol):
    """The tokens of a control plane, by their hashes; each gives access to one namespace."""

    async def namespace_of(self, hashed: str) -> str | None:
        """None if there is no such token. A removed one may stay valid for some seconds."""

    async def add(self, hashed: str, namespace: str, label: str, now: float) -> Token:
        """Adds a token, which is valid from now on."""

    async def all(self) -> Sequence[Token]:
        """The oldest first."""

    async def remove(self, id: str) -> bool:
        """Whether there was one. Raises Permanent if several hashes begin with `id`."""


def token_of(hashed: str, namespace: str, label: str, created_at: float) -> Token:
    return Token(id=hashed[:12], namespace=namespace, label=label, created_at=created_at)


def with_id(id: str, hashes: Iterable[str]) -> str | None:
    """The hash that begins with `id`. Raises Permanent if several do."""
    matching = [hashed for hashed in hashes if hashed.startswith(id)]
    if len(matching) > 1:
        raise Permanent(f"{len(matching)} tokens begin with {id!r}: give more characters")
    return matching[0] if matching else None
