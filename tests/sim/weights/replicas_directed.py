"""Replicas that publish together where something goes wrong at one chosen place."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

from atoll.objectstore.effects import Create
from atoll.weights.machine import Superseded
from atoll.weights.records import Claim, VersionRecord, read_share_key
from atoll.weights.replicas import Round
from tests.sim.weights.replicas import Run
from tests.sim.weights.world import Actor, Setup, Sim, SimCopy, Values, Violation, load, state_of

PATIENCE_S = 40.0


class Stage:
    """A quiet world with one run, whose replicas publish when the schedule says so."""

    def __init__(self, replicas: int, *, full_every: int = 50, **changes: Any) -> None:
        self.sim = Sim(random.Random(7), Setup(full_every=full_every, keep=2, **changes))
        self.sim.is_quiet = True
        self.run = Run("00000000000000aa", self.sim, PATIENCE_S)
        self.run.add({f"w{n}": n * 100 for n in range(8)}, ())
        self.machines = [self.new_machine() for _ in range(replicas)]

    def new_machine(self) -> Any:
        self.sim.number += 1
        setup = self.sim.setup
        clock = lambda: self.sim.now  # noqa: E731
        machine = setup.replica(
            f"{self.sim.number:08x}", load(self.sim), clock, setup.full_every, setup.keep
        )
        machine.run = self.run.name
        return machine

    def next_round(self, members: Sequence[Any] | None = None) -> None:
        values = {name: value + 1 for name, value in self.run.rounds[-1][0].items()}
        some = self.machines if members is None else members
        self.run.add(values, tuple(each.who for each in some))

    def publish(self, machine: Any, number: int = -1, values: Values | None = None) -> Actor:
        """Begin to publish a round; `values`: those of a replica whose memory has rotted."""
        number %= len(self.run.rounds)
        good, members = self.run.rounds[number]
        actor = Actor(machine.who, machine=machine, is_trainer=True)

        def steps() -> Generator[Any, Any, None]:
            copy = SimCopy(dict(values or good), self.sim)
            what = Round(number, members, number, PATIENCE_S)
            try:
                actor.answer = yield from machine.publish_round(copy, what)  # type: ignore
            except Superseded as error:
                actor.answer = error  # type: ignore[attr-defined]

        return self.sim.start(actor, steps())

    def finish(self, *actors: Actor) -> None:
        """Let them all come to their end, one request each in turn."""
        for _ in range(2000):
            waiting = [actor for actor in actors if not actor.is_done]
            if not waiting:
                return
            for actor in waiting:
                self.sim.advance(0.1)
                if actor.awake_at <= self.sim.now:
                    self.sim.step(actor)
        raise Violation("(h) a replica does not come to an end")

    def publish_all(self, machines: Sequence[Any] | None = None) -> list[Any]:
        actors = [self.publish(each) for each in (machines or self.machines)]
        self.finish(*actors)
        for machine in machines or self.machines:
            self.sim.check_values(machine.reader.record, machine.reader.copy, machine.who)
        return [actor.answer for actor in actors]  # type: ignore[attr-defined]

    def version(self, number: int = -1) -> VersionRecord:
        versions = [each for each in self.sim.records.values() if isinstance(each, VersionRecord)]
        record = versions[number]
        return record

    def claims(self) -> int:
        return sum(isinstance(each, Claim) for each in self.sim.records.values())

    def check_follower(self) -> None:
        follower = self.sim.new_follower()
        for _ in range(100):
            if follower.machine.number == self.sim.newest_version():
                return
            self.sim.advance(1.0)
            self.sim.step(follower)
        raise Violation("(h) a follower does not reach the newest version")


def makers(record: VersionRecord) -> list[str]:
    """Who has made each of the parts, or of the files, of a version."""
    pairs = [read_share_key(f"{part.key.rpartition('.')[0]}.json") for part in record.parts]
    return [pair[1] for pair in pairs if pair]


def expect(is_true: bool, text: str) -> None:
    if not is_true:
        raise Violation(text)


def each_uploads_a_share(**changes: Any) -> None:
    """All return the same version; parts are by all, and there is one claim."""
    stage = Stage(3, full_every=5, **changes)
    first = stage.publish_all()
    for _ in range(8):
        stage.next_round()
        answers = stage.publish_all()
        expect(answers == [stage.version()] * 3, "(e) not all return the version of their round")
        if stage.version().parent is not None:
            expect(len(set(makers(stage.version()))) == 3, "(l) not everyone uploads a share")
    expect(first == [first[0]] * 3, "(e) not all return the first version")
    expect(stage.claims() == 1, "(l) more than one claims")
    fulls = [n for n in stage.sim.committed if stage.sim.records[n].parent is None]  # type: ignore
    expect(fulls == [2, 5, 10], f"(l) versions {fulls} are full")
    stage.check_follower()


def leader_dies_before_its_record(**changes: Any) -> None:
    """The others wait, then the first of them claims and commits this very round."""
    stage = Stage(3, **changes)
    stage.publish_all()
    stage.next_round()
    (leader,) = [each for each in stage.machines if each.leader == each.who]
    others = [each for each in stage.machines if each is not leader]
    dying = stage.publish(leader)
    actors = [stage.publish(each) for each in others]
    for _ in range(200):
        if isinstance(dying.effect, Create):
            break
        for each in (dying, *actors):
            stage.sim.advance(0.1)
            if each.awake_at <= stage.sim.now:
                stage.sim.step(each)
    stage.sim.kill(dying)
    began = stage.sim.now
    stage.finish(*actors)
    expect(stage.version().round == 1, "(h) the round has no version")
    expect(stage.claims() == 2, "(l) more than one takes over")
    expect(stage.sim.now - began > PATIENCE_S, "(l) a leader at work is not waited for")
    stage.next_round(others)
    stage.publish_all(others)
    expect(len(set(makers(stage.version()))) == 2, "(l) not everyone uploads a share")
    stage.check_follower()


def member_dies(**changes: Any) -> None:
    """The leader makes the share of a member that is in the manifest, and is no more."""
    stage = Stage(3, **changes)
    stage.publish_all()
    stage.next_round()
    leader, *others = sorted(stage.machines, key=lambda each: each.leader != each.who)
    stage.publish_all([leader, others[0]])
    names = makers(stage.version())
    expect(sorted(names) == sorted([leader.who, leader.who, others[0].who]), f"(l) {names}")
    expect(stage.claims() == 1, "(l) somebody takes over")
    stage.check_follower()


def member_with_other_bits(**changes: Any) -> None:
    """What it brings is not taken; what it holds afterwards are the bits of the version."""
    stage = Stage(3, **changes)
    stage.publish_all()
    stage.next_round()
    leader, odd, third = sorted(stage.machines, key=lambda each: each.leader != each.who)
    rotten = {name: value + 7 for name, value in stage.run.rounds[-1][0].items()}
    stage.sim.states[state_of(rotten)] = rotten
    actors = [stage.publish(leader), stage.publish(odd, values=rotten), stage.publish(third)]
    stage.finish(*actors)
    expect(odd.who not in makers(stage.version()), "(k) other bits are published")
    stage.next_round()
    stage.publish_all()
    expect(odd.who in makers(stage.version()), "(l) its next share is not taken")
    stage.check_follower()


def one_is_a_round_behind(**changes: Any) -> None:
    """It gets None, publishes nothing, and is there again in the next round."""
    stage = Stage(3, **changes)
    stage.publish_all()
    *others, late = stage.machines
    for _ in range(2):
        stage.next_round(others)
        stage.publish_all(others)
    newest = stage.version()
    for number in (1, 2):
        actor = stage.publish(late, number)
        stage.finish(actor)
        expected = None if number == 1 else newest
        expect(actor.answer == expected, f"(e) round {number} returns {actor.answer}")  # type: ignore
    expect(stage.version() == newest, "(k) an older round is published")
    stage.next_round()
    stage.publish_all()
    expect(late.who in makers(stage.version()), "(l) it does not upload its share")


def members_change(**changes: Any) -> None:
    """Each round has as many shares as members, whoever they are."""
    stage = Stage(4, **changes)
    stage.publish_all()
    new = stage.new_machine()
    a, b, c, d = stage.machines
    for members in ([a, b, c, d], [b, c], [b, c, new], [d], [a, b, c, d, new], [new, a]):
        stage.next_round(members)
        stage.publish_all(members)
        names = makers(stage.version())
        ours = {each.who for each in members}
        expect(set(names) <= ours and len(names) == len(members), f"(l) {names}")
    stage.check_follower()


def run_goes_on_in_new_processes(**changes: Any) -> None:
    """Nobody waits for a leader that was not in the round, and no full copy is needed."""
    stage = Stage(3, **changes)
    for _ in range(3):
        stage.publish_all()
        stage.next_round()
    old = stage.version()
    stage.machines = [stage.new_machine() for _ in range(2)]
    stage.next_round()
    began = stage.sim.now
    stage.publish_all()
    expect(stage.sim.now - began < PATIENCE_S, "(l) a leader of the past is waited for")
    expect(stage.version().parent == old.number, "(l) no delta")
    stage.check_follower()


def another_run_takes_the_channel(**changes: Any) -> None:
    """All replicas of the run before are superseded, for good, and none of them claims again."""
    stage = Stage(3, **changes)
    stage.publish_all()
    trainer = stage.sim.new_trainer()
    for _ in range(200):
        stage.sim.advance(0.1)
        stage.sim.step(trainer)
        if stage.sim.counts["answered"] == 2:
            break
    number = stage.sim.newest_version()
    for _ in range(2):
        stage.next_round()
        answers = stage.publish_all()
        expect(all(isinstance(each, Superseded) for each in answers), f"(l) {answers}")
    expect(max(stage.sim.records) == number, "(l) a superseded run goes on")


DIRECTED: dict[str, Callable[..., None]] = {
    each.__name__: each
    for each in (
        each_uploads_a_share,
        leader_dies_before_its_record,
        member_dies,
        member_with_other_bits,
        one_is_a_round_behind,
        members_change,
        run_goes_on_in_new_processes,
        another_run_takes_the_channel,
    )
}
