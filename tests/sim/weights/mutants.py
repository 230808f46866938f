"""Rules of the channel, each broken once: the simulator must notice.

`CAUGHT_BY` has the seed, or the directed schedule, that catches each. When schedules have changed,
`python -m tests.sim.weights.mutants` finds new seeds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from atoll.objectstore.effects import Get, List, StoreError
from atoll.weights import machine as machines
from atoll.weights.machine import PublisherMachine, Reader, numbers_in, read_log
from atoll.weights.records import VersionRecord, log_key, try_folder
from tests.sim.weights.directed import DIRECTED
from tests.sim.weights.schedule import run_schedule
from tests.sim.weights.world import SimCopy

Steps = Any


class BaseMovesFirst(PublisherMachine):  # rule 5
    def commit(self, pending: Any) -> Steps:
        pending.move()
        pending.move = lambda: None
        yield from super().commit(pending)


class AnyOwnRecord(PublisherMachine):  # rule 4
    def begin(self) -> Steps:
        self.pending = None  # the next try takes the number, or finds it taken by an own record
        yield from super().begin()

    def _is_same(self, data: bytes, body: bytes) -> bool:
        return f'"publisher":"{self.who}"'.encode() in data


class LostPublishForgotten(PublisherMachine):  # rule 4
    def settle(self) -> Steps:
        try:
            yield from super().settle()
        except StoreError:
            self.pending = None
            raise


class MemoryIsBase(PublisherMachine):  # rule 5
    def _write(self, source: Any, step: int | None) -> Steps:
        pending = yield from super()._write(source, step)

        def move() -> None:
            self.base.values = source.memory  # type: ignore[union-attr]

        pending.move = move
        return pending


class TakenNumberPassed(PublisherMachine):  # rule 1
    def settle(self) -> Steps:
        while True:
            try:
                return (yield from super().settle())
            except machines.Superseded:
                self.successor = 0
                if self.head > self.claim + 40:
                    raise
                self.head += 1
                raise StoreError("again") from None


class ClaimsDeleted(PublisherMachine):  # rule 3
    def _doomed_records(self, log: Any, edge: int) -> list[int]:
        return [number for number in numbers_in(log) if number < edge]


class ClaimNotChecked(PublisherMachine):  # rule 2
    def _is_past(self) -> Steps:
        return False
        yield

    def _check_newest(self, later: Any) -> None:
        pass


class BaseBeforeClaim(PublisherMachine):  # rule 9
    def open(self) -> Steps:
        reader = Reader(self.who, self.load, self.clock)
        yield from reader.advance()
        self.base, self.parent = reader.copy, reader.number
        yield from self._claim()


class OwnWeightsAreBase(PublisherMachine):  # rule 9
    def _read_base(self) -> Steps:
        for number in reversed(numbers_in((yield List("log/")))):
            if isinstance((yield from read_log(number)), VersionRecord):
                memory = self.memory  # type: ignore[attr-defined]
                self.base, self.parent = SimCopy(dict(memory), self.load.sim), number  # type: ignore
                return


class RecordFirst(PublisherMachine):  # rule 7
    first = 0

    def _write(self, source: Any, step: int | None) -> Steps:
        steps = super()._write(source, step)
        self.puts = list[Any]()
        effect = next(steps)
        while True:
            if len(self.puts) < self.first:
                yield effect
            self.puts.append(effect)
            try:
                effect = steps.send(None)
            except StopIteration as end:
                return end.value

    def finish(self) -> Steps:
        yield from getattr(self, "puts", [])[self.first :]
        self.puts = []
        yield from super().finish()


class RecordSecond(RecordFirst):
    first = 1


class OneKeyForTries(PublisherMachine):  # rule 7
    def folder(self, kind: str, number: int) -> str:
        return try_folder(kind, number, self.who, 1)


class KeysWithoutPublisher(PublisherMachine):  # rule 7
    def folder(self, kind: str, number: int) -> str:
        return try_folder(kind, number, "0", self.attempt)


class SealFirst(PublisherMachine):  # rule 8
    def _put_full(self, copy: Any, number: int) -> Steps:
        steps, effects = super()._put_full(copy, number), []
        try:
            effects.append(next(steps))
            while True:
                effects.append(steps.send(None))
        except StopIteration as end:
            yield from reversed(effects)
            return end.value


class NothingVerified(Reader):  # rule 12
    def _read(self, key: str, digest: str) -> Steps:
        return (yield Get(key))

    def _take(self, record: Any) -> Steps:
        parts = []
        for part in record.parts:
            if (body := (yield Get(part.key))) is not None:
                parts.append(body)
        self.copy.apply(self.copy.prepare(parts, record.removed))  # type: ignore[union-attr]
        self.record = record
        return True


class FitIgnored(Reader):  # rules 11 and 12
    def _take(self, record: Any) -> Steps:
        parts = []
        for part in record.parts:
            body = yield from self._read(part.key, part.sha256)
            if body is None:
                return False
            parts.append(body)
        self.copy.apply(self.copy.prepare(parts, record.removed))  # type: ignore[union-attr]
        self.record = record
        return True


class HolesPassed(Reader):  # rule 11
    def _follow(self, limit: int | None) -> Steps:
        if self.record is None:
            return False
        for number in numbers_in((yield List("log/", log_key(self.number)))):
            if limit is not None and number > limit:
                break
            record = yield from read_log(number)
            if isinstance(record, VersionRecord):
                yield from self._take(record)
            self.position = number
        return True


class LimitIgnored(Reader):
    def advance(self, limit: int | None = None) -> Steps:
        yield from super().advance()


class LeasesIgnored(PublisherMachine):  # rule 15
    def _fresh(self, ages: Any) -> list[int]:
        return []


class LeasesFirst(PublisherMachine):  # rule 14
    def gc(self) -> Steps:
        leases = yield List("lease/")
        steps = super().gc()
        answer = None
        while True:
            try:
                effect = steps.send(answer)
            except StopIteration:
                return
            answer = leases if effect == List("lease/") else (yield effect)


class LeaseAfterReading(Reader):  # rule 13
    def _renew(self) -> Steps:
        self._renewed_at = self._clock()
        if self.record is not None:
            yield from super()._renew()


class JoinerLeasesAll(Reader):  # rule 13
    def _lease(self, number: int) -> Steps:
        yield from super()._lease(0 if self.record is None else number)


class JoinerLeasesItsCopy(Reader):  # rule 13
    def _lease(self, number: int) -> Steps:
        yield from super()._lease(number + (self.record is None and number > 0))


class OwnClock(PublisherMachine):  # rule 16
    def _ages(self, log: Any, leases: Any) -> dict[str, float]:
        return {row.key: self.clock() - row.time for row in leases}


class OneTooMany(PublisherMachine):  # rule 15
    def _fresh(self, ages: Any) -> list[int]:
        return [number + 1 for number in super()._fresh(ages)]


class NewestDeleted(PublisherMachine):  # rule 15
    def _is_leftover(self, attempt: Any, is_used: bool, numbers: Any) -> bool:
        is_newest = attempt.folder.startswith("full/") and attempt.number == self.head
        return is_newest or super()._is_leftover(attempt, is_used, numbers)


class AnyLeftover(PublisherMachine):  # rule 17
    def _is_leftover(self, attempt: Any, is_used: bool, numbers: Any) -> bool:
        return not is_used


class TriesWithoutRecord(PublisherMachine):  # rule 17
    def _find_uncertain(self, log: Any, objects: Any) -> set[int]:
        return set()


class AnyCopyCounts(Reader):  # rule 8
    def _load_copy(self, copy: Any) -> Steps:
        content = yield from machines.read_full_copy(copy.folder)
        files = {}
        for name, digest in content.files.items() if content else ():
            if (body := (yield from self._read(f"{copy.folder}/{name}", digest))) is None:
                return False
            files[name] = body
        if content is None:
            return False
        self.copy, self.position, self.deltas = self._load(files), copy.number, 0
        self.record = VersionRecord(number=copy.number, publisher=copy.who, state=content.state)
        return True


@dataclass(frozen=True)
class Mutant:
    name: str
    publisher: type[PublisherMachine] | None = None
    reader: type[Reader] | None = None
    patches: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def is_caught(self, by: int | str) -> str:
        """What a seed, or a directed schedule, says of the mutant; empty: nothing."""
        changes = dict(self.settings)
        if self.publisher is not None:
            changes["publisher"] = self.publisher
        if self.reader is not None:
            changes["reader"] = self.reader
        with patch.multiple(machines, **self.patches) if self.patches else patch.dict({}):
            try:
                if isinstance(by, str):
                    DIRECTED[by](**changes)
                else:
                    run_schedule(by, **changes)
            except AssertionError as error:
                return str(error) or "assertion"
        return ""


MUTANTS = [
    Mutant("base moves before the commit", BaseMovesFirst),
    Mutant("any own record counts as the one", AnyOwnRecord),
    Mutant("a lost publish is forgotten", LostPublishForgotten),
    Mutant("the caller's memory is kept", MemoryIsBase),
    Mutant("a taken number is passed over", TakenNumberPassed),
    Mutant("claims are deleted", ClaimsDeleted),
    Mutant("the claim is not looked at again", ClaimNotChecked),
    Mutant("base read before the claim", BaseBeforeClaim),
    Mutant("own weights taken for the base", OwnWeightsAreBase),
    Mutant("record before its parts", RecordFirst),
    Mutant("record after the first part", RecordSecond),
    Mutant("one key for all tries", OneKeyForTries),
    Mutant("keys without publisher", KeysWithoutPublisher),
    Mutant("atoll.json before its files", SealFirst),
    Mutant("full copy without its record counts", reader=AnyCopyCounts),
    Mutant("nothing verified", reader=NothingVerified, settings={"is_lenient": True}),
    Mutant("parent and digests ignored", reader=FitIgnored, settings={"is_lenient": True}),
    Mutant("holes passed over", reader=HolesPassed, patches={"Reader": HolesPassed}),
    Mutant("the newest taken whatever was asked", reader=LimitIgnored),
    Mutant("gc ignores leases", LeasesIgnored),
    Mutant("leases read before the log", LeasesFirst),
    Mutant("joiner leases after reading", reader=LeaseAfterReading),
    Mutant("a joiner leases everything", reader=JoinerLeasesAll),
    Mutant("a joiner leases after its copy", reader=JoinerLeasesItsCopy),
    Mutant("age by own clock", OwnClock),
    Mutant("gc takes one version too many", OneTooMany),
    Mutant("newest full copy deleted", NewestDeleted),
    Mutant("anybody's left-overs deleted", AnyLeftover),
    Mutant("every record is read", patches={"looks_like_claim": lambda size: False}),
    Mutant("versions pass for claims", patches={"looks_like_claim": lambda size: True}),
    Mutant("left-overs without their record", TriesWithoutRecord),
]

CAUGHT_BY: dict[str, int | str] = {
    "base moves before the commit": 0,
    "any own record counts as the one": 0,
    "a lost publish is forgotten": 12,
    "the caller's memory is kept": 0,
    "a taken number is passed over": 1,
    "claims are deleted": 1,
    "the claim is not looked at again": "claim_in_the_past",
    "base read before the claim": 10,
    "own weights taken for the base": 0,
    "record before its parts": 6,
    "record after the first part": 6,
    "one key for all tries": 16,
    "keys without publisher": 0,
    "atoll.json before its files": 6,
    "full copy without its record counts": 1,
    "nothing verified": 0,
    "parent and digests ignored": 0,
    "holes passed over": 0,
    "the newest taken whatever was asked": 0,
    "gc ignores leases": 9,
    "leases read before the log": "joiner_between_two_lists",
    "joiner leases after reading": "gc_while_a_joiner_reads",
    "a joiner leases everything": "joiners_that_die",
    "a joiner leases after its copy": "gc_while_a_joiner_reads",
    "age by own clock": 0,
    "gc takes one version too many": 9,
    "newest full copy deleted": 6,
    "anybody's left-overs deleted": 241,
    "every record is read": "many_restarts",
    "versions pass for claims": 0,
    "left-overs without their record": "parts_of_a_fenced_trainer",
}


def find_seed(mutant: Mutant, most: int) -> tuple[int | str, str]:
    """The schedule that catches it: the one in the table, a directed one, or a seed."""
    known = [CAUGHT_BY[mutant.name]] if mutant.name in CAUGHT_BY else []
    for by in [*known, *range(most), *DIRECTED]:
        if text := mutant.is_caught(by):
            return by, text
    return -1, ""


def main(say: Callable[[str], Any]) -> None:
    for mutant in MUTANTS:
        by, text = find_seed(mutant, 1500)
        say(f"    {mutant.name!r}: {by!r},  # {text[:90]}\n")


if __name__ == "__main__":
    main(sys.stdout.write)
