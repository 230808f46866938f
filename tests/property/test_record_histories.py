"""Random histories of trainings: the fold agrees with a rule that knows nothing of it.

A history is what a controller, its executor and ranks write down together: sizes change, ranks
start when they are due, end by themselves or when they are stopped, and ends are discarded.
ATOLL_SIM_COUNT sets how many there are.
"""

from __future__ import annotations

import os
import random
from typing import Any

from atoll.agent.records import (
    Facts,
    claim_record,
    desired_record,
    due,
    exit_record,
    gate_record,
    start_record,
)
from atoll.backends.records import Ages, JobState, RankMemory, Timing, fold
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import Training
from tests.support.reference_fold import Reference

HISTORIES = int(os.environ.get("ATOLL_SIM_COUNT", "1000"))
SIGNALS = ("SIGKILL", "SIGTERM", "SIGSEGV")


class History:
    """One training, step by step. Records are as a journal has them, in order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.max_restarts = self.random.choice([0, 1, 3])
        self.records: list[dict[str, Any]] = []
        self.facts = Facts()
        self.discarded: dict[int, int] = {}
        self.now = 1000.0
        self.size = 0
        self.version = 0
        self.resize(self.random.randint(1, 4))

    def training(self) -> Training:
        world = WorldSize(min=1, target=max(self.size, 1), max=9)
        spec = TrainingSpec(
            name="t", command=["x"], world_size=world, max_restarts=self.max_restarts
        )
        return Training(namespace="n", uid="u", spec=spec)

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        assert self.facts.add(record)

    def resize(self, size: int) -> None:
        """As a plan does: what has ended above the size, or may be repeated, is discarded."""
        for rank in self.facts.ranks:
            one = self.facts.current(rank)
            if one is not None and one.exit is not None and rank >= min(size, self.size):
                self.discarded[rank] = one.attempt
        self.size, self.version = size, self.version + 1
        wanted = {rank: number for rank, number in self.discarded.items() if rank < size}
        before, newest = self.facts.desired, self.facts.newest()
        self.write(desired_record(self.version, size, wanted, before, newest, self.now))

    def start(self) -> None:
        for each in due(self.facts, self.max_restarts):
            at = 0.0 if each.after is None else each.after["at"] + each.delay_s
            if at <= self.now and self.random.random() < 0.7:
                pid = 100 + each.rank
                self.write(start_record(each.rank, each.attempt, self.now, pid=pid, startTicks=1))

    def end(self) -> None:
        assert self.facts.desired is not None
        running = self.facts.running()
        if not running:
            return
        one = self.random.choice(running)
        stops = self.facts.desired["stops"].get(str(one.rank), [])
        is_unwanted = one.rank >= self.size or any(one.attempt <= stop for stop in stops)
        signal = self.random.choice([None, None, *SIGNALS])
        code = 128 if signal else self.random.choice([0, 1, 3])
        end = {"code": code, "signal": signal, "reason": "Error", "at": self.now}
        end["stopped"] = is_unwanted and self.random.random() < 0.8
        self.write(exit_record(one.rank, one.attempt, end))

    def discard(self) -> None:
        """As after an end that was nobody's fault: the next attempt is no restart."""
        ended = [self.facts.current(rank) for rank in range(self.size)]
        found = [one for one in ended if one is not None and one.exit is not None]
        if found:
            one = self.random.choice(found)
            self.discarded[one.rank] = one.attempt
            self.resize(self.size)

    def step(self) -> None:
        self.now += self.random.choice([0.01, 0.6, 5.0, 40.0])
        kind = self.random.random()
        if kind < 0.12:
            self.resize(self.random.randint(0, 5))
        elif kind < 0.2:
            self.discard()
        elif kind < 0.6:
            self.end()
        else:
            self.start()


