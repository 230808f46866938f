"""One seeded schedule: a training's life with users and faults, and what must always hold."""

from __future__ import annotations

import random
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from atoll.controller.reconcile import Reconciler
from atoll.core.clock import Clock, ClockMark
from atoll.core.errors import Conflict, NotFound, Temporary
from atoll.core.executors import executor_problem
from atoll.core.phase import EDGES, Phase
from atoll.core.plan import STALE_S
from atoll.core.spec import TrainingSpec, WorldSize
from atoll.core.status import AttemptStatus, Event, Status, Training, usage
from atoll.store.sqlite import MemoryStore
from tests.sim.world import Crash, Faults, Machine, SimExecutor, has_exit

T = TypeVar("T")
FAULTS_UNTIL_S = 40.0
CALM_FOR_S = 600.0


def run_now(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never has to wait."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the coroutine waited for something")


class FaultyStore:
    """The real store, with a crash or a user's write at any step."""

    def __init__(self, store: MemoryStore, faults: Faults) -> None:
        self._store = store
        self._faults = faults

    async def get(self, key: tuple[str, str]) -> Training:
        with self._faults.step("get"):
            return await self._store.get(key)

    async def update_status(
        self,
        training: Training,
        status: Status,
        events: Sequence[Event] = (),
        attempts: Sequence[AttemptStatus] = (),
    ) -> Training:
        with self._faults.step("update_status"):
            return await self._store.update_status(training, status, events, attempts)

    async def remove(self, training: Training) -> None:
        with self._faults.step("remove"):
            await self._store.remove(training)


