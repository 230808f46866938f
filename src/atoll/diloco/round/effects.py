"""What the machine of a round and its driver say to each other.

First the machine's settings, offers, results and errors, then its effects with their answers.

The machine yields an effect and is sent its answer. Where the store fails, the driver throws a
StoreError in; whether a failed write happened is then unknown, and it may still happen later.
Nothing here waits, and nothing knows a client, a thread or numpy.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

from atoll.core.errors import AtollError, DistributedError, ValidationError
from atoll.diloco.data import ranges
from atoll.diloco.data.ledger import Ledger
from atoll.diloco.data.ranges import Ranges
from atoll.diloco.round.objects import (
    ZERO,
    Checkpoint,
    Manifest,
    Member,
    Outcome,
    UploadHeader,
)
from atoll.objectstore.effects import Create as Create
from atoll.objectstore.effects import Delete as Delete
from atoll.objectstore.effects import Get as Get
from atoll.objectstore.effects import List as List
from atoll.objectstore.effects import Put as Put
from atoll.objectstore.effects import StoreError as StoreError

R = TypeVar("R")


class StoreIgnoresConditions(AtollError):
    """The store overwrites an object that was to be created only if it was not there."""


class UnlikeUpload(ValidationError):
    """Replicas of one run have other settings."""


class Stuck(DistributedError):
    """An object that the run needs did not come, or is damaged, until the timeout."""


# -- Calls of the machine -------------------------------------------------------------------------

MEMBER, LATE, DROPPED, LEFT = "member", "late", "dropped", "left"
UNKNOWN_LAUNCH = "launch"  # where nothing tells one launch from the next


@dataclass(frozen=True)
class RoundConfig:
    """`cells` and `sizes` of each fragment. `together`: as many ranks were started at once.

    `quorum`: so many members a round needs, the first one `first_quorum`, too. `has_direct`: rounds
    of one or two members read each other's uploads and store no mean.
    """

    rank: int
    world: int
    nonce: str
    layout: str
    shards: int
    cells: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    codec: str = "fp32"
    mean_codec: str = "fp32"
    launch: str = UNKNOWN_LAUNCH
    processes: int = 1
    quorum: int = 1
    first_quorum: int = 1
    together: tuple[int, ...] = ()
    timeout_s: float = 600.0
    has_direct: bool = True
    keep: int = 2  # rounds whose uploads stay, for those who are a little late
    checkpoint_every: int = 5  # so that the means of at most ten rounds stay
    history_block: int = 1000


class Offer(NamedTuple):
    """What a replica brings to a round: the row is in local memory, this is what it says of it.

    `sums`: words for all members of the round, also on the settings that all must have alike: the
    first that differs is what an `UnlikeUpload` names. Those of the last offer that had any count.
    `next_s`: how long the period after the round is, where periods go by the clock.
    """

    weight: float
    steps: int
    tokens: float = 0.0
    claim: Ranges = ()
    want: int = 0
    end: int | None = None
    sums: dict[str, str] = {}
    is_finite: bool = True
    next_s: float = 0.0

    def with_later(self, since: Offer) -> Offer:
        """What its row is offered with again, with what came since."""
        return self._replace(
            steps=self.steps + since.steps,
            tokens=self.tokens + since.tokens,
            claim=ranges.union(self.claim, since.claim),
        )

    def without(self, member: Member) -> Offer:
        """What is left of it when a part was a member of a round."""
        return self._replace(
            steps=max(0, self.steps - member.steps),
            tokens=max(0.0, self.tokens - member.tokens),
            claim=ranges.minus(self.claim, member.claim),
        )


class RoundResult(NamedTuple):
    """How a call ended. `rounds` are done, `chain` names their state, `hold` may be trained on.

    member: the offer is in the parameters. late: it goes with the next upload. dropped: it is gone,
    training goes on from the global values. left: the replica was told to go, and may; one with
    several fragments uploads the others first.
    """

    fate: str
    rounds: int
    chain: str
    hold: Ranges


class RunState(NamedTuple):
    """What every process of a replica knows of the run after each call.

    `last`: the manifest of the round before. `ledger`: of the shared data. `steps` and `tokens`
    are the run's clock: of the member that trained longest in each round, and of all members.
    `is_pending`: an offer was made for this round, and it is not known yet what became of it.
    `manifest_at`: when the leader had the last manifest, by its own monotonic clock. `is_current`:
    the last upload was in its round, so that is when it was decided.
    """

    round: int = 0
    chain: str = ZERO
    last: Manifest | None = None
    ledger: Ledger | None = None
    steps: int = 0
    tokens: float = 0.0
    is_pending: bool = False
    manifest_at: float = 0.0
    is_current: bool = False

    @property
    def epoch(self) -> int:
        return 0 if self.ledger is None else self.ledger.epoch


class EndMark(NamedTuple):
    """Where another rank of this launch was when it was done."""

    rank: int
    round: int
    chain: str


# -- Effects on small objects: with several processes, the leader performs them alone -------------


@dataclass(frozen=True, slots=True)
class GetAll:
    """Read small objects, several at a time. Answer: {key: bytes or None}."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Headers:
    """Read the headers of uploads, a ranged GET each. Answer: {key: bytes or None}.

    None: the upload is not there, or has no header at its end. `objects.read_header` decodes.
    """

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait, or only look at the clock (0). Answer: the local monotonic time afterwards.

    A wish to leave ends it early.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class Log:
    """Say something to the user. Answer: None."""

    text: str


