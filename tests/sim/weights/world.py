"""A store with faults, trainers and followers that make one request a step, and an oracle.

Values are a few named integers; a delta has their differences, so one that is applied to the wrong
base gives values that nobody published.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from atoll.objectstore.effects import Create, Delete, Get, List, Put, StoreError
from atoll.weights.group import Gather, GroupMachine
from atoll.weights.machine import LEASE_LIFE_S, PublisherMachine, Reader, Superseded, counts
from atoll.weights.records import (
    SEAL,
    Claim,
    Damaged,
    Record,
    Row,
    VersionRecord,
    log_number,
    read_lease,
    read_record,
    read_try,
    unseal,
)
from atoll.weights.replicas import ReplicaMachine, Sleep

Values = dict[str, int]


class Violation(AssertionError):
    """An invariant does not hold."""


def state_of(values: Values) -> str:
    return hashlib.sha256(json.dumps(sorted(values.items())).encode()).hexdigest()


# -- Values


@dataclass
class SimChange:
    values: Values
    state: str


class SimCopy:
    """`sim` is asked whether a state is one that somebody published."""

    def __init__(self, values: Values, sim: Sim) -> None:
        self.values, self.sim = values, sim

    @property
    def state(self) -> str:
        return state_of(self.values)

    def prepare(self, parts: Sequence[Any], removed: Sequence[str]) -> SimChange:
        values = dict(self.values)
        for part in parts:
            try:
                content = json.loads(bytes(part))
            except ValueError:
                if self.sim.setup.is_lenient:
                    continue
                raise Damaged("no JSON") from None
            values |= content["new"]
            for name, step in content["steps"].items():
                if name not in values and not self.sim.setup.is_lenient:
                    raise Damaged(f"no tensor {name}")
                values[name] = values.get(name, 0) + step
        for name in removed:
            values.pop(name, None)
        state = state_of(values)
        if not self.sim.has_damage and state not in self.sim.states:
            raise Violation("(g) a delta does not fit what it is applied to")
        return SimChange(values, state)

    def apply(self, change: SimChange) -> None:
        self.values = change.values

    def files(self) -> Iterator[tuple[str, list[bytes]]]:
        for number in range(2):
            content = self.share(number, 2).values
            yield f"model-{number}.json", [json.dumps(content).encode()]

    def names(self) -> set[str]:
        return set(self.values)

    def rows(self) -> list[list[Any]]:
        return [[name, value] for name, value in self.values.items()]

    def share(self, index: int, count: int) -> SimCopy:
        names = sorted(self.values)[index::count]
        return SimCopy({name: self.values[name] for name in names}, self.sim)

    def delta(self, base: SimCopy) -> ShareDelta:
        return ShareDelta(base, self)

    def shards(self, label: str) -> Iterator[tuple[str, list[bytes], list[str]]]:
        yield f"model-{label}.json", [json.dumps(self.values).encode()], list(self.values)

    def index(self, names: Mapping[str, str], size: int) -> Iterator[tuple[str, bytes]]:
        yield "extra.json", b"{}"


@dataclass
class ShareDelta:
    """What a share changes against the whole base, or against a base of the same tensors."""

    base: SimCopy
    own: SimCopy
    removed: Sequence[str] = ()
    changed: int = 0

    @property
    def state(self) -> str:
        return self.own.state

    def rows(self) -> list[list[Any]]:
        return self.own.rows()

    def __iter__(self) -> Iterator[bytes]:
        content: dict[str, Values] = {"steps": {}, "new": {}}
        for name, value in self.own.values.items():
            if name not in self.base.values:
                content["new"][name] = value
            elif value != self.base.values[name]:
                content["steps"][name] = value - self.base.values[name]
        self.changed = len(content["steps"])
        yield json.dumps(content).encode()


def load(sim: Sim) -> Callable[[Mapping[str, Any]], SimCopy]:
    def read(files: Mapping[str, Any]) -> SimCopy:
        values: Values = {}
        for body in files.values():
            try:
                values |= json.loads(bytes(body))
            except ValueError:
                if not sim.setup.is_lenient:
                    raise Damaged("no JSON") from None
        return SimCopy(values, sim)

    read.sim = sim  # type: ignore[attr-defined]
    return read


@dataclass
class SimSource:
    """The caller's memory, which may change between two parts."""

    memory: Values
    sim: Sim
    parts: int
    state: str = ""
    removed: Sequence[str] = ()
    changed: int = 0

    def copy(self) -> SimCopy:
        copy = SimCopy(dict(self.memory), self.sim)
        self.sim.states[copy.state] = copy.values
        return copy

    def delta(self, base: SimCopy) -> SimSource:
        self.base = base
        return self

    def __iter__(self) -> Iterator[bytes]:
        old, new = self.base.values, dict(self.base.values)
        self.removed = [name for name in old if name not in self.memory]
        names = sorted(self.memory)
        for number in range(self.parts):
            content: dict[str, Values] = {"steps": {}, "new": {}}
            for name in names[number :: self.parts]:
                value = self.memory[name]
                new[name] = value
                if name not in old:
                    content["new"][name] = value
                elif value != old[name]:
                    content["steps"][name] = value - old[name]
            self.changed += len(content["steps"])
            if number == self.parts - 1:
                for name in self.removed:
                    new.pop(name)
                self.state = state_of(new)
                self.sim.states[self.state] = new
            yield json.dumps(content).encode()


