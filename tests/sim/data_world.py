"""Replicas that share data through rounds, with an oracle that follows every training.

The ledger and the book are the real ones. The store is a few dictionaries; a replica is a
generator that stops at every touch of it, so that anything can happen between two touches. Graces
are tosses of a coin. The oracle sees the instant at which a round is committed, and knows which
trainings of which positions the uploads of its members bring.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from atoll.diloco.data import ranges
from atoll.diloco.data.book import Book
from atoll.diloco.data.ledger import Claim, InvalidClaim, begin, commit, make_terms, pack, unpack
from atoll.diloco.data.ranges import Ranges

Steps = Generator[None, None, Any]
Trained = frozenset[tuple[int, int]]  # position, and which training of it
MEAN, NOTE = "mean", "note"


class Violation(AssertionError):
    """A promise about the data is broken."""


@dataclass(frozen=True)
class Upload:
    id: int
    rank: int
    claim: Claim
    base: str
    trained: Trained


@dataclass(frozen=True)
class Paper:
    """A roster; without members the round is void."""

    members: tuple[Upload, ...] = ()
    base: str = ""
    world: int = 0
    blamed: frozenset[int] = frozenset()


@dataclass
class Settings:
    length: int | None
    end: int  # of a stream, or of the line
    world: int
    fragments: int
    batch: int
    period: int
    carries: bool
    overlap: bool
    mix: bool
    prefetch: int
    # Rules that a test breaks to see that it is noticed.
    counts_handed_out: bool = False
    commits_by_roster: bool = False
    passes_over: bool = False
    keeps_late_work: bool = False
    lies: bool = False  # replicas claim what they did not train on, or hold
    validates: bool = True


@dataclass
class Oracle:
    """The truth: folded at the instant of each commit."""

    settings: Settings
    world: Any
    used: dict[int, int] = field(default_factory=dict)  # position: its training
    inside: list[dict[int, int]] = field(default_factory=list)  # of each fragment's parameters
    rounds: int = 0

    def commit(self, fragment: int, paper: Paper) -> None:
        ledger = self.world.truth
        if paper.base != ledger.digest:
            raise Violation("a round was committed on another ledger")
        try:
            self.world.truth = commit(ledger, [m.claim for m in paper.members], paper.world)
        except InvalidClaim as error:
            raise Violation(f"a false round was committed: {error}") from error
        if ledger.seq % self.settings.fragments != fragment:
            raise Violation("rounds are out of order")
        self.rounds += 1
        for member in paper.members:
            brought = dict(member.trained)
            for at in ranges.positions(member.claim.took):
                if at in self.used:
                    raise Violation(f"position {at} is in two committed claims")
                if at not in brought:
                    raise Violation(f"position {at} is claimed and was not trained on")
                self.used[at] = brought[at]
        for member in paper.members:
            for at, training in member.trained:
                if self.used.get(at) != training:
                    raise Violation(f"a training of {at} that is not in the ledger is in the model")
                if self.inside[fragment].get(at) is not None:
                    raise Violation(f"position {at} is in fragment {fragment} twice")
                self.inside[fragment][at] = training


class DataWorld:
    """One run: its store, its replicas, and what happens to them."""

    def __init__(self, seed: int, **broken: bool) -> None:
        self.rng = rng = random.Random(seed)
        is_stream = rng.random() < 0.25
        end = rng.randint(1, 70)
        world = rng.randint(1, 4)
        fragments = rng.randint(1, 3)
        self.settings = settings = Settings(
            length=None if is_stream else end,
            end=end,
            world=world,
            fragments=fragments,
            batch=rng.randint(1, 4),
            period=rng.randint(1, 3),
            carries=rng.random() < 0.5,
            overlap=rng.random() < 0.4,
            mix=rng.random() < 0.3,
            prefetch=rng.choice([0, 0, 1, 3]),
            **broken,
        )
        terms = make_terms(
            settings.length, period=settings.period, world=world, fragments=fragments
        )
        if is_stream:  # a lease of a real first size would hold all of a short stream
            terms = type(terms)(**{**_fields(terms), "first": rng.randint(1, 12)})
        self.truth = begin(terms)
        self.oracle = Oracle(settings, self, inside=[{} for _ in range(fragments)])
        self.uploads: dict[tuple[int, int], list[Upload]] = {}
        self.papers: dict[tuple[int, int, int], Paper] = {}
        self.locations: dict[tuple[int, int, int], dict[int, str]] = {}
        self.saved = (pack(self.truth), [0] * fragments)
        self.states: dict[int, list[Any]] = {}  # of a rank: what a process of it saved
        self.ids = 0
        self.world = world
        self.alive: list[tuple[Replica, Steps]] = []
        self.frozen: dict[int, int] = {}
        self.left_out = self.kills = 0

    def fresh_id(self) -> int:
        self.ids += 1
        return self.ids

    def start(self, rank: int) -> None:
        replica = Replica(self, rank)
        self.alive.append((replica, replica.live()))

    def put_place(self, key: tuple[int, int, int], rank: int, what: str) -> str:
        """Create-only; returns what is there."""
        locations = self.locations.setdefault(key, {})
        if rank not in locations:
            locations[rank] = what
            paper = self.papers[key]
            if what == MEAN and all(locations.get(m.rank) == MEAN for m in paper.members):
                self.oracle.commit(key[0], paper)
        return locations[rank]

    def step(self) -> None:
        at = self.rng.randrange(len(self.alive))
        replica, steps = self.alive[at]
        if self.frozen.get(replica.id, 0) > 0:
            self.frozen[replica.id] -= 1
            return
        try:
            next(steps)
        except StopIteration:
            self.alive.pop(at)

    def disturb(self) -> None:
        rng = self.rng
        what = rng.random()
        if what < 0.35 and self.alive:
            self.alive.pop(rng.randrange(len(self.alive)))
            self.kills += 1
        elif what < 0.8 and len(self.alive) < 5:
            self.start(rng.randrange(self.world))
        elif what < 0.9 and self.alive:
            self.frozen[rng.choice(self.alive)[0].id] = rng.randint(5, 200)
        elif what < 0.95:
            self.world = max(1, min(5, self.world + rng.choice([-1, 1])))
        elif self.alive:
            rng.choice(self.alive)[0].leaves = True

    def run(self, trouble: int = 400, patience: int = 60_000) -> None:
        """Trouble for a while; then peace, and all data must be used, given some patience."""
        for rank in range(self.world):
            self.start(rank)
        for _ in range(trouble):
            if self.rng.random() < 0.04 or not self.alive:
                self.disturb()
            if self.alive:
                self.step()
        for replica, _ in self.alive:
            replica.leaves = False
            self.frozen.clear()
        for _ in range(patience):
            if not self.alive:
                if self.truth.is_used_up:
                    break
                self.start(self.rng.randrange(self.world))
            self.step()
        if not patience:
            return
        wanted = set(range(self.settings.end))
        if set(self.oracle.used) != wanted:
            missing = sorted(wanted - set(self.oracle.used))
            raise Violation(f"never used: {missing[:10]} of {self.settings.end}; {self.truth}")


class Replica:
    """One process, as docs/decisions/020 says that it behaves."""

    def __init__(self, world: DataWorld, rank: int) -> None:
        self.sea, self.rank, self.id = world, rank, world.fresh_id()
        self.size = max(world.world, rank + 1)
        self.set, self.rng = world.settings, world.rng
        self.leaves = False
        self.steps = 0
        count = self.set.fragments
        self.pseudo_gradient: list[set[tuple[int, int]]] = [set() for _ in range(count)]
        self.carry: list[set[tuple[int, int]]] = [set() for _ in range(count)]
        self.next = [0] * count
        self.book: Book
        self.met_end: int | None = None

    def live(self) -> Steps:
        yield from self.join()
        if self.rng.random() < 0.3:
            self.load_state()
        dry = 0
        while not self.book.ledger.is_used_up:
            fragment = self.book.ledger.seq % self.set.fragments
            self.train(self.set.period)
            yield
            is_leaving = self.leaves
            claimed = self.book.claim(fragment)
            upload_claim = Claim(
                self.rank,
                self.claimed_positions(claimed),
                0 if is_leaving else self.set.period * self.set.batch + self.set.prefetch,
                self.met_end,
            )
            brought = frozenset(self.pseudo_gradient[fragment] | self.carry[fragment])
            if self.set.overlap:
                self.train(1)
            how = yield from self.round(fragment, upload_claim, brought, claimed)
            dry = dry + 1 if not claimed else 0
            if is_leaving and how == "member":
                return
            yield
            yield from self.catch_up()
            if self.rng.random() < 0.1:
                self.save_state()

    def claimed_positions(self, claimed: Ranges) -> Ranges:
        if self.set.lies and self.rng.random() < 0.2:
            return ranges.of([self.rng.randrange(self.set.end)])
        if not self.set.counts_handed_out:
            return claimed
        handed, _ = ranges.take(self.book.free, self.set.prefetch)
        return ranges.union(claimed, handed)

    def train(self, count: int) -> None:
        for _ in range(count):
            part, _ = ranges.take(self.book.free, self.set.batch)
            if self.set.length is None and part and part[-1][1] > self.set.end:
                part = ranges.below(part, self.set.end)
                self.met_end = self.set.end
            if not part:
                return
            self.steps += 1
            self.book.train(part, self.steps)
            for at in ranges.positions(part):
                training = (at, self.sea.fresh_id())
                for pseudo_gradient in self.pseudo_gradient:
                    pseudo_gradient.add(training)

    def round(self, fragment: int, claim: Claim, brought: Trained, claimed: Ranges) -> Steps:
        """One call, one round: member, left out or behind."""
        while True:
            number = self.next[fragment]
            base = self.book.ledger.digest
            own = Upload(self.sea.fresh_id(), self.rank, claim, base, brought)
            self.sea.uploads.setdefault((fragment, number), []).append(own)
            yield
            paper = yield from self.attempts(fragment, number, own)
            if paper is None:
                self.next[fragment] += 1
                continue
            if paper == "behind":
                self.discard()
                yield from self.join()
                return "behind"
            return self.take(fragment, paper, own, claimed)

    def take(self, fragment: int, paper: Paper, own: Upload, claimed: Ranges) -> str:
        self.next[fragment] += 1
        is_member = any(m.id == own.id for m in paper.members)
        self.book.commit([m.claim for m in paper.members], paper.world)
        is_carried = False
        if is_member:
            self.book.was_member(fragment, claimed)
            self.carry[fragment] = set()
            self.sea.saved = (pack(self.book.ledger), list(self.next))
        else:
            self.sea.left_out += 1
            is_carried = self.set.carries and all(m.rank != self.rank for m in paper.members)
            self.book.was_left_out(fragment, claimed, is_carried=is_carried)
            if is_carried:
                self.carry[fragment] = set(own.trained)
        if self.set.mix and is_member:
            self.pseudo_gradient[fragment] -= own.trained
        else:
            self.pseudo_gradient[fragment] = set()
            self.book.empty(fragment, self.steps)
        if not self.book.is_honest and not self.set.keeps_late_work:
            self.discard()
        return "member" if is_member else "left out"

    def discard(self) -> None:
        self.pseudo_gradient = [set() for _ in self.pseudo_gradient]
        self.carry = [set() for _ in self.carry]
        self.book.discard(self.steps)

    def attempts(self, fragment: int, number: int, own: Upload | None) -> Steps:
        """The roster of the round once it is committed; None if it is void."""
        attempt, blamed = 0, frozenset[int]()
        while True:
            key = (fragment, number, attempt)
            while key not in self.sea.papers:
                if own is None:  # a reader ends what nobody decides
                    if self.rng.random() < 0.1:
                        self.sea.papers[key] = Paper()
                elif self.rng.random() < 0.4:
                    paper = self.propose(fragment, number, own, blamed)
                    yield
                    self.sea.papers.setdefault(key, paper)
                elif self.rng.random() < 0.01:
                    self.sea.papers.setdefault(key, Paper())
                yield
            paper = self.sea.papers[key]
            yield
            if not paper.members:
                return None
            problem = self.problem(paper)
            mine = own is not None and any(m.id == own.id for m in paper.members)
            if mine and not problem and self.set.commits_by_roster:
                return paper
            if mine:
                self.sea.put_place(key, self.rank, NOTE if problem else MEAN)
                yield
            while True:
                locations = self.sea.locations.get(key, {})
                missing = [m.rank for m in paper.members if m.rank not in locations]
                if NOTE in locations.values():
                    late = {m.id for m in paper.members if locations.get(m.rank) == NOTE}
                    blamed = paper.blamed | late
                    break
                if not missing:
                    if own is not None and self.rng.random() < 0.02:
                        return "behind"
                    return paper
                if self.rng.random() < 0.04:
                    self.sea.put_place(key, self.rng.choice(missing), NOTE)
                yield
            if own is not None and own.id in blamed:
                again = Upload(self.sea.fresh_id(), self.rank, own.claim, own.base, own.trained)
                if self.rng.random() < 0.5:
                    object.__setattr__(own, "id", again.id)
                    self.sea.uploads[fragment, number].append(again)
            attempt += 1
            yield

    def propose(self, fragment: int, number: int, own: Upload, blamed: frozenset[int]) -> Paper:
        ledger = self.book.ledger
        newest: dict[int, Upload] = {}
        for upload in self.sea.uploads[fragment, number]:
            if upload.id in blamed or upload.base != ledger.digest or upload.rank >= self.size:
                continue
            is_held = ranges.is_inside(upload.claim.took, ledger.hold_of(upload.rank))
            if is_held or not self.set.validates:
                newest[upload.rank] = upload
        members = tuple(newest[rank] for rank in sorted(newest))
        return Paper(members, ledger.digest, self.size, blamed)

    def problem(self, paper: Paper) -> bool:
        if not self.set.validates:
            return False
        if paper.base != self.book.ledger.digest:
            return True
        try:
            commit(self.book.ledger, [m.claim for m in paper.members], paper.world)
        except InvalidClaim:
            return True
        return False

    def join(self) -> Steps:
        """The newest checkpoint, then every decided round in order."""
        data, numbers = self.sea.saved
        self.next = list(numbers)
        self.book = Book(unpack(data), self.rank, self.set.fragments, self.steps)
        yield
        yield from self.catch_up()

    def catch_up(self) -> Steps:
        """Read on. A round in flight is waited for or ended, never passed over."""
        while True:
            fragment = self.book.ledger.seq % self.set.fragments
            number = self.next[fragment]
            if (fragment, number, 0) not in self.sea.papers:
                return
            if self.set.passes_over and self.rng.random() < 0.5:
                self.next[fragment] += 1
                return
            paper = yield from self.attempts(fragment, number, None)
            self.next[fragment] += 1
            if paper is None:
                continue
            self.book.commit([m.claim for m in paper.members], paper.world)
            self.pseudo_gradient[fragment] = set()  # the global values are loaded
            self.book.empty(fragment, self.steps)
            if not self.book.is_honest and not self.set.keeps_late_work:
                self.discard()

    def save_state(self) -> None:
        """What `state_dict` has: carried work with its positions."""
        self.sea.states[self.rank] = [
            (set(carry), ranges.common(self.book.carried(at), self.book.fresh))
            for at, carry in enumerate(self.carry)
        ]

    def load_state(self) -> None:
        for at, (carry, positions) in enumerate(self.sea.states.get(self.rank, [])):
            known = {pos for pos, _ in carry}
            if carry and known == set(ranges.positions(positions)):
                if self.book.restore(at, positions, self.steps):
                    self.carry[at] = set(carry)
                return


def _fields(terms: Any) -> dict[str, Any]:
    return {name: getattr(terms, name) for name in terms.__struct_fields__}