class Schedule:
    def __init__(self, seed: int, store: MemoryStore) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.now = 1000.0
        self.trace: list[str] = []
        self._wall_ahead_s = 0.0  # of the clock that the control plane reads: it is set at any time
        # The executor's own clock is steady, and may be another machine's.
        self._there_ahead_s = self.random.choice([0.0, 0.0, -500.0, 3600.0])
        self._mark = self._clock().mark
        self._over_since: float | None = None
        self._store = store
        spec = self._spec()
        chances = self.random.choice([(0.0, 0.0, 0.0), (0.1, 0.05, 0.3), (0.3, 0.2, 0.5)])
        self._faults = Faults(random.Random(seed + 1), *chances, on_step=self._between_steps)
        self.machine = Machine(
            random.Random(seed + 2),
            spec.max_restarts,
            fail_chance=self.random.choice([0.0, 0.1, 0.6]),
            has_gate=self.random.random() < 0.5,
            has_exit_finalizer=self.random.random() < 0.5,
        )
        self._exits: set[tuple[int, int]] = set()  # that were ever stored
        training = Training(namespace="sim", uid=f"uid-{seed}", spec=spec, created_at=self.wall)
        self.key = training.key
        self._seen_last = run_now(store.create(training))
        self._is_removed = self._is_deleted = False
        self._wake_at: float | None = self.now
        self._reconciler = self._controller()

    @property
    def wall(self) -> float:
        return self.now + self._wall_ahead_s

    @property
    def there(self) -> float:
        """The time by the executor's clock."""
        return self.now + self._there_ahead_s

    def _clock(self, mark: ClockMark | None = None) -> Clock:
        return Clock(lambda: self.wall, lambda: self.now, boot="one", mark=mark)

    def _spec(self) -> TrainingSpec:
        pick = self.random
        low = pick.randint(1, 4)
        target = low + pick.randint(0, 3)
        return TrainingSpec(
            name=f"t{self.seed}",
            command=["true"],
            world_size=WorldSize(min=low, target=target, max=target + pick.randint(0, 3)),
            max_restarts=pick.choice([0, 0, 1, 3]),
            ttl_seconds=pick.choice([None, None, 0, 5]),
            deadline_s=pick.choice([None, None, None, 10.0]),
        )

    def _controller(self) -> Reconciler:
        executor = SimExecutor(self.machine, lambda: self.there, self._faults, self._stored)
        store: Any = FaultyStore(self._store, self._faults)
        executors: Any = {"local": executor}
        self._time = self._clock(self._mark)
        return Reconciler(store, executors, self._time)

    def _stored(self) -> Status:
        return run_now(self._store.get(self.key)).status

    def run(self) -> None:
        end = self.now + FAULTS_UNTIL_S
        while self.now < end:
            self._advance_to(min(self._next_time(), end))
            if not self._faults.is_calm:
                self._something_happens()
            self._pass()
        self._faults.is_calm = True
        self._wake_at = self.now  # a controller that starts reads everything
        quiet = self.now + CALM_FOR_S
        while self.now < quiet:
            self._pass()
            is_idle = self._wake_at is None and not self.machine.is_touched
            if is_idle and self.machine.next_time(self.there) is None:
                break
            self._advance_to(min(self._next_time(), quiet))
        self._check_end()

    def _next_time(self) -> float:
        times = (
            [self.now + self.random.choice([0.05, 0.5, 3.0])] if not self._faults.is_calm else []
        )
        if self._wake_at is not None:
            times.append(self._wake_at)
        if (machine_at := self.machine.next_time(self.there)) is not None:
            times.append(machine_at - self._there_ahead_s + 1e-7)  # rounded, it is not before
        return max(min(times, default=self.now + 1.0), self.now)

    def _advance_to(self, at: float) -> None:
        self.now = max(at, self.now)
        if self.machine.advance(self.there):
            self._wake_at = self.now

    def _pass(self) -> None:
        if self._wake_at is None or self._wake_at > self.now:
            return
        self._wake_at = None
        try:
            again = run_now(self._reconciler.reconcile(self.key))
            self._note(f"pass: again in {again}")
            self._check_ready(again)
            if again is not None:
                self._wake_at = self.now + (max(again, 1e-6) if again else 0.0)
        except Temporary as error:
            self._note(f"pass: {error}")
            self._wake_at = self.now + 0.1
        except Crash as crash:
            self._note(f"controller killed {crash}")
            self._reconciler = self._controller()
            self._wake_at = self.now
        self._check()

    def _something_happens(self) -> None:
        dice = self.random.random()
        if self.random.random() < 0.05:
            step = self.random.choice([-3600.0, 7200.0, 1800.0, -5.0])
            self._note(f"clock set by {step:g} s")
            self._wall_ahead_s += step
        if dice < 0.06:
            self._user_scales()
        elif dice < 0.075:
            self._user("cancel", lambda t: msgspec.structs.replace(t.spec, cancel=True))
        elif dice < 0.085:
            self._user("delete", None)
        elif dice < 0.115:
            self._note("supervisor killed")
            self.machine.supervisor_dies(self.there)
            self._wake_at = self.now
        elif dice < 0.12 and not self.machine.is_released:
            self._note("host lost")
            self.machine.is_wiped(self.there)
            self._wake_at = self.now

    def _between_steps(self, name: str) -> None:
        """Users write while the controller is in the middle of a pass."""
        if not self._faults.is_calm and self.random.random() < 0.02:
            self._user_scales()

    def _user_scales(self) -> None:
        def change(training: Training) -> TrainingSpec:
            world = training.spec.world_size
            target = self.random.randint(world.min, world.max)
            size = msgspec.structs.replace(world, target=target)
            return msgspec.structs.replace(training.spec, world_size=size)

        self._user("scale", change)

    def _user(self, what: str, change: Any) -> None:
        try:
            training = run_now(self._store.get(self.key))
        except NotFound:
            return
        if training.status.phase.is_terminal and what != "delete":
            return  # refused at the door
        if change is None:
            after = msgspec.structs.replace(training, deletion_requested_at=self.wall)
        else:
            after = msgspec.structs.replace(training, spec=change(training))
        try:
            run_now(self._store.update_spec(after))
        except Conflict:
            return
        self._is_deleted = self._is_deleted or what == "delete"
        self._note(f"user: {what} {after.spec.world_size.target}")
        self._wake_at = self.now

    def _note(self, text: str) -> None:
        self.trace.append(f"{self.now - 1000:8.3f} {text}")

    # What must always hold

    def _check(self) -> None:
        starts = [(run.rank, run.attempt) for run in self.machine.runs if not run.is_forgotten]
        assert len(starts) == len(set(starts)), "an attempt was started twice"
        for run in self.machine.runs:
            assert run.restarts <= self.machine.spec_restarts, "restarted beyond the budget"
        try:
            training = run_now(self._store.get(self.key))
        except NotFound:
            self._is_removed = True
            last = self._seen_last
            if not self._is_deleted and self._over_since is not None:
                ttl_s = last.spec.ttl_seconds
                assert ttl_s is not None, "removed, and nobody asked for it"
                assert self.now >= self._over_since + ttl_s - 1e-6, "removed before its time"
            assert not self.machine.alive(), "the record is gone and a rank lives"
            return
        old, new = self._seen_last.status, training.status
        self._seen_last = training
        self._exits |= {
            (run.rank, run.attempt)
            for run in self.machine.runs
            if run.ended_at is not None and has_exit(new, run.rank, run.attempt)
        }
        self._check_gate(training)
        if new != old:
            self._note(f"status: {new.phase} {new.reason} {new.message} {new.world}")
        assert new.phase == old.phase or new.phase in EDGES[old.phase], (old.phase, new.phase)
        assert old.observed_generation <= new.observed_generation <= training.generation
        if old.phase.is_terminal:
            assert (new.phase, new.rank_exits, new.root_cause, new.world) == (
                old.phase,
                old.rank_exits,
                old.root_cause,
                old.world,
            ), "a verdict changed"
        elif new.phase.is_terminal:
            self._over_since = self.now
            self._check_verdict(training)
        else:
            assert not new.rank_exits
        if new.phase.is_terminal:
            assert not self.machine.alive(), "a finished training has a living rank"

    def _check_ready(self, again: float | None) -> None:
        """A rank that was told to stop is not ready, as soon as an executor must have said so."""
        told = {rank for rank, at in self.machine.told_at.items() if at < self.there - STALE_S}
        if again == 0.0 or not told:
            return  # the pass was overtaken
        training = run_now(self._store.get(self.key))
        here = {r.rank for r in training.status.ranks if r.is_alive or r.phase == "Succeeded"}
        assert told <= here, "a rank that is being stopped is not shown"
        wanted = {rank for rank in here - told if rank < training.spec.world_size.target}
        ready = training.status.world.ready
        assert ready <= len(wanted), "a rank that was told to stop counts as ready"
        if max(told) >= training.spec.world_size.target:
            assert training.has_surplus, "the wait would return while a rank above the target lives"

    def _check_gate(self, training: Training) -> None:
        """One gate, one clock: ranks run once it is open, and their time counts from then."""
        status, machine = training.status, self.machine
        opened_at = status.gate_opened_at
        if machine.has_gate:
            assert opened_at is None or opened_at in machine.openings, "opened at another time"
            assert len(machine.openings) <= 1 + machine.wipes, "opened twice"
            first = min(machine.openings, default=float("inf"))
            assert all(run.started_at >= first for run in machine.runs), "started at a shut gate"
        (admitted,) = [c for c in status.conditions if c.type == "Admitted"] or [None]
        assert admitted is None or (admitted.status == "True") == (opened_at is not None)
        deadline_s = training.spec.deadline_s
        if status.failing == "DeadlineExceeded" and deadline_s is not None:
            let_go_at = min(machine.openings or [run.started_at for run in machine.runs])
            assert self.there >= let_go_at + deadline_s - 0.002, "failed before its deadline"

    def _check_verdict(self, training: Training) -> None:
        status, runs = training.status, self.machine.runs
        last = {run.rank: run for run in runs}
        if self.machine.has_exit_finalizer:
            kept = {(run.rank, run.attempt) for run in runs if not run.is_forgotten}
            assert kept <= self._exits, "an exit was lost"
        recorded = {e.rank: e for e in status.rank_exits}
        assert len(recorded) == len(status.rank_exits), "a rank has two exit records"
        seen = {rank for rank, run in last.items() if not run.is_forgotten}
        assert seen <= set(recorded) <= set(last), "exits of every rank that ran, and no other"
        for rank, record in recorded.items():
            if record.exit_code is not None:
                codes = {run.shown_code for run in runs if run.rank == rank}
                assert record.exit_code in codes, "an exit code that never was"
            if rank in seen:
                assert record.exit_code == last[rank].shown_code, "not the last exit"
        world = training.spec.world_size
        if status.phase is Phase.SUCCEEDED:
            good = [r for r in recorded.values() if r.exit_code == 0 and r.rank < world.target]
            assert len(good) >= world.min
            assert status.world.ready == len(good)
        if status.phase is Phase.FAILED and status.failing == "RankFailed":
            assert status.root_cause is not None
            assert status.root_cause.exit_code != 0
            assert not status.root_cause.collateral
        if not any(run.is_forgotten for run in runs):
            truth = sum((run.ended_at or 0.0) - run.started_at for run in runs)
            error_s = abs(usage(training, self._time()).rank_seconds - truth)
            assert error_s <= 0.002 * len(runs), "metering is off"  # times are in milliseconds

    def _check_end(self) -> None:
        """Once it is calm, the world is as asked, or the training is over and cleared away."""
        self._check()
        if self._is_removed:
            return
        training = self._seen_last
        status = training.status
        assert status.observed_generation == training.generation
        assert not executor_problem(training), "it answers, and the status says that it does not"
        if status.phase.is_terminal:
            assert status.is_released
            assert training.deletion_requested_at is None
            assert training.spec.ttl_seconds is None
            return
        raise AssertionError(f"neither over nor at its size: {status.phase} {status.message}")


def run_schedules(first: int, count: int) -> None:
    """Raises with the seed and the whole story of the first schedule that fails."""
    for seed in range(first, first + count):
        schedule = Schedule(seed, MemoryStore())
        try:
            schedule.run()
        except BaseException as error:
            story = "\n".join(schedule.trace[-60:])
            raise AssertionError(
                f"seed {seed} fails: {error}\n{story}\n"
                f"replay: ATOLL_SIM_SEED={seed} .venv/bin/python -m pytest tests/sim"
            ) from error