# -- The world


@dataclass(frozen=True)
class Setup:
    full_every: int = 3
    keep: int = 2
    failing: float = 0.0
    damage: float = 0.0
    publisher: type[PublisherMachine] = PublisherMachine
    replica: type[ReplicaMachine] = ReplicaMachine
    group: type[GroupMachine] = GroupMachine
    reader: type[Reader] = Reader
    is_lenient: bool = False  # for mutants: values take what does not fit


@dataclass
class Stored:
    body: bytes
    time: float


@dataclass
class Actor:
    """A process: one of its requests is performed at a time."""

    name: str
    steps: Generator[Any, Any, Any] | None = None
    effect: Any = None
    awake_at: float = 0.0
    is_trainer: bool = False
    is_done: bool = False
    is_killed: bool = False
    is_open: bool = False
    leases_listed_at: float = 0.0
    copies_listed_at: float = 0.0
    machine: Any = None
    meet: Callable[[], None] = lambda: None  # with the other processes of its group


@dataclass
class Sim:
    rng: random.Random
    setup: Setup
    has_damage: bool = False
    now: float = 1e6
    objects: dict[str, Stored] = field(default_factory=dict)
    ever: set[str] = field(default_factory=set)  # keys that were ever there
    states: dict[str, Values] = field(default_factory=dict)
    committed: dict[int, bytes] = field(default_factory=dict)  # bodies of versions
    records: dict[int, Record] = field(default_factory=dict)  # all that ever were
    fresh_since: dict[str, float] = field(default_factory=dict)  # of leases
    newest_copies: list[tuple[float, int]] = field(default_factory=list)  # from when on
    late: list[tuple[float, Actor, Any]] = field(default_factory=list)
    actors: list[Actor] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    rounds: dict[tuple[str, int], Values] = field(default_factory=dict)  # of runs of replicas
    claimant: str = ""
    is_quiet: bool = False
    number: int = 0

    # -- Requests

    def perform(self, actor: Actor, effect: Any) -> Any:
        match effect:
            case Get(key):
                stored = self.objects.get(key)
                return None if stored is None else stored.body
            case List(prefix, after):
                if prefix == "lease/":
                    actor.leases_listed_at = self.now
                elif prefix == "full/":
                    actor.copies_listed_at = self.now
                return sorted(
                    Row(key, stored.time, len(stored.body))
                    for key, stored in self.objects.items()
                    if key.startswith(prefix) and key > after
                )
            case Create(key, body):
                if key in self.objects:
                    return False
                self._check_record(key, body)
                self._store(key, body)
                return True
            case Put(key, body):
                self._store(key, body if isinstance(body, bytes) else b"".join(body))
                return None
            case Delete(keys):
                for key in keys:
                    self.remove(actor, key)
                return None
        raise TypeError(effect)

    def _store(self, key: str, body: bytes) -> None:
        if key.startswith("lease/"):
            stored = self.objects.get(key)
            if stored is None or self.now - stored.time > LEASE_LIFE_S:
                self.fresh_since[key] = self.now
        self.objects[key] = Stored(body, self.now)
        self.ever.add(key)
        if key.endswith(SEAL) or key.startswith("log/"):
            self._note_newest()

    def _note_newest(self) -> None:
        newest = max((copy.number for copy in self.copies()), default=0)
        if not self.newest_copies or self.newest_copies[-1][1] != newest:
            self.newest_copies.append((self.now, newest))

    def copies(self) -> list[Any]:
        """The full copies that count."""
        copies = []
        for key, stored in self.objects.items():
            if key.startswith("full/") and key.endswith(SEAL):
                copy = read_try(key)
                assert copy is not None
                try:
                    content = unseal(stored.body)
                except Damaged:
                    continue
                has_files = all(f"{copy.folder}/{name}" in self.objects for name in content.files)
                if has_files and counts_truly(copy, content, self.records.get(copy.number)):
                    copies.append(copy)
        return copies

    def remove(self, actor: Actor, key: str) -> None:
        if key in self.objects:
            if not self.has_damage:
                self._check_delete(actor, key)
            del self.objects[key]

    # -- Invariants

    def _check_record(self, key: str, body: bytes) -> None:
        """(a) A version appears at the end of the log only, by the newest claimant."""
        number = log_number(key)
        assert number is not None
        record = read_record(body, number)
        if isinstance(record, VersionRecord):
            if self.committed.get(number) == body:
                return  # the late twin of a request that was made twice
            if number != max(self.records) + 1:
                raise Violation(f"(a) version {number} is not at the end of the log")
            if self.claimant != record.publisher:
                raise Violation(f"(a) version {number} is not by the newest claimant")
            self.committed[number] = body
            self.counts["committed"] += 1
            for part in record.parts:
                stored = self.objects.get(part.key)
                if not self.has_damage and (
                    stored is None or hashlib.sha256(stored.body).hexdigest() != part.sha256
                ):
                    raise Violation(f"(g) version {number} is torn")
            if record.run:
                self._check_round(record)
        elif number > max(self.records, default=0):  # else it took the number of a deleted version
            self.claimant = record.publisher
        self.records[number] = record

    def _check_round(self, record: VersionRecord) -> None:
        """(k) Replicas publish the values of their rounds, which grow while they publish."""
        before = -1
        for _, each in sorted(self.records.items()):
            if each.run != record.run:
                before = -1  # one that takes the channel back publishes what it has
            elif isinstance(each, VersionRecord):
                before = each.round
        if not self.has_damage and record.round <= before:
            raise Violation(f"(k) version {record.number}: round {record.round} after {before}")
        if record.state != state_of(self.rounds[record.run, record.round]):
            raise Violation(f"(k) version {record.number} is not what round {record.round} made")

    def _check_delete(self, actor: Actor, key: str) -> None:
        """(f) Nothing that a fresh lease needs is deleted, nor the newest full copy and after."""
        attempt, number = read_try(key), log_number(key)
        if isinstance(self.records.get(number or 0), Claim):
            return  # (a) is what notices
        if attempt is not None:
            number = attempt.number
            record = self.records.get(number)
            if not isinstance(record, VersionRecord):
                return
            if attempt.folder.startswith("delta/"):
                if not any(part.key == key for part in record.parts):
                    return
            elif not any(copy.folder == attempt.folder for copy in self.copies()):
                return
            elif self.objects[f"{attempt.folder}/{SEAL}"].time > actor.copies_listed_at:
                return  # sealed since by one that was fenced: who begins to read it takes another
        if number is None:
            return
        is_copy = attempt is not None and attempt.folder.startswith("full/")
        twins = sum(copy.number == number for copy in self.copies()) if is_copy else 1
        newest = self.newest_copies[-1][1] if self.newest_copies else 0
        if (number >= newest if is_copy else number > newest) and twins < 2:
            raise Violation(f"(f) {key} is deleted, the newest full copy is {newest}")
        for lease, stored in self.objects.items():
            row = read_lease(lease)
            if row is None or self.now - stored.time > LEASE_LIFE_S:
                continue
            since = self.fresh_since[lease]
            if row.number:
                is_needed = not is_copy or (row.is_joining and twins < 2)
                if since < actor.leases_listed_at and number > row.number and is_needed:
                    raise Violation(f"(f) {key} is deleted under {lease}")
                continue
            needed = [n for at, n in self.newest_copies if at >= since]
            needed += [n for at, n in self.newest_copies if at < since][-1:]
            least = min(needed)
            if least and (number >= least if is_copy else number > least) and twins < 2:
                raise Violation(f"(f) {key} is deleted under {lease}, which may read {least}")

    def check_values(self, record: VersionRecord | None, copy: SimCopy | None, who: str) -> None:
        """(b), (d) What is held as a version has its bits."""
        if record is None or copy is None:
            return
        body = self.committed.get(record.number)
        if body is None:
            raise Violation(f"(b) {who} holds {record.number}, which is no version")
        version = read_record(body, record.number)
        assert isinstance(version, VersionRecord)
        if state_of(copy.values) != version.state:
            raise Violation(f"(b) {who} holds other values than version {record.number} has")

    def newest_version(self) -> int:
        return max(self.committed, default=0)

    # -- Actors

    def start(self, actor: Actor, steps: Generator[Any, Any, Any]) -> Actor:
        actor.steps = steps
        self.actors.append(actor)
        self.resume(actor, None)
        return actor

    def resume(self, actor: Actor, answer: Any, error: Exception | None = None) -> None:
        assert actor.steps is not None
        try:
            actor.effect = actor.steps.throw(error) if error else actor.steps.send(answer)
        except StopIteration:
            self.end(actor)

    def end(self, actor: Actor) -> None:
        actor.is_done, actor.effect = True, None
        if actor in self.actors:
            self.actors.remove(actor)

    def kill(self, actor: Actor) -> None:
        """Nothing of the generator runs any more, not even its cleanup."""
        self.counts["kills"] += 1
        actor.is_killed, actor.steps = True, None
        self.end(actor)

    def step(self, actor: Actor) -> None:
        """Perform the request that the actor has made."""
        effect = actor.effect
        if isinstance(effect, Gather):
            actor.meet()
            return
        if isinstance(effect, Sleep):
            actor.awake_at = self.now + effect.seconds
            self.resume(actor, None)
            return
        self.counts["requests"] += 1
        self._check_seal(effect)
        rng = self.rng
        if not self.is_quiet and rng.random() < self.setup.failing:
            self.counts["failed requests"] += 1
            if isinstance(effect, Put | Create | Delete):
                how = rng.choice(("before", "after", "late"))
                if how == "late":
                    self.late.append((self.now + rng.uniform(0, 1500), actor, effect))
                if how == "after":
                    if isinstance(effect, Delete) and rng.random() < 0.5:  # cut short
                        some = rng.sample(effect.keys, rng.randrange(len(effect.keys) + 1))
                        effect = Delete(tuple(some))
                    self.perform(actor, effect)
            self.resume(actor, None, StoreError("lost"))
            return
        self.resume(actor, self.perform(actor, effect))

    def _check_seal(self, effect: Any) -> None:
        """(j) The seal of a full copy never comes before its files."""
        if self.has_damage or not (isinstance(effect, Put) and effect.key.endswith(SEAL)):
            return
        copy = read_try(effect.key)
        assert copy is not None
        for name in unseal(effect.body).files:  # type: ignore[arg-type]
            if f"{copy.folder}/{name}" not in self.ever:  # a successor may have deleted it
                raise Violation(f"(j) {effect.key} comes before {name}")

    def advance(self, seconds: float) -> None:
        """Let time pass; late writes happen."""
        self.now += seconds
        for row in sorted(self.late, key=lambda row: row[0]):
            if row[0] <= self.now:
                self.late.remove(row)
                self.counts["late writes"] += 1
                self.perform(row[1], row[2])

    # -- Processes

    def new_trainer(self) -> Actor:
        self.number += 1
        actor = Actor(f"{self.number:08x}", is_trainer=True)
        return self.start(actor, train(self, actor))

    def new_follower(self) -> Actor:
        self.number += 1
        actor = Actor(f"{self.number:08x}")
        return self.start(actor, follow(self, actor))


