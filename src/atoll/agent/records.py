"""Records of ranks: what agents write down, and what follows from it.

A record is a JSON object: `t` is its kind, `at` its time, and most have `rank` and `attempt`. The
first record of a key stays, and of `desired` the highest version wins. So the same records, in any
order and any number of times, give the same `Facts`, whether they come from a journal, a folder or
a bucket. With `agent/wrapper.py` this travels as one file, for Python 3.7 and its standard library.
"""

from __future__ import annotations

from collections import namedtuple

TYPE_CHECKING = False  # as in `typing`, which takes longer to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from typing import Any

    Record = Mapping[str, Any]

DESIRED, GATE = "desired", "gate"
CLAIM, START, HEARTBEAT, EXIT = "claim", "start", "heartbeat", "exit"
RESULT, STACKS = "result", "stacks"  # of an attempt, beside the records
# Of an attempt: what it answered to a request in the desired state, and that its round timed out.
ANSWER, ASK = "answer", "ask"
LAUNCH, RENDEZVOUS, CODE = "launch", "rendezvous", "code"  # documents beside the records
# A page of 4 KiB holds an exit with its message; the rest is for the last lines of the log.
MAX_RECORD_BYTES = 16_384
BY_EXECUTOR = "executor"  # in `by` of an exit that the agent itself could not write

FIRST_DELAY_S = 1.0  # before the second restart; the first restart is immediate
MAX_DELAY_S = 30.0  # a crash loop costs a start twice a minute at most


def name_of(rank: int, attempt: int, kind: str) -> str:
    """Return the name of a record in a folder or bucket."""
    return f"{rank}.{attempt}.{kind}"


def desired_record(
    version: int,
    size: int,
    discarded: Mapping[int, int],
    before: Record | None,
    newest: Mapping[int, int],
    at: float,
    **more: Any,
) -> dict[str, Any]:
    """Return the record of a desired state. `newest`: the newest known attempt of each rank.

    `stops` only grows: an attempt that has to stop still has to when its rank is wanted again.
    """
    stops = {rank: set(those) for rank, those in ((before or {}).get("stops") or {}).items()}
    for rank, attempt in discarded.items():
        stops.setdefault(str(rank), set()).add(attempt)
    for rank, attempt in newest.items():
        if rank >= size:
            stops.setdefault(str(rank), set()).add(attempt)
    return {
        "t": DESIRED,
        "version": version,
        "size": size,
        "discarded": {str(rank): attempt for rank, attempt in discarded.items()},
        "stops": {rank: sorted(those) for rank, those in stops.items()},
        "at": at,
        **more,
    }


def gate_record(together: int, at: float) -> dict[str, Any]:
    """Return the record that lets ranks start; `together` of them waited for it."""
    return {"t": GATE, "together": together, "at": at}


def claim_record(rank: int, attempt: int, at: float, **more: Any) -> dict[str, Any]:
    return {"t": CLAIM, "rank": rank, "attempt": attempt, "at": at, **more}


def start_record(rank: int, attempt: int, at: float, **more: Any) -> dict[str, Any]:
    return {"t": START, "rank": rank, "attempt": attempt, "at": at, **more}