@dataclass(frozen=True, slots=True)
class Beside:
    """Take these steps beside what comes next, in order. Answer: None, at once.

    One at a time: steps that come while others go on are dropped. They are of small objects only,
    and raise nothing.
    """

    steps: Steps[None]


# -- Effects on values: with several processes, each performs its share ---------------------------

FOREIGN = Outcome("foreign")  # the mean is not one that this replica can go on with


@dataclass(frozen=True, slots=True)
class Upload:
    """Encode the row of the fragment `round % fragments` and store it whole under `key`.

    Before it, the rows of the header's `rest`, each under its own key. The driver fills in all
    `sections`. With several processes: parts, gather, and then the header by the leader. Answer:
    the header as it is stored.
    """

    key: str
    round: int
    header: UploadHeader


@dataclass(frozen=True, slots=True)
class MakeMeans:
    """Make these means and create them; in a direct round, read the uploads and create receipts.

    A damaged input excludes its rank. One that is not there: the mean is not made, or with
    `exclude_missing` made without that rank. A refused create is success: ApplyMeans reads what is
    stored. Answer: {name: True, it is there now; or None, an input was not there}.
    """

    manifest: Manifest
    names: tuple[str, ...]
    exclude_missing: bool = False


@dataclass(frozen=True, slots=True)
class ApplyMeans:
    """Read stored means and take the outer step with them, each once.

    Answer: {name: Outcome as stored; None, it is not there or damaged; or FOREIGN}. FOREIGN: it
    names another manifest, or processes of this replica hold two different means of that name.
    Means applied before are not read again; their outcomes are answered from memory.
    In a direct round `names` are all receipts, and values are stepped once all are there. FOREIGN
    then also: what was stepped while it was read is not what the receipts say, or an upload with a
    good receipt can no longer be read.
    """

    manifest: Manifest
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Store the pieces under the nonce of `meta`, gather, then create `key`. Answer: as Create."""

    key: str
    meta: Checkpoint


@dataclass(frozen=True, slots=True)
class LoadCheckpoint:
    """Replace all values by those of a checkpoint; applied means are forgotten.

    Answer: its meta, or None if it is not there or not whole, for any process. After None or an
    error the values are undefined, until a load succeeds.
    """

    key: str


Effect = (
    Put
    | Create
    | Delete
    | Get
    | GetAll
    | Headers
    | List
    | Sleep
    | Log
    | Beside
    | Upload
    | MakeMeans
    | ApplyMeans
    | SaveCheckpoint
    | LoadCheckpoint
)

# A part of the machine: it yields effects, is sent their answers and returns an R.
Steps = Generator[Effect, Any, R]


class LocalMemory(Protocol):
    """The rows and values of this replica. Calls never wait, and happen between two effects.

    With several processes the calls since the last effect on values are made by all of them, in
    order, before the next one, and at the end of the machine's call.
    """

    @property
    def fresh(self) -> Ranges:
        """The positions trained on, and neither committed nor dropped, at this moment."""

    def begin(self, manifest: Manifest) -> None:
        """The means of this round come next. Forget applied means of any other manifest."""

    def settle(self, manifest: Manifest, outcomes: Mapping[str, Outcome]) -> None:
        """This replica is a member: subtract from the row what the upload carried.

        Only the cells of the means in `outcomes`, only if its weight is not 0, and not where a mean
        excluded this rank. Add the rounding of means that this start of the replica made
        (`made_by`), times total weight / own weight. The claim leaves `fresh` in any case.
        """

    def drop(self) -> None:
        """Drop the rows of all fragments and the training that is not uploaded yet.

        Also forget what the last upload carried: if a manifest names it, its values are read from
        the store like anybody's. The training thread goes on from the global values.
        """

    def end(self) -> None:
        """All means are applied: the values are those after the round. Forget the applied."""
