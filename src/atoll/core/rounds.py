"""Outer rounds as the control plane stores them and as clients read them. Pure.

What a round was is in its manifest. It is read from the store, or reported by the replicas that
took part; what it cost is known to the replicas alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from atoll.core.metrics import MAX_COUNT, MAX_TIME
from atoll.core.model import Model
from atoll.core.ranks import MAX_WARNINGS, has_replica_per_rank
from atoll.core.status import Training
from atoll.core.text import limited_spans

Source = Literal["store", "reports"]

# The states of a rank in a round, as one letter each.
IN, JOINED, LATE, MISSING, BAD, LEFT, ABSENT = "i", "j", "l", "m", "n", "-", "."
MAX_COUNTS_LISTED = 10  # different numbers of rounds, in a sentence
HANDED_IN, WAITED_FOR = "u", "w"  # in the round that is not decided yet


class RoundFacts(Model, frozen=True):
    """What the manifest of a round says.

    `missing`: ranks that were waited for and did not come; `rejected`: whose upload could not be
    used; `late`: who uploaded after the manifest was decided; `bad`: members whose
    pseudo-gradient was not finite, so that it does not count; `leaving`: members that uploaded
    and left.
    """

    run: str
    round: int
    fragment: int = 0
    fragments: int = 1
    attempt: int = 0
    members: list[int] = []
    weights: list[float] = []
    missing: list[int] = []
    rejected: list[int] = []
    late: list[int] = []
    bad: list[int] = []
    leaving: list[int] = []
    sizes: list[int] = []  # bytes of each member's upload; empty where that is unknown
    tokens: float = 0.0
    steps: int = 0
    parameters: int | None = None
    at: float | None = None  # when it was decided
    error: str = ""  # why the round is void


class RoundCost(msgspec.Struct, frozen=True, array_like=True):
    """What a round cost one replica, or one process of it."""

    rank: int
    bytes_up: int
    bytes_down: int
    requests: int
    hidden_s: float
    blocked_s: float
    process: int = 0  # of the replica
    steps: int = 0  # since the round before
    train_s: float = 0.0  # that they took outside of rounds
    data_s: float | None = None  # of `train_s`, in reading data; None if it is not known


class ReportedRound(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a replica reports of a round. Only the first members report its manifest."""

    run: str
    fragment: int
    round: int
    cost: RoundCost
    facts: RoundFacts | None = None
    warnings: list[str] = []  # what the replica found wrong since its last report


class StoredRound(msgspec.Struct, frozen=True, omit_defaults=True):
    """One round of one fragment: from the store, and from replicas."""

    observed: RoundFacts | None = None
    reported: RoundFacts | None = None
    costs: list[RoundCost] = []
    warnings: list[str] = []

    @property
    def facts(self) -> RoundFacts | None:
        """The store wins over what replicas say."""
        return self.reported if self.observed is None else self.observed