def rank_states(observed: Any) -> list[tuple[Any, ...]]:
    return [
        (r.rank, r.attempt, r.state, r.restarts, r.started_at, r.is_stopping,
         r.exit and (r.exit.code, r.exit.at), r.previous_exit and r.previous_exit.at,
         round(r.metered_s or 0.0, 6), [a.attempt for a in r.attempts])
        for r in sorted(observed, key=lambda rank: rank.rank)
    ]  # fmt: skip


def reference_states(reference: Reference) -> list[tuple[Any, ...]]:
    return [
        (a.rank, a.number, "running" if a.exit is None else "exited", a.restarts, a.started_at,
         a.exit is None and a.is_stopping, a.exit and (a.exit["code"], a.exit["at"]),
         a.previous_exit and a.previous_exit["at"], round(a.metered_s, 6),
         reference.ended.get(a.rank, [])[-20:])
        for _, a in sorted(reference.attempts.items())
    ]  # fmt: skip


def test_the_fold_agrees_with_a_rule_that_reads_records_in_their_order() -> None:
    for seed in range(HISTORIES):
        history, reference, memory, read = History(seed), Reference(), RankMemory(), 0
        for _ in range(history.random.randint(5, 40)):
            history.step()
            reference.fold(history.records[read:])
            read = len(history.records)
            observed = memory.observe(history.training(), history.facts, "host")
            assert rank_states(observed) == reference_states(reference), seed
            found = {
                (d.rank, d.attempt, d.restarts, d.after["at"] + d.delay_s if d.after else 0.0)
                for d in due(history.facts, history.max_restarts)
            }
            assert found == reference.due(history.max_restarts), seed


def test_a_bucket_listing_in_any_order_and_twice_gives_the_observation_of_the_journal() -> None:
    for seed in range(HISTORIES // 4):
        history = History(seed)
        for _ in range(25):
            history.step()
        claims = [
            claim_record(r["rank"], r["attempt"], r["at"])
            for r in history.records
            if r["t"] == "start"
        ]
        records = [*claims, *history.records, gate_record(2, 1.0)]
        records += history.random.sample(records, len(records) // 2)
        history.random.shuffle(records)
        training, now, timing = history.training(), history.now, Timing()
        listed = fold(training, Facts(records), {}, now=now, timing=timing)
        journal = RankMemory().observe(training, history.facts, "host")
        assert rank_states(listed.observation.ranks) == rank_states(journal), seed
        assert {(d.rank, d.attempt) for d in listed.due} == {
            d[:2] for d in due(history.facts, history.max_restarts)
        }


def test_a_backend_that_contradicts_the_records_never_changes_an_end_or_starts_a_rank_twice() -> (
    None
):
    for seed in range(HISTORIES // 4):
        history = History(seed)
        for _ in range(25):
            history.step()
        training, facts, pick = history.training(), history.facts, history.random
        plain = fold(training, facts, {}, now=history.now, timing=Timing()).observation
        keys = [(rank, n) for rank, own in facts.ranks.items() for n in own]
        states = {
            key: JobState(
                pick.choice(["pending", "running", "ended"]),
                reason=pick.choice(["", "Preempted", "OOMKilled", "HostLost"]),
                is_paused=pick.random() < 0.2,
                is_repeated=pick.random() < 0.2,
            )
            for key in keys
            if pick.random() < 0.8
        }
        ages = Ages({key: pick.choice([0.0, 3.0, 30.0]) for key in keys})
        told = fold(training, facts, states, now=history.now, timing=Timing(), ages=ages)
        exits = {r.rank: r.exit for r in plain.ranks}
        for rank in told.observation.ranks:
            known = exits[rank.rank]
            if rank.exit is not None:
                assert known is not None
                assert (rank.exit.code, rank.exit.at) == (known.code, known.at), seed
            else:
                one = facts.attempt(rank.rank, rank.attempt)
                assert one is not None
                assert one.exit is None or (rank.rank, rank.attempt) in states
        alive = {r.rank for r in told.observation.ranks if r.exit is None}
        assert not alive & {d.rank for d in told.due}, seed
