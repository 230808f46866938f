"""The interfaces that the controller works through: a store of trainings, and executors.

`run.py` builds the real ones. Every implementation passes the contract suite under
`tests/contract/`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from atoll.core.errors import Permanent
from atoll.core.model import Model
from atoll.core.spec import TrainingSpec
from atoll.core.status import (
    AttemptStatus,
    Chore,
    Event,
    LogLine,
    Seen,
    Status,
    Training,
    Wish,
)

Key = tuple[str, str]  # namespace, name
PAGE_BYTES = 2 * 2**20


class Executor(Protocol):
    """Where ranks run. Every call may be repeated, and the caller may die between any two."""

    name: str

    async def apply(self, training: Training, wish: Wish) -> None:
        """Ranks `0..size-1` are being started or kept; higher ones are being stopped, politely for
        the spec's grace. Size 0 stops them all; what is known of them is kept.

        A wish older than the one in force, by its version, changes nothing.
        A failed rank is started again until `max_restarts` is used up. Returns once the wish is
        durable where it will be carried out. Raises Permanent where it can never be, and where
        `training.status.has_run` but there is no record of it: it would run twice. (Size 0 is
        then already true.)
        """

    async def observe(self, training: Training) -> Seen:
        """All ranks of the training, in one request to the backend. Raises Temporary if it fails.

        It changes nothing: work that the observation makes necessary is in `Seen.chores`.
        """

    async def release(self, training: Training) -> None:
        """Removes everything but the logs from the backend. Already removed is success."""

    async def purge(self, training: Training) -> None:
        """Removes the logs as well."""

    def changes(self) -> AsyncIterator[Key]:
        """Yields trainings that may have changed. May repeat one, never leaves one out."""

    def logs(
        self,
        training: Training,
        *,
        ranks: Sequence[int] | None = None,
        tail: int | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        """Lines with their true rank; `tail` is per rank.

        With `follow`, waits for new lines until the training is over.
        """


@runtime_checkable
class Checking(Protocol):
    """An executor that can refuse a spec which it will never be able to run."""

    def check(self, spec: TrainingSpec) -> None:
        """Raises ValidationError, naming the field."""


@runtime_checkable
class Trying(Protocol):
    """An executor whose backend can say beforehand that it will never take a spec."""

    async def try_out(self, spec: TrainingSpec) -> None:
        """Raises ValidationError with the backend's words. Nothing is started; a backend that does
        not answer refuses nothing."""


@runtime_checkable
class Ignoring(Protocol):
    """An executor that runs a training also where it cannot honour all of its spec."""

    def ignored(self, spec: TrainingSpec) -> Mapping[str, str]:
        """Why, by the name in Python of each field without effect here, asked for or not."""


@runtime_checkable
class OnThisMachine(Protocol):
    """An executor whose ranks run in directories of this machine."""

    def gone(self, spec: TrainingSpec) -> str:
        """A directory or script that the spec names and that is not there; empty if all are."""


@runtime_checkable
class Probing(Protocol):
    """An executor that can find out quickly whether its backend answers."""

    async def probe(self) -> None:
        """Raises BackendError or Denied if the backend does not answer, with the cause."""


@runtime_checkable
class Sweeping(Protocol):
    """An executor whose backend may hold leftovers of trainings that were removed by force."""

    async def sweep(self, known: Callable[[], Awaitable[set[str]]]) -> None:
        """Removes the leftovers of all trainings but those whose uids `known` returns."""


@runtime_checkable
class Resuming(Protocol):
    """An executor whose log lines have places (`PlacedLine.at`) that a reader can go on from."""

    async def log_places(
        self, training: Training, tail: int, *, ranks: Sequence[int] | None = None
    ) -> dict[int, int]:
        """The place of the last `tail` lines of each rank that has a log."""

    def logs_after(
        self,
        training: Training,
        places: Mapping[int, int],
        *,
        ranks: Sequence[int] | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        """As `logs`, from these places on; a rank without a place from the start of its log."""


@runtime_checkable
class LogFiles(Protocol):
    """An executor that has the logs of ranks as files, which can be read from any place."""

    def log_folder(self, training: Training) -> Path:
        """It has a folder of segments for each rank."""


@runtime_checkable
class Measuring(Protocol):
    """An executor that can measure the link between two hosts of a training."""

    async def measure(self, training: Training) -> None:
        """Starts the link bench, beside the ranks and in none of their slots."""


@runtime_checkable
class Tending(Protocol):
    """An executor whose observations ask for chores."""

    async def perform(self, training: Training, chore: Chore) -> None:
        """Performs the chore, unless it is no longer necessary. The status of `training` already
        holds what was seen."""


class Change(Model, frozen=True):
    """One write: the training after it, or as it was when it was removed."""

    version: int
    training: Training
    is_removed: bool = False


class TrainingPage(NamedTuple):
    """At most so many trainings and so many bytes of them, but at least one if there is one.

    A page may be short, or empty, though there are more.
    """

    items: Sequence[Training]
    more: str | None = None  # where the next page begins; None at the end


class Store(Protocol):
    """Where trainings are kept. Every write has a version; versions only grow."""

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
        """Every change after that version, in order. Raises Gone if some are no longer kept.

        Of one training, of all in a namespace (`key` with an empty name), or of all (None).
        """

    async def source(self, training: Training) -> bytes:
        """The code shipped with the training: a store may keep only its digest in the spec."""

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
