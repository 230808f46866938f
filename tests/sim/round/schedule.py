"""Random lives of a run: settings and faults are drawn from a seed, then it is quiet.

`run_schedule(seed)` raises Violation, with the seed in its text, or returns what happened.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from atoll.diloco.data import ledger as ledgers
from atoll.diloco.round import objects
from tests.sim.round.oracle import Oracle, Violation
from tests.sim.round.replica import Replica, Run, Setup
from tests.sim.round.world import QUIET, Faults, World

QUIET_ROUND_S = 500.0  # O9


def draw_setup(rng: random.Random, changes: dict[str, object]) -> Setup:
    world = rng.randint(2, 5)
    fragments = rng.choice((1, 1, 2, 3))
    terms = None
    has_ledger = rng.random() < 0.5
    if changes.pop("has_ledger", has_ledger):
        terms = ledgers.Terms(
            None, 1, 0, False, "", world, first=4, patience=2 * fragments, shelf=16 * fragments
        )
    setup = Setup(
        world=world,
        cells=tuple(rng.randint(3, 6) for _ in range(fragments)),
        quorum=rng.randint(1, world // 2 + 1),
        together=tuple(range(world)) if rng.random() < 0.7 else (),
        timeout_s=rng.choice((40.0, 60.0, 120.0)),
        is_lossy_up=rng.random() < 0.5,
        is_lossy_down=rng.random() < 0.5,
        terms=terms,
        keep=rng.randint(1, 2),
        every=rng.randint(2, 5),
        block=rng.randint(2, 3),
        has_direct=rng.random() < 0.5,
        overlap=rng.random() < 0.4,
        not_finite=0.05 if rng.random() < 0.3 else 0.0,
    )
    return replace(setup, **changes)  # type: ignore[arg-type]


def draw_faults(rng: random.Random) -> Faults:
    def some(chance: float, most: float) -> float:
        return rng.uniform(0, most) if rng.random() < chance else 0.0

    return Faults(
        fail_before=some(0.6, 0.05),
        fail_after=some(0.6, 0.05),
        land_late=some(0.4, 0.03),
        freeze=some(0.3, 0.004),
        freeze_write=some(0.5, 0.03),
        skewed_list=some(0.5, 0.5),
    )


class Schedule:
    """One life of a run."""

    def __init__(
        self, seed: int, processes: int = 3, least_processes: int = 1, **changes: object
    ) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        changes.setdefault("next_s", 8.0 if seed % 5 == 4 else 0.0)
        self.setup = draw_setup(rng, changes)
        self.world = World(seed)
        self.oracle = Oracle(self.setup)
        self.world.watch += [self._see, self.oracle.see]
        self.run_ = Run(self.world, self.setup, self.oracle)
        self.faults = draw_faults(rng)
        self.most_processes = max(rng.choice((1, 1, processes)), least_processes)
        self.least_processes = least_processes
        self.is_quiet = False
        self.away: set[int] = set()
        self.starting: set[int] = set()
        self.end_faults = rng.uniform(60, 260)
        for rank in range(7):
            self.run_.weights[rank] = rng.choice((1, 1, 2, 4))
            self.run_.slowness[rank] = rng.choice((1.0, 1.0, 1.0, rng.uniform(1, 4)))

    # -- Faults

    def _see(self, what: str, key: str, body: object) -> None:
        self.oracle.now = self.world.now
        if self.is_quiet or what not in ("put", "created"):
            return
        rng = self.rng
        if key.startswith(("upload/0", "part/")) and rng.random() < self.damage:
            delay = rng.choice((0.0, 0.0, rng.uniform(0, 3)))
            self.world.at(self.world.now + delay, lambda: self._damage_upload(key))
        if key.startswith(("mean/", "receipt/")) and rng.random() < self.damage / 4:
            self.world.count("means unreadable once")
            self.world.objects[key].damage = 1
        if key.startswith("checkpoint/") and rng.random() < 0.3:
            self.world.at(self.world.now + rng.uniform(0, 5), lambda: self._damage_checkpoint(key))

    def _damage_upload(self, key: str) -> None:
        stored = self.world.objects.get(key)
        if stored is None:
            return
        upload = "upload/" + "/".join(key.split("/")[1:3])
        for manifest in self.oracle.manifests.values():
            if manifest.plan == "direct" and any(m.upload == upload for m in manifest.members):
                return  # its uploads are what was committed
        how = self.rng.choice(("damaged", "damaged", "once", "deleted"))
        self.world.count(f"uploads {how}")
        if how == "deleted":
            del self.world.objects[key]
        else:
            stored.damage = 1 if how == "once" else -1

    def _damage_checkpoint(self, key: str) -> None:
        """Damage the newest checkpoint if the one before is sound."""
        canonical = [
            each for each, _ in self.world._list("checkpoint/", "") if self._is_canonical(each)
        ]
        if len(canonical) < 2 or canonical[-1] != key or self._is_damaged(canonical[-2]):
            return
        pieces = [key, *self._pieces(key)]
        target = self.rng.choice(pieces)
        if target in self.world.objects:
            self.world.count("checkpoints damaged")
            self.world.objects[target].damage = -1

    def _is_canonical(self, key: str) -> bool:
        parsed = objects.parse_checkpoint(key)
        return parsed is not None and self.oracle.canonical.get(parsed.round) == parsed.chain

    def _pieces(self, key: str) -> list[str]:
        meta = objects.read_checkpoint(key, self.world.objects[key].body)
        return [
            objects.piece_key(meta.round, meta.nonce, process) for process in range(meta.processes)
        ]

    def _is_damaged(self, key: str) -> bool:
        return any(
            each not in self.world.objects or self.world.objects[each].damage
            for each in (key, *self._pieces(key))
        )

    def _disturb(self) -> None:
        """One fault, and the next one later."""
        rng, world = self.rng, self.world
        if self.is_quiet:
            return
        alive = [replica for replica in self.run_.replicas if replica.is_alive]
        if alive:
            victim = rng.choice(alive)
            task = rng.choice(victim.group.tasks)
            chance = rng.random()
            if chance < 0.30:
                world.count("kills")
                world.count("kills of one of several", len(victim.group.tasks) > 1)
                world.kill(task)
            elif chance < 0.40:
                world.count("kills")
                victim.kill()
            elif chance < 0.60:
                world.freeze(task, rng.choice((rng.uniform(1, 20), rng.uniform(20, 400))))
            elif chance < 0.70:
                task.cut_until = world.now + rng.uniform(1, 100)
            elif chance < 0.80:
                world.count("second processes")
                self._start(victim.rank)
            elif chance < 0.87:
                world.count("leaves")
                victim.leave()
            elif chance < 0.90:
                world.count("all killed")
                for each in alive:
                    each.kill()
                if rng.random() < 0.6:
                    self._resize()
            elif chance < 0.92:
                world.count("all told to leave")
                for each in alive:
                    each.leave()
        world.at(world.now + rng.expovariate(1 / self.pause_s), self._disturb)

    def _resize(self) -> None:
        """The run is resumed in another world."""
        for replica in self.run_.replicas:
            replica.kill()
        setup = self.setup
        setup.world = self.rng.randint(2, 5)
        setup.version += self.rng.randint(0, 1)
        setup.quorum = min(setup.quorum, setup.world // 2 + 1)
        setup.together = tuple(range(setup.world)) if setup.together else ()
        setup.launch += "x"
        self.oracle.first_upload_at = None
        self.away.clear()

    # -- The launcher

    def _start(self, rank: int) -> Replica:
        processes = self.rng.randint(self.least_processes, self.most_processes)
        return self.run_.start(rank, processes, faults=QUIET if self.is_quiet else self.faults)

    def _launch(self) -> None:
        """Start every rank of which no replica is alive."""
        alive = {replica.rank for replica in self.run_.replicas if replica.is_alive}
        for rank in range(self.setup.world):
            if rank not in alive and rank not in self.away and rank not in self.starting:
                self.starting.add(rank)
                delay = self.rng.uniform(0, 5 if self.is_quiet else 40)
                self.world.at(self.world.now + delay, lambda rank=rank: self._start_late(rank))
        self.world.at(self.world.now + 5, self._launch)

    def _start_late(self, rank: int) -> None:
        self.starting.discard(rank)
        alive = {replica.rank for replica in self.run_.replicas if replica.is_alive}
        if rank not in alive and rank < self.setup.world and rank not in self.away:
            self._start(rank)

    # -- The whole

    def run(self) -> Counter[str]:
        try:
            self._run()
        except Violation as error:
            raise Violation(f"seed {self.seed}, {self.world.now:.1f} s: {error}") from error
        stats = Counter(self.oracle.stats)
        stats.update(self.world.counts)
        stats["schedules"] = 1
        return stats

    def _run(self) -> None:
        rng, world, setup = self.rng, self.world, self.setup
        self.damage = rng.choice((0.0, 0.05, 0.2))
        self.pause_s = rng.choice((5.0, 15.0, 40.0, 200.0))
        for rank in range(setup.world):
            if setup.together or rng.random() < 0.7 or rank == 0:
                self._start(rank)
        self._launch()
        world.at(rng.uniform(0, 30), self._disturb)
        world.run(self.end_faults)
        self._calm()
        needed = 3
        if rng.random() < 0.15:
            needed = 4 * setup.every + setup.keep + 6
        for _ in range(needed):
            frontier = self._wait_for_round()
        if needed > 3:
            # A write that landed late is swept with the next checkpoint.
            settled = world.now - 150
            old = [key for key, stored in world.objects.items() if stored.time < settled]
            self.oracle.check_garbage(old, frontier)
        self._check_members()
        self._check_leavers()

    def _check_leavers(self) -> None:
        """O14: where one process was told to leave, all leave."""
        for replica in self.run_.replicas:
            told = [task.told_at for task in replica.group.tasks if task.is_leaving]
            if told and replica.is_alive:
                self.world.run(
                    max(*told, self.quiet_at) + QUIET_ROUND_S, lambda r=replica: not r.is_alive
                )
                if replica.is_alive:
                    self.oracle.fail("O14", f"rank {replica.rank} was told to leave and stays")

    def _wait_for_round(self) -> int:
        rounds, world = self.oracle.canonical, self.world
        frontier = max(rounds)
        world.run(world.now + QUIET_ROUND_S, lambda: max(rounds) > frontier)
        if max(rounds) == frontier:
            self.oracle.fail("O9", f"no round after {frontier} in {QUIET_ROUND_S} s of quiet")
        return max(rounds)

    def _calm(self) -> None:
        """No more faults. In half of the ends one rank stays dead."""
        rng, setup = self.rng, self.setup
        self.is_quiet = True
        self.quiet_at = self.world.now
        for replica in self.run_.replicas:
            for task in replica.group.tasks:
                task.faults = QUIET
                task.cut_until = 0.0
                if rng.random() < 0.7:
                    task.frozen_until = min(task.frozen_until, self.world.now)
        newest: dict[int, Replica] = {}
        for replica in self.run_.replicas:
            if replica.is_alive:
                if replica.rank in newest:
                    newest[replica.rank].kill()
                newest[replica.rank] = replica
        quorum = setup.quorum
        if setup.together and len(self.oracle.canonical) == 1:
            quorum = max(quorum, setup.world // 2 + 1)  # of the first round
        if rng.random() < 0.5 and setup.world - 1 >= quorum:
            dead = rng.randrange(setup.world)
            self.away.add(dead)
            if dead in newest:
                newest[dead].kill()

    def _check_members(self) -> None:
        """O12: whoever lives comes to be a member again."""
        world, oracle = self.world, self.oracle
        since = world.now
        want = [rank for rank in range(self.setup.world) if rank not in self.away]

        def is_in() -> bool:
            newest = oracle.canonical[max(oracle.canonical)]
            manifest = oracle.commits[newest][0]
            ranks = {member.rank for member in manifest.members}
            return set(want) <= ranks

        world.run(since + 3 * QUIET_ROUND_S, is_in)
        if not is_in():
            newest = oracle.commits[oracle.canonical[max(oracle.canonical)]][0]
            ranks = [member.rank for member in newest.members]
            oracle.fail("O12", f"round {newest.round} has {ranks} of {want}")


def run_schedule(seed: int, **changes: object) -> Counter[str]:
    return Schedule(seed, **changes).run()  # type: ignore[arg-type]


def run_schedules(first: int, count: int, **changes: object) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in range(first, first + count):
        total.update(run_schedule(seed, **changes))
    return total