counts_truly = counts  # mutants replace it in the machine


def change(rng: random.Random, memory: Values) -> None:
    for _ in range(rng.randint(0, 3)):
        memory[rng.choice(sorted(memory))] += rng.choice((1, 2, 7, 1000))
    if rng.random() < 0.1:
        memory[f"w{rng.randrange(12)}"] = rng.randrange(100)
    if rng.random() < 0.05 and len(memory) > 2:
        del memory[rng.choice(sorted(memory))]


def train(sim: Sim, actor: Actor) -> Generator[Any, Any, None]:
    """A trainer: from a checkpoint of its own, it publishes until it is superseded."""
    rng = sim.rng
    memory: Values = {f"w{n}": rng.randrange(1000) for n in range(6)}
    if sim.states and rng.random() < 0.7:
        memory = dict(rng.choice([each for each in sim.states.values() if each][-20:]))
    skew = rng.choice((0.0, 0.0, -4000.0, 4000.0))
    machine = sim.setup.publisher(
        actor.name, load(sim), lambda: sim.now + skew, sim.setup.full_every, sim.setup.keep
    )
    actor.machine = machine
    machine.memory = memory  # type: ignore[attr-defined]
    began, had = sim.now, sim.newest_version()
    try:
        yield from machine.open()
    except StoreError:
        return
    except Superseded:
        check_superseded(sim, machine)
        return
    actor.is_open, is_read = True, machine.base is not None
    if not sim.has_damage and had and not is_read and sim.now - began < LEASE_LIFE_S:
        raise Violation(f"(g) trainer {actor.name} did not read its base")
    step = 0
    while True:
        step += 1
        check_base(sim, machine)
        change(rng, memory)
        given = dict(memory)
        sim.counts["publishes"] += 1
        steps = machine.publish(SimSource(memory, sim, rng.randint(1, 3)), step)
        is_torn, answer, error = False, None, None
        while True:
            try:
                effect = steps.throw(error) if error else steps.send(answer)
            except StopIteration as end:
                record: VersionRecord = end.value
                break
            except StoreError:
                record = None  # type: ignore[assignment]
                break
            except Superseded:
                check_superseded(sim, machine)
                return
            answer, error = None, None
            try:
                answer = yield effect
            except StoreError as problem:
                error = problem
            if rng.random() < 0.02 and not sim.is_quiet:  # an optimizer that steps meanwhile
                is_torn = True
                memory[rng.choice(sorted(memory))] += 1
        if record is not None:
            sim.counts["answered"] += 1
            body = sim.committed.get(record.number)
            version = read_record(body, record.number) if body else None
            if version != record:
                raise Violation(f"(e) version {record.number} was returned, {version} is there")
            if not is_torn and record.state != state_of(given):
                raise Violation(f"(e) version {record.number} is not what was published")
        change(rng, memory)  # the caller trains on


