"""Rules of replicas that publish together, each broken once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from atoll.objectstore.effects import Get, List, Put
from atoll.weights.records import read_share_key, try_folder, unseal_share
from atoll.weights.replicas import ReplicaMachine, Round
from tests.sim.weights.replicas import run_replica_schedule
from tests.sim.weights.replicas_directed import DIRECTED

Steps = Any


class LeadsWithoutClaim(ReplicaMachine):
    def _claim_next(self) -> Steps:
        if not self.head:
            yield from super()._claim_next()
        self.leader = self.who

    def _read_log(self) -> Steps:
        leader = self.leader
        yield from super()._read_log()
        self.leader = self.who if leader == self.who else self.leader


class OlderRoundsToo(ReplicaMachine):
    def _is_done(self, what: Round) -> bool:
        return super()._is_done(what) and self.newest.round == what.round  # type: ignore


class MissingSharesLeftOut(ReplicaMachine):
    def _put_share(self, values: Any, what: Round, index: int) -> Steps:
        share = yield from super()._put_share(values, what, index)
        if what.members and what.members[index] != self.who:
            return type(share)(state=share.state)
        return share


class OtherBitsTaken(ReplicaMachine):
    def _collect(self, values: Any, what: Round, shares: Any) -> Steps:
        for row in (yield List(f"{self._folder(what)}/")):
            if (match := read_share_key(row.key)) and match[0] not in shares:
                shares[match[0]] = unseal_share((yield Get(row.key)))


class OwnValuesAreBase(ReplicaMachine):
    def publish_round(self, values: Any, what: Round) -> Steps:
        record = yield from super().publish_round(values, what)
        if record is not None:
            self._hold(values, record)
        return record


class NobodyTakesOver(ReplicaMachine):
    def _claim_next(self) -> Steps:
        if not self.leader:
            yield from super()._claim_next()


class EveryoneTakesOver(ReplicaMachine):
    def publish_round(self, values: Any, what: Round) -> Steps:
        return (yield from super().publish_round(values, what._replace(patience_s=0.0)))


class LeaderOfThePastWaitedFor(ReplicaMachine):
    def _is_gone(self, first: str, what: Round) -> bool:
        return False


class SupersededGoesOn(ReplicaMachine):
    def _supersede(self, number: int) -> None:  # type: ignore[override]
        self.is_joined, self.leader = False, ""


class OneFolder(ReplicaMachine):
    def _folder(self, what: Round) -> str:
        kind = "full" if self._is_full() else "delta"
        return try_folder(kind, self.head + 1, "0", 0)


class FolderWithoutNumber(ReplicaMachine):
    def _folder(self, what: Round) -> str:
        kind = "full" if self._is_full() else "delta"
        return try_folder(kind, 1, self.leader, 0)


class DescriptionFirst(ReplicaMachine):
    def _help(self, values: Any, what: Round) -> Steps:
        steps, puts = super()._help(values, what), []
        answer = None
        while True:
            try:
                effect = steps.send(answer)
            except StopIteration:
                break
            answer = None
            if isinstance(effect, Put) and effect.key.startswith(("delta/", "full/")):
                puts.append(effect)
            else:
                answer = yield effect
        yield from reversed(puts)


class BaseBeforeClaim(ReplicaMachine):
    def _read_base(self) -> Steps:
        if self.base is None:
            yield from super()._read_base()


@dataclass(frozen=True)
class ReplicaMutant:
    name: str
    replica: type[ReplicaMachine]

    def is_caught(self, by: int | str) -> str:
        try:
            if isinstance(by, str):
                DIRECTED[by](replica=self.replica)
            else:
                run_replica_schedule(by, replica=self.replica)
        except AssertionError as error:
            return str(error) or "assertion"
        return ""


MUTANTS = [
    ReplicaMutant("a leader without a claim", LeadsWithoutClaim),
    ReplicaMutant("older rounds are published", OlderRoundsToo),
    ReplicaMutant("missing shares are left out", MissingSharesLeftOut),
    ReplicaMutant("shares of other bits are taken", OtherBitsTaken),
    ReplicaMutant("own values taken for the base", OwnValuesAreBase),
    ReplicaMutant("nobody takes over", NobodyTakesOver),
    ReplicaMutant("nobody waits for the leader", EveryoneTakesOver),
    ReplicaMutant("a leader of the past is waited for", LeaderOfThePastWaitedFor),
    ReplicaMutant("a superseded run goes on", SupersededGoesOn),
    ReplicaMutant("one folder for all leaders and rounds", OneFolder),
    ReplicaMutant("folders without number", FolderWithoutNumber),
    ReplicaMutant("description before its parts", DescriptionFirst),
    ReplicaMutant("base read before the claim", BaseBeforeClaim),
]

CAUGHT_BY: dict[str, int | str] = {
    "a leader without a claim": 0,
    "older rounds are published": "one_is_a_round_behind",
    "missing shares are left out": 1,
    "shares of other bits are taken": "member_with_other_bits",
    "own values taken for the base": "member_with_other_bits",
    "nobody takes over": "leader_dies_before_its_record",
    "nobody waits for the leader": "each_uploads_a_share",
    "a leader of the past is waited for": "run_goes_on_in_new_processes",
    "a superseded run goes on": 1,
    "one folder for all leaders and rounds": 0,
    "folders without number": 0,
    "description before its parts": 48,
    "base read before the claim": 0,
}