def is_bounded(value: object) -> bool:
    """Whether all numbers in a report or in facts can be stored, shown and added up."""
    if isinstance(value, RoundFacts) and not 0 <= (value.at or 0.0) <= MAX_TIME:
        return False
    if isinstance(value, msgspec.Struct):
        return all(is_bounded(getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, list):
        return all(map(is_bounded, value))
    return not isinstance(value, int | float) or abs(value) <= MAX_COUNT


def with_report(stored: StoredRound, report: ReportedRound) -> StoredRound:
    own = (report.cost.rank, report.cost.process)
    others = [cost for cost in stored.costs if (cost.rank, cost.process) != own]
    reported = report.facts or stored.reported
    if (
        stored.reported is not None
        and reported is not None
        and reported.attempt < stored.reported.attempt
    ):
        reported = stored.reported
    costs = sorted([*others, report.cost], key=lambda cost: (cost.rank, cost.process))
    warnings = list(dict.fromkeys([*stored.warnings, *report.warnings]))[:MAX_WARNINGS]
    return StoredRound(observed=stored.observed, reported=reported, costs=costs, warnings=warnings)


def with_observed(stored: StoredRound, facts: RoundFacts) -> StoredRound:
    """Facts that an earlier observation had stay, though the store has dropped them since."""
    observed = stored.observed
    if observed is not None and observed.attempt == facts.attempt:
        late = sorted({*observed.late, *facts.late} - set(facts.members))
        facts = msgspec.structs.replace(
            facts,
            late=late,
            sizes=facts.sizes or observed.sizes,
            at=observed.at if facts.at is None else facts.at,
            parameters=observed.parameters if facts.parameters is None else facts.parameters,
        )
    return msgspec.structs.replace(stored, observed=facts)


class RoundItem(Model, frozen=True, omit_defaults=False):
    """One round as clients read it. What is unknown is null.

    `joined`: members that were not there in the round before; `left`: members of the round before
    that were not waited for. Bytes are of all replicas that are known, seconds those of the
    slowest.
    """

    round: int
    fragment: int
    attempt: int
    at: float | None
    source: Source
    members: list[int]
    weights: list[float]
    missing: list[int]
    late: list[int]
    rejected: list[int]
    bad: list[int]
    joined: list[int]
    left: list[int]
    tokens: float
    steps: int
    bytes_up: int | None
    bytes_down: int | None
    requests: int | None
    hidden_s: float | None
    blocked_s: float | None
    bits_up: float | None  # a parameter, of a replica's upload
    bits_per_parameter: float | None  # up and down together
    error: str
    costs: list[RoundCost] | None = None


class RankRounds(Model, frozen=True, omit_defaults=False):
    """In how many rounds a rank took part, and in which last."""

    rank: int
    rounds: int
    last: int


class SlowRank(Model, frozen=True, omit_defaults=False):
    """A rank whose steps take long, and where its time goes: shares that add up to 1.

    `factor`: its time for a step over the median of all ranks. `data` is null, and part of
    `compute`, where the training loop does not take its batches from DiLoCo.
    """

    rank: int
    step_s: float
    factor: float
    data: float | None
    compute: float
    waiting: float
    message: str


class RoundSummary(Model, frozen=True, omit_defaults=False):
    """How far a run is. `behind`: who was not in the newest round though it was waited for, or
    came late. `waited_for`: who has not uploaded to the round that is open. `ranks`: who took part
    in any round; `left`: who uploaded and left; `slow`: whose steps take much longer than those
    of the others."""

    run: str
    source: Source
    round: int | None  # the newest that is decided, counted from 0
    rounds: int  # how many every fragment has
    fragments: int
    members: list[int]
    behind: list[int]
    uploaded: list[int]
    waited_for: list[int]
    tokens: float
    moved_at: float | None
    observed_at: float | None
    ranks: list[RankRounds] = []
    left: list[int] = []
    slow: list[SlowRank] = []
    message: str = ""


class TrainingWithRounds(Training, frozen=True):
    """A training with how far its rounds are, which no store of trainings has."""

    rounds: RoundSummary | None = None


def with_rounds(training: Training, summary: RoundSummary | None) -> TrainingWithRounds:
    fields = {name: getattr(training, name) for name in training.__struct_fields__}
    return TrainingWithRounds(**fields, rounds=with_absent(summary, training))


def with_absent(summary: RoundSummary | None, training: Training) -> RoundSummary | None:
    """The summary, with ranks in its message that the training has and the newest round had not."""
    if summary is None:
        return None
    return msgspec.structs.replace(
        summary, message=describe_summary(summary, absent_ranks(summary, training))
    )


_ABSENT = {"Pending": "waiting", "Failed": "lost", "Stopped": "stopped", "Succeeded": "finished"}


def absent_ranks(summary: RoundSummary, training: Training) -> dict[str, list[int]]:
    """Ranks that should be in rounds and were not in the newest: `starting`, `waiting`, …"""
    if summary.round is None or not has_replica_per_rank(training, len(summary.ranks)):
        return {}
    known = {*summary.members, *summary.behind, *summary.left}
    came = {each.rank for each in summary.ranks}
    absent: dict[str, list[int]] = {}
    for rank in training.status.ranks:
        if rank.rank in known or rank.rank >= training.spec.world_size.target:
            continue
        if rank.phase == "Running":
            absent.setdefault("absent" if rank.rank in came else "starting", []).append(rank.rank)
        else:
            absent.setdefault(_ABSENT[rank.phase], []).append(rank.rank)
    return absent


class RoundList(Model, frozen=True, omit_defaults=False):
    """Rounds in order. `why`: where they come from, in words; `dropped`: how many of the oldest
    are not kept any more."""

    items: list[RoundItem]
    summary: RoundSummary | None = None
    why: str = ""
    dropped: int = 0


def items_of(stored: Iterable[StoredRound], *, has_costs: bool = False) -> list[RoundItem]:
    """In the given order, which is that of the rounds. A first one is compared with nothing."""
    before: dict[int, RoundFacts] = {}
    items = []
    for each in stored:
        facts = each.facts
        if facts is None:
            continue
        items.append(_item(each, facts, before.get(facts.fragment), has_costs=has_costs))
        if facts.members:
            before[facts.fragment] = facts
    return items


def by_replica(costs: Iterable[RoundCost]) -> list[RoundCost]:
    """One cost for each replica: what its processes moved, and the seconds of the slowest."""
    merged: dict[int, RoundCost] = {}
    for cost in costs:
        other = merged.get(cost.rank)
        merged[cost.rank] = (
            cost
            if other is None
            else RoundCost(
                cost.rank,
                other.bytes_up + cost.bytes_up,
                other.bytes_down + cost.bytes_down,
                other.requests + cost.requests,
                max(other.hidden_s, cost.hidden_s),
                max(other.blocked_s, cost.blocked_s),
                steps=max(other.steps, cost.steps),
                train_s=max(other.train_s, cost.train_s),
                data_s=max(
                    (each for each in (other.data_s, cost.data_s) if each is not None), default=None
                ),
            )
        )
    return list(merged.values())


def _item(
    stored: StoredRound, facts: RoundFacts, before: RoundFacts | None, *, has_costs: bool
) -> RoundItem:
    costs = by_replica(stored.costs)
    joined, left = moves(before, facts)
    up = sum(cost.bytes_up for cost in costs) if costs else None
    if facts.sizes and len(costs) < len(facts.members):
        up = sum(facts.sizes)
    parameters = facts.parameters
    reported = stored.reported
    if parameters is None and reported is not None:
        parameters = reported.parameters
    uploads = [size for size in facts.sizes if size]
    bits_up = both = None
    if parameters and uploads:
        bits_up = 8 * sum(uploads) / len(uploads) / parameters
    elif parameters and costs:
        bits_up = 8 * sum(cost.bytes_up for cost in costs) / len(costs) / parameters
    if parameters and costs:
        total = sum(cost.bytes_up + cost.bytes_down for cost in costs)
        both = 8 * total / len(costs) / parameters
    return RoundItem(
        round=facts.round,
        fragment=facts.fragment,
        attempt=facts.attempt,
        at=facts.at,
        source="reports" if stored.observed is None else "store",
        members=facts.members,
        weights=facts.weights,
        missing=facts.missing,
        late=facts.late,
        rejected=facts.rejected,
        bad=facts.bad,
        joined=joined,
        left=left,
        tokens=facts.tokens,
        steps=facts.steps,
        bytes_up=up,
        bytes_down=sum(cost.bytes_down for cost in costs) if costs else None,
        requests=sum(cost.requests for cost in costs) if costs else None,
        hidden_s=max((cost.hidden_s for cost in costs), default=None),
        blocked_s=max((cost.blocked_s for cost in costs), default=None),
        bits_up=bits_up,
        bits_per_parameter=both,
        error=facts.error,
        costs=costs if has_costs else None,
    )


def moves(before: RoundFacts | None, facts: RoundFacts) -> tuple[list[int], list[int]]:
    """Who joined in this round, and who of the round before has left."""
    if before is None or not facts.members:
        return [], []
    known = {*before.members, *before.missing, *before.late, *before.rejected} - {*before.leaving}
    here = {*facts.members}
    absent = {*before.members} - here - {*facts.missing, *facts.late, *facts.rejected}
    return sorted(here - known), sorted(absent)


def states(item: RoundItem) -> dict[int, str]:
    """The letter of each rank that the round speaks of."""
    letters = dict.fromkeys(item.left, LEFT)
    letters |= dict.fromkeys([*item.missing, *item.rejected], MISSING)
    letters |= dict.fromkeys(item.late, LATE)
    letters |= dict.fromkeys(item.members, IN)
    letters |= dict.fromkeys(item.joined, JOINED)
    letters |= dict.fromkeys(item.bad, BAD)
    return letters


class OpenRound(Model, frozen=True):
    """What an observation of the store has of the round that is not decided yet."""

    fragment: int
    round: int
    uploaded: list[int]


def summary_of(
    run: str,
    newest: Sequence[StoredRound],
    tokens: float,
    observed_at: float | None,
    waiting: Sequence[OpenRound] = (),
    departures: Mapping[int, str] | None = None,
    ranks: Sequence[RankRounds] = (),
    left: Iterable[int] = (),
    slow: Sequence[SlowRank] = (),
) -> RoundSummary | None:
    """`newest`: the newest round of each fragment; `departures`: ranks that have left, and how;
    `left`: those that uploaded before that."""
    known = [(each, facts) for each in newest if (facts := each.facts) is not None]
    if not known and not waiting:
        return None
    fragments = max([facts.fragments for _, facts in known], default=1)
    last_stored, last = max(
        known, key=lambda pair: (pair[1].round, pair[1].at or 0.0), default=(None, None)
    )
    members = [] if last is None else list(last.members)
    behind = [] if last is None else sorted({*last.missing, *last.late, *last.rejected})
    uploaded: list[int] = []
    waited_for: list[int] = []
    if waiting:
        first = min(waiting, key=lambda each: each.round)
        uploaded = sorted(first.uploaded)
        absent = {*(departures or {}), *([] if last is None else last.leaving)}
        waited_for = sorted({*members, *([] if last is None else last.late)} - {*uploaded} - absent)
    counts = [facts.round + 1 for _, facts in known]
    summary = RoundSummary(
        run=run,
        source="store" if last_stored is None or last_stored.observed is not None else "reports",
        round=None if last is None else last.round,
        rounds=min(counts) if len(counts) == fragments else 0,
        fragments=fragments,
        members=members,
        behind=behind,
        uploaded=uploaded,
        waited_for=waited_for,
        tokens=tokens,
        moved_at=None if last is None else last.at,
        observed_at=observed_at,
        ranks=list(ranks),
        left=sorted({*(departures or {}), *left, *([] if last is None else last.leaving)}),
        slow=list(slow),
    )
    return msgspec.structs.replace(summary, message=describe_summary(summary))


def describe_summary(
    summary: RoundSummary, absent: Mapping[str, Sequence[int]] | None = None
) -> str:
    """`44 rounds committed, the last with 6 of 8 (ranks 3, 5 behind); round 44 waits for rank 2`.

    `absent` are ranks that belong to the training and were not in the newest round, by their state.
    """
    if summary.round is None:
        text = "no round committed yet"
    else:
        absent_by_state = {
            **({"behind": summary.behind} if summary.behind else {}),
            **(absent or {}),
        }
        everyone = {*summary.members, *(rank for own in absent_by_state.values() for rank in own)}
        with_whom = f"{len(summary.members)} of {len(everyone)}"
        if not absent_by_state:
            with_whom = f"all {len(summary.members)}" if len(summary.members) > 1 else "one replica"
        states = ", ".join(f"{_ranks(own)} {state}" for state, own in absent_by_state.items())
        behind = f" ({states})" if states else ""
        noun = "round" if summary.rounds == 1 else "rounds"
        text = f"{summary.rounds} {noun} committed, the last with {with_whom}{behind}"
        if not summary.members:
            text = f"{summary.rounds} {noun} committed, the last is void"
    if not summary.uploaded:
        return text
    number = 0 if summary.round is None else summary.round + 1
    if not summary.waited_for:
        return f"{text}; {_ranks(summary.uploaded)} uploaded to round {number}"
    return f"{text}; round {number} waits for {_ranks(summary.waited_for)}"


def describe_counts(counts: Mapping[int, int]) -> str:
    """`ranks 0, 2: 50; rank 1: 40`: in how many rounds each rank took part."""
    groups: dict[int, list[int]] = {}
    for rank, count in sorted(counts.items()):
        groups.setdefault(count, []).append(rank)
    parts = [f"{_ranks(own)}: {count}" for count, own in list(groups.items())[:MAX_COUNTS_LISTED]]
    if remaining := [rank for own in list(groups.values())[MAX_COUNTS_LISTED:] for rank in own]:
        parts.append(f"{_ranks(remaining)}: other numbers")
    return "; ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {limited_spans(ranks)}"