def check_base(sim: Sim, machine: PublisherMachine) -> None:
    if machine.base is not None:
        sim.check_values(sim.records.get(machine.parent), machine.base, machine.who)  # type: ignore[arg-type]


def check_superseded(sim: Sim, machine: PublisherMachine) -> None:
    claims = [each for each in sim.records.values() if isinstance(each, Claim)]
    if not sim.has_damage and max(each.number for each in claims) <= machine.claim:
        raise Violation(f"(g) trainer {machine.who} is superseded by nobody")
    sim.counts["superseded"] += 1


def follow(sim: Sim, actor: Actor) -> Generator[Any, Any, None]:
    """A rollout worker: it follows, sometimes to a number that it is given."""
    rng = sim.rng
    skew = rng.choice((0.0, -4000.0, 4000.0))
    reader = actor.machine = sim.setup.reader(actor.name, load(sim), lambda: sim.now + skew)
    while True:
        before, began = reader.number, sim.now
        limit = None
        if rng.random() < 0.3 and not sim.is_quiet:
            limit = max(before, 1) + rng.randint(0, 4)
        had_copy = bool(sim.copies()) if not before and limit is None else False
        try:
            yield from reader.advance(limit)
            is_answered = True
        except StoreError:
            is_answered = False
        sim.check_values(reader.record, reader.copy, actor.name)  # type: ignore[arg-type]
        if reader.number < before:
            raise Violation(f"(c) follower {actor.name} went back")
        if limit is not None and reader.number > limit:
            raise Violation(f"(c) follower {actor.name} went beyond {limit}")
        is_short = sim.now - began < LEASE_LIFE_S
        if is_answered and had_copy and not reader.number and is_short and not sim.has_damage:
            raise Violation(f"(f) follower {actor.name} could not read any full copy")
        sim.counts["moves"] += reader.number != before
        if rng.random() < 0.7:
            actor.awake_at = sim.now + rng.uniform(0, 60)
        with suppress(StoreError):
            yield List("log/", "log/9")  # nothing: the wait is before it