def exit_record(rank: int, attempt: int, end: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of an end, with the fields of `process.exit_fields`, of this attempt."""
    return {"t": EXIT, "rank": rank, "attempt": attempt, "stopped": False, **end}


def stops(desired: Record, rank: int) -> list[int]:
    """Return the attempts of a rank that have to stop; restarts are counted anew after each."""
    by_rank = desired.get("stops")
    attempts: list[int] = by_rank.get(str(rank), []) if by_rank else []
    return attempts


def restarts(desired: Record, rank: int, attempt: int) -> int:
    """Return how often the rank had restarted when this attempt began."""
    before = [stop for stop in stops(desired, rank) if stop < attempt]
    return attempt - max(before) - 1 if before else attempt


def restart_delay_s(count: int) -> float:
    """Return the pause before the next restart, after `count` of them."""
    return 0.0 if count == 0 else min(FIRST_DELAY_S * 2.0 ** min(count - 1, 16), MAX_DELAY_S)


def is_unwanted(desired: Record, rank: int, attempt: int) -> bool:
    """Return whether this attempt has to stop: its rank or the attempt is not wanted any more."""
    if rank >= desired["size"]:
        return True
    stopped = stops(desired, rank)
    return bool(stopped) and attempt <= max(stopped)


class AttemptFacts(namedtuple("AttemptFacts", "rank attempt claim start exit")):
    """The records of one attempt of a rank. It is a value: threads may have it."""

    __slots__ = ()
    if TYPE_CHECKING:
        rank: int
        attempt: int
        claim: Record | None
        start: Record | None
        exit: Record | None

    @property
    def is_running(self) -> bool:
        return self.start is not None and self.exit is None

    @property
    def is_nothing(self) -> bool:
        """Whether it was stopped before it ran: as if it had never been."""
        end = self.exit
        return end is not None and end.get("ran") is False and bool(end.get("stopped"))

    @property
    def pid(self) -> int:
        return 0 if self.start is None else int(self.start["pid"])

    @property
    def start_ticks(self) -> int:
        """When its process began, as the kernel counts: no later process of its pid has it."""
        return 0 if self.start is None else int(self.start["startTicks"])

    @property
    def host(self) -> str | None:
        record = self.exit or self.start or self.claim or {}
        host: str | None = record.get("host")
        return host

    @property
    def started_at(self) -> float | None:
        at: float | None = (self.start or {}).get("at")
        return (self.exit or {}).get("startedAt") if at is None else at

    def ran_s(self) -> float:
        """How long it ran; 0 while it does."""
        started_at = self.started_at
        if started_at is None or self.exit is None:
            return 0.0
        ran: float = max(self.exit["at"] - started_at, 0.0)
        return ran


class Due(namedtuple("Due", "rank attempt restarts after delay_s")):
    """An attempt to start, `delay_s` after the end in `after`, or now if that is None."""

    __slots__ = ()
    if TYPE_CHECKING:
        rank: int
        attempt: int
        restarts: int
        after: Record | None
        delay_s: float


_FIELDS = {CLAIM: "claim", START: "start", EXIT: "exit"}


class Facts:
    """All that is known of the ranks of one training. It has one owner, and only grows.

    A copy shares what it has with the original until one of them gets a record of that rank.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.desired: Record | None = None
        self.gate: Record | None = None
        self.ranks: dict[int, dict[int, AttemptFacts]] = {}
        self.counts: dict[int, int] = {}  # of records, by rank: changes with each new one
        self._candidates: set[int] = set()  # ranks that may be due, so that `due` is quick
        self._owned: set[int] = set()  # ranks whose attempts no copy shares
        for record in records:
            self.add(record)

    def copy(self) -> Facts:
        other = Facts()
        other.desired, other.gate = self.desired, self.gate
        other.ranks, other.counts = dict(self.ranks), dict(self.counts)
        other._candidates = set(self._candidates)
        self._owned = set()
        return other

    def add(self, record: Record) -> bool:
        """Take a record in. False if its key was taken, or a higher version is known."""
        kind = record["t"]
        if kind == DESIRED:
            if self.desired is not None and _order(record) <= _order(self.desired):
                return False
            self.desired = record
            self._candidates.clear()
            for rank in range(record["size"]):
                self._note(rank)
            return True
        if kind == GATE:
            is_new = self.gate is None
            self.gate = record if is_new else self.gate
            return is_new
        if kind not in _FIELDS:
            return False
        rank, number = record["rank"], record["attempt"]
        attempts = self.ranks.get(rank, {})
        known = attempts.get(number) or AttemptFacts(rank, number, None, None, None)
        if getattr(known, _FIELDS[kind]) is not None:
            return False
        if rank not in self._owned:
            attempts = self.ranks[rank] = dict(attempts)
            self._owned.add(rank)
        attempts[number] = known._replace(**{_FIELDS[kind]: record})
        self.counts[rank] = self.counts.get(rank, 0) + 1
        self._note(rank)
        return True

    @property
    def version(self) -> int:
        """The version of the desired state; 0 without one."""
        return 0 if self.desired is None else int(self.desired["version"])

    def has(self, record: Record) -> bool:
        """Return whether the key of the record of an attempt is taken."""
        one = self.attempt(record["rank"], record["attempt"]) if record["t"] in _FIELDS else None
        return one is not None and getattr(one, _FIELDS[record["t"]]) is not None

    def attempt(self, rank: int, number: int) -> AttemptFacts | None:
        return self.ranks.get(rank, {}).get(number)

    def current(self, rank: int) -> AttemptFacts | None:
        """Return the newest attempt of a rank that is something."""
        attempts = self.ranks.get(rank)
        if not attempts:
            return None
        newest = attempts[max(attempts)]
        if not newest.is_nothing:
            return newest
        real = [number for number, one in attempts.items() if not one.is_nothing]
        return attempts[max(real)] if real else None

    def running(self) -> list[AttemptFacts]:
        """Return the attempts that run, as far as is known."""
        currents = [self.current(rank) for rank in self.ranks]
        return [one for one in currents if one is not None and one.is_running]

    def newest(self) -> dict[int, int]:
        """Return the number of the newest known attempt of each rank."""
        return {rank: max(attempts) for rank, attempts in self.ranks.items()}

    def candidates(self) -> list[int]:
        """Return the wanted ranks that have nothing that runs or has ended for good."""
        return sorted(self._candidates)

    def _note(self, rank: int) -> None:
        desired = self.desired
        if desired is None or rank >= desired["size"]:
            return
        one = self.current(rank)
        end = None if one is None else one.exit
        is_over = end is not None and (end.get("stopped") or end["code"] == 0)
        is_open = one is None or (end is not None and not is_over)
        if one is not None and is_over:
            is_open = one.attempt <= desired["discarded"].get(str(rank), -1)
        if is_open:
            self._candidates.add(rank)
        else:
            self._candidates.discard(rank)


def _order(desired: Record) -> tuple[int, float, int]:
    """What the records of desired states are compared by: of one version the later one counts,
    and at one time the one that stops more."""
    return desired["version"], desired["at"], sum(map(len, desired.get("stops", {}).values()))


def due(facts: Facts, max_restarts: int) -> Iterator[Due]:
    """Yield the attempts to start for the desired state, within the budget of restarts."""
    for rank in facts.candidates():
        one = facts.current(rank)
        last, end = (None, None) if one is None else (one.attempt, one.exit)
        attempt = next_attempt(facts, rank, last, end, max_restarts)
        if attempt is not None:
            yield attempt


def next_attempt(
    facts: Facts, rank: int, last: int | None, end: Record | None, max_restarts: int
) -> Due | None:
    """Return what to start for a wanted rank. `last`: its newest attempt, `end`: how it ended.

    None if that one runs, ended well, was stopped, or has used up the restarts.
    """
    desired = facts.desired
    assert desired is not None
    number = 1 + max([*facts.ranks.get(rank, ()), *stops(desired, rank)], default=-1)
    if last is None or (end is not None and last <= desired["discarded"].get(str(rank), -1)):
        return Due(rank, number, restarts(desired, rank, number), None, 0.0)
    if end is None or end.get("stopped") or end["code"] == 0:
        return None
    count = restarts(desired, rank, last)
    if count >= max_restarts:
        return None
    return Due(rank, number, restarts(desired, rank, number), end, restart_delay_s(count))


class RecordStore:
    """Where the records of one training are. Names have no slashes."""

    uri = ""  # the path or URI by which a wrapper opens it
    poll_s = 0.0  # how often it may be asked for the desired state
    heartbeat_s = 0.0  # how often an attempt shows that it is followed

    def create(self, name: str, data: bytes) -> bool:
        """Durably, unless the name is taken; False if it is, with something else."""
        raise NotImplementedError

    def put(self, name: str, data: bytes) -> None:
        """Durably and atomically, whatever was there before."""
        raise NotImplementedError

    def get(self, name: str) -> bytes | None:
        raise NotImplementedError

    def heartbeat(self, name: str) -> None:
        """The stamp of `name` changes."""
        raise NotImplementedError

    def entries(self) -> dict[str, int]:
        """Return all names in one question, each with a stamp that its heartbeats change.

        The stamp is a time in nanoseconds since 1970, by the clock of the store.
        """
        raise NotImplementedError

    def delete(self, names: list[str]) -> None:
        """A name that does not exist is success."""
        raise NotImplementedError
