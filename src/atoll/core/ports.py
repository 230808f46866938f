"""What the controller needs of the outside: a store to read wishes from, an executor to act with.

`main.py` hands it real ones. Every implementation passes the contract suite under
`tests/contract/`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from atoll.core.errors import Permanent
from atoll.core.model import Model
from atoll.core.spec import TrainingSpec
from atoll.core.status import Chore, Event, LogLine, Seen, Status, Training, Wish

Key = tuple[str, str]  # namespace, name


class Executor(Protocol):
    """Where ranks run. Every verb may be repeated, and the caller may die between any two."""

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
        """The whole gang, in one question to the backend. Raises Temporary when it cannot tell.

        It changes nothing: what a look makes necessary comes back in `Seen.chores`.
        """

    async def release(self, training: Training) -> None:
        """Only logs of the training are left with the backend. Already gone is success."""

    async def purge(self, training: Training) -> None:
        """The logs are gone too."""

    def changes(self) -> AsyncIterator[Key]:
        """Trainings that may look different now. May repeat itself, never forgets one."""

    def logs(
        self,
        training: Training,
        *,
        ranks: Sequence[int] | None = None,
        tail: int | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        """Lines with their true rank; `tail` is per rank.

        With `follow`, new lines are waited for until it says that the training is over.
        """


@runtime_checkable
class Checking(Protocol):
    """An executor that can tell beforehand what it will never run."""

    def check(self, spec: TrainingSpec) -> None:
        """Raises ValidationError, naming the field."""


@runtime_checkable
class Probing(Protocol):
    """An executor that can find out quickly whether its backend answers."""

    async def probe(self) -> None:
        """Raises BackendError or Denied, in words that say what is wrong."""


@runtime_checkable
class Sweeping(Protocol):
    """An executor whose backend may keep things of trainings that were removed by force."""

    async def sweep(self, known: Callable[[], Awaitable[set[str]]]) -> None:
        """Cleared away, but for the trainings that `known` gives the uids of."""


@runtime_checkable
class Resuming(Protocol):
    """An executor whose log lines have places (`PlacedLine.at`) that a reader can go on from."""

    async def log_places(
        self, training: Training, tail: int, *, ranks: Sequence[int] | None = None
    ) -> dict[int, int]:
        """Where the last `tail` lines of each rank begin, for ranks that have a log."""

    def logs_after(
        self,
        training: Training,
        places: Mapping[int, int],
        *,
        ranks: Sequence[int] | None = None,
        follow: Callable[[], bool] | None = None,
    ) -> AsyncIterator[LogLine]:
        """As `logs`, from these places on; a rank without one from its start."""


@runtime_checkable
class Measuring(Protocol):
    """An executor that can measure the link between two hosts of a training."""

    async def measure(self, training: Training) -> None:
        """The link bench is being run, beside the ranks and in none of their slots."""


@runtime_checkable
class Tending(Protocol):
    """An executor whose looks ask for chores."""

    async def perform(self, training: Training, chore: Chore) -> None:
        """Done, or no longer necessary. `training` has the status that holds what was seen."""


class Change(Model, frozen=True):
    """One write: the training after it, or as it was when it was removed."""

    version: int
    training: Training
    is_removed: bool = False


class Store(Protocol):
    """Where trainings are kept. Every write has a version; versions only grow."""

    async def create(self, training: Training, *, idempotency_key: str | None = None) -> Training:
        """Stored. A repeated key gives the training it made; a taken name raises Conflict."""

    async def get(self, key: Key) -> Training:
        """Raises NotFound."""

    async def list(
        self,
        namespace: str | None = None,
        *,
        after: str = "",
        limit: int = -1,
        phase: str | None = None,
        prefix: str = "",
    ) -> Sequence[Training]:
        """By name: those after the name `after`, at most `limit`, in that phase, so beginning."""

    async def update_spec(self, training: Training) -> Training:
        """Spec and deletion mark written, unless something was since `training` was read: Conflict.

        A changed spec gets a new generation.
        """

    async def update_status(
        self, training: Training, status: Status, events: Sequence[Event] = ()
    ) -> Training:
        """Status and events written in one step under the same condition."""

    async def remove(self, training: Training) -> None:
        """Gone, with its events. Already gone is success."""

    async def record(self, key: Key, event: Event) -> None:
        """An event with no status change."""

    async def events(self, key: Key, *, since: float | None = None) -> Sequence[Event]:
        """Newest first."""

    def watch(self, after: int, key: Key | None = None) -> AsyncIterator[Change]:
        """Every change after that version, in order, without gaps. Raises Gone if it cannot."""

    async def source(self, training: Training) -> bytes:
        """The code shipped with it. A store may keep it apart and show only its digest."""

    async def version(self) -> int:
        """The newest version."""


class Token(Model, frozen=True, omit_defaults=False):
    """What is known of a token: never the token itself."""

    id: str  # the beginning of its hash
    namespace: str
    label: str
    created_at: float


class Tokens(Protocol):
    """Who may call: tokens by their hashes, each good for one namespace."""

    async def namespace_of(self, hashed: str) -> str | None:
        """None where there is no such token. One that was removed may be known for some seconds."""

    async def add(self, hashed: str, namespace: str, label: str, now: float) -> Token:
        """Good from now on."""

    async def all(self) -> Sequence[Token]:
        """The oldest first."""

    async def remove(self, id: str) -> bool:
        """Whether it was there. Raises Permanent where more than one begins so."""


def token_of(hashed: str, namespace: str, label: str, created_at: float) -> Token:
    return Token(id=hashed[:12], namespace=namespace, label=label, created_at=created_at)


def with_id(id: str, hashes: Iterable[str]) -> str | None:
    """The hash that begins with `id`. Raises Permanent where more than one does."""
    matching = [hashed for hashed in hashes if hashed.startswith(id)]
    if len(matching) > 1:
        raise Permanent(f"{len(matching)} tokens begin with {id!r}: give more of it")
    return matching[0] if matching else None
