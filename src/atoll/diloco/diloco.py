"""DiLoCo: replicas train alone for some steps, then take one step together, through a store.

Rank, world and store come from arguments or a rank's environment. A process without either is a
world of one and waits for nobody.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from atoll.agent.process import mark_left
from atoll.core.checks import check_number
from atoll.core.errors import BackendError, DistributedError, ValidationError
from atoll.diloco import export
from atoll.diloco.checks import Checks
from atoll.diloco.codecs import get_codecs
from atoll.diloco.data import ranges
from atoll.diloco.data.lease import DataLease
from atoll.diloco.data.ranges import Ranges
from atoll.diloco.data.sampler import DataSampler, OpenAt, read_terms, refuse_other_data
from atoll.diloco.flight import Flight, FragmentWork, Mark, check_ends, merge_offers, weigh
from atoll.diloco.goal import RunGoal, go_on
from atoll.diloco.group import find_group, from_leader, gather
from atoll.diloco.history import DataReport, make_data_report
from atoll.diloco.inner import OptimizerWatch, RunSchedule, check_optimizers, unwrap_optimizers
from atoll.diloco.leave import LeaveRequest
from atoll.diloco.model import ReplicaModel, split
from atoll.diloco.outer import Floats, OuterRule
from atoll.diloco.own_state import Extras, OwnState
from atoll.diloco.parameters import check_module
from atoll.diloco.presets import OuterPreset, describe, read_settings
from atoll.diloco.publish import RoundWeights, V, publish
from atoll.diloco.replica_config import find_replica_config, read_run_id, read_start, refuse_unlike
from atoll.diloco.reports import RoundReport, RoundReports, announce, make_report, send_round
from atoll.diloco.round.effects import DROPPED, LATE, LEFT, MEMBER, Offer, RoundResult, RunState
from atoll.diloco.run_lock import lock_run
from atoll.diloco.setup import RunSetup, check_limits
from atoll.diloco.times import PeriodClock
from atoll.objectstore import ObjectStore
from atoll.objectstore.client import PATIENCE_S

if TYPE_CHECKING:
    import torch

log = logging.getLogger("atoll.diloco")

THREADS = 8  # requests in flight: enough to fill a link of some Gbit/s


class DiLoCo:
    """The outer loop around a model and its inner optimiser; `optimizer.step()` drives it.

        with DiLoCo(model, inner_optimizer, sync_every=100) as diloco:
            while diloco.round < 50:
                loss(model).backward()
                inner_optimizer.step()  # every 100th ends a round, at first more
                inner_optimizer.zero_grad()

    Every `sync_every` steps, or seconds (`"60s"`), the replicas average their pseudo-gradients and
    take one step of Nesterov momentum. With `fragments`, one fragment of the model synchronises
    every `sync_every / fragments` steps instead; with `overlap_steps`, it is uploaded that many
    steps before its result is needed, and training continues meanwhile. `mix` is how much of its
    own values a replica keeps when the result arrives: 0 takes the global ones.

    All replicas hold the same bits in `global_parameters()` after the same round. A replica that
    starts later, or again, loads the newest checkpoint from the store and the rounds after it.
    Only parameters with `requires_grad` are synchronised; buffers stay local.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        sync_every: int | str | Sequence[tuple[int, int]] | None = None,
        warmup: str | None = None,
        preset: str | OuterPreset | None = None,
        outer_lr: float | Sequence[tuple[int, float]] | None = None,
        outer_momentum: float | Sequence[tuple[int, float]] | None = None,
        outer: str | OuterRule | None = None,
        fragments: int | None = None,
        overlap_steps: int | None = None,
        mix: float | str | None = None,
        codec: str | None = None,
        down_codec: str | None = None,
        uri: str | ObjectStore | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        min_replicas: int | None = None,
        run_id: str | None = None,
        timeout: float = 600.0,
        grace_s: float | None = None,
        checkpoint_every: int = 5,
        on_round: Callable[[RoundReport], None] | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        device_mesh: torch.distributed.device_mesh.DeviceMesh | None = None,
        scheduler: Any = None,
    ) -> None:
        """`inner_optimizer`: one, or several; a step counts when all of them have stepped.
        `sync_every`: steps, (step of the run, steps) pairs, or seconds as "60s". `warmup`: "ramp"
        begins a run with short periods that double, and plain averages; "none".
        `preset`: a published method by its name (see `atoll.diloco.presets`); what else is given
        wins over it. `outer_lr` and `outer_momentum` are numbers or (round, value) pairs, `outer`
        is the rule of the outer step. A run in the store keeps its own where none of them is given.
        `codec` is for what a replica uploads, `down_codec` (see `CODECS`) for the means it reads.
        `process_group` or `device_mesh`: the processes that are this replica together, if not all
        of the default group. Then all of them make a DiLoCo, and step, at the same time.
        `scheduler`, one of `torch.optim.lr_scheduler`, follows the step of the run from here on:
        its own `step()` does nothing.
        """
        check_module(model)
        check_limits(timeout, grace_s, checkpoint_every)
        self._leave = LeaveRequest(lambda: self._rounds.request_leave())
        self._reports = RoundReports(on_round)
        settings = read_settings(
            preset,
            sum(value.requires_grad for value in model.parameters()),
            sync_every=sync_every,
            warmup=warmup,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer=outer,
            fragments=fragments,
            overlap_steps=overlap_steps,
            mix=mix,
            codec=codec,
            down_codec=down_codec,
        )
        codecs = get_codecs(settings.codec, settings.down_codec)
        # A round that waits for others must not look like a process that is gone.
        group_s = 3 * timeout + 300
        self._group = group = find_group(process_group, device_mesh, group_s, rank)
        is_many = group.processes > 1

        def configure() -> dict[str, Any]:
            self.config = find_replica_config(
                uri, rank, world_size, min_replicas, is_one_of_many=is_many
            )
            self._run = read_run_id(run_id)
            known = {**self.config._asdict(), "uri": str(self.config.uri), "run_id": self._run}
            return known | settings.by_process

        refuse_unlike(gather(group, configure))
        self._optimizers = unwrap_optimizers(inner_optimizer)
        self._schedule = None if scheduler is None else RunSchedule(scheduler, self._optimizers)
        self._model = ReplicaModel(model, group)
        odd = check_optimizers(self._optimizers, self._model.parameters)
        self.fragments = split(self._model.shapes, settings.fragments)
        self._model.check_equal()
        self._is_checked = False
        self._settings, self._mix, self._checkpoint_every = settings, settings.mix, checkpoint_every
        self._is_retained = settings.is_retained and settings.overlap_steps > 0
        self._start = read_start(self.config.world_size, min_replicas, grace_s)
        uri, patience_s = self.config.uri, min(PATIENCE_S, timeout)
        self._store = None if uri is None else ObjectStore.open(uri, patience_s=patience_s)
        self._lock = lock_run(self._store, self._run, self.config.rank, group)
        self.steps = self._step = 0  # of this process, and of the period
        self._counted = 0.0
        self._work = [FragmentWork() for _ in self.fragments]
        self._reported = Mark()  # what of this process's training the clock of the run has
        self._goal = RunGoal()
        self._flight: Flight | None = None
        self._unsettled: Flight | None = None  # its call failed: its outcome is not known
        self._uploaded: Floats | None = None  # the model as it was uploaded, where `mix` is "keep"
        self._has_left = self._is_closed = False
        self._lease: DataLease | None = None
        self._sampler: DataSampler | None = None
        self._clock = PeriodClock()
        # A thread is made when it is needed: none without a store.
        self._pool = ThreadPoolExecutor(THREADS, f"diloco-{self.config.rank}")
        self._setup = RunSetup(
            self.config, self._run, group, self._store, self.fragments, *codecs, settings.outer
        )
        self._rounds = self._setup.make_rounds(
            self._model,
            self._pool,
            self._start,
            is_over=lambda state: self._goal.is_over(state, len(self.fragments)),
            timeout_s=timeout,
            grace_s=grace_s,
            group_s=group_s,
            checkpoint_every=checkpoint_every,
        )
        self._state = RunState()
        # The parameters all agree on: the newest in the store, or the first replica's.
        self._rounds.open()
        self._take_global()
        self._plan = self._setup.plan_periods(settings, self._state)
        self._own = None
        if self._store is not None:
            self._own = OwnState(self._store, self._run, self.config.rank, group, self._optimizers)
        is_group_chosen = process_group is not None or device_mesh is not None
        self._checks = Checks(model, self._optimizers, group, is_group_chosen=is_group_chosen)
        if self._own is not None and self.round:
            odd += self._own.restore(self.round, keeps_groups=scheduler is not None)
        for messages in odd:
            self._checks.warn(messages)
        self._follow_schedule()
        self._watch = OptimizerWatch(self._optimizers, self._model.parameters, self._after_step)
        if self._store is not None:
            self._leave.listen()
        if self.round and not self._group.process:
            announce(self._run, self.step, self.round, self.config.rank)

    def _take_global(self) -> None:
        """The model is the global one, and nothing is owed to later rounds."""
        self._rounds.values.has_dropped = False
        self._state = self._rounds.state
        for fragment in self.fragments:
            self._model.apply(fragment)
        now = Mark(self._counted, self.steps)
        self._reported = now
        self._work = [FragmentWork(now) for _ in self.fragments]
        self._unsettled = None
        if self._lease is not None:
            if fresh := ranges.size(self._lease.fresh):
                log.warning("the work on %d positions was discarded", fresh)
            self._lease.discard(self.steps)
        self._plan_data()

    def __enter__(self) -> DiLoCo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None = None, *_: object
    ) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._watch.close()
        self._checks.close()
        if self._schedule is not None:
            self._schedule.close()
        try:
            if kind is None:
                self._end()
            else:
                self._abandon(error)
        finally:
            self._leave.close()
            self._pool.shutdown(wait=False)
            if self._lock is not None:
                self._lock.close()

    def close(self) -> None:
        """Finish the round on its way, if any; then leave the optimiser and close the store.

        Raises DistributedError if another replica of the launch is done with other parameters.
        """
        self.__exit__(None)

    def _end(self) -> None:
        self.receive()
        if any(self._group.gather(self._leave.is_requested)) and not self._has_left:
            self._leave.make()
            self._drain()
        if self._has_left:
            return
        steps, self._step = self._step, 0
        if steps:
            self._checks.warn(
                f"steps after round {self.round} are not synchronised ({steps}): only this process "
                "has them. Train whole rounds, or end with sync()"
            )
        ends = self._rounds.finish()
        before, self._state = self._state.round, self._rounds.state
        if self._state.round > before:  # rounds that went on without this replica
            for fragment in self.fragments:
                self._model.apply(fragment)
        self._keep_own()
        check_ends(ends, self._state, len(self.fragments))

    def _abandon(self, error: BaseException | None) -> None:
        """The round is left to the others: they finish it without this replica.

        Nothing here waits for the other processes of the replica: they may be anywhere. They fail
        in their next collective.
        """
        if not (self._has_left or isinstance(error, BackendError) or self._group.process):
            self._setup.mark_failed(self._start.launch, self._state)
        self._rounds.abandon()
        self._group.close()

    def _after_step(self) -> None:
        if self._has_left:
            self._leave.exit_soon()
            return
        self.steps += 1
        if self._sampler is not None:
            self._sampler.after_step(self.steps)
        try:
            self._drive()
        finally:
            self._follow_schedule()
        self._leave_if_requested()

    def _drive(self) -> None:
        step = self._step + 1
        self._plan.advance(step, self._state, time.monotonic())
        is_over = step == self._plan.end_at
        # Set before the round, so that a round that fails is followed by a period like any other.
        self._step = 0 if is_over else step
        if step == self._plan.upload_at:
            self._begin_round()
        if is_over:
            self.receive()
        if (goal := self._goal.steps) is not None and self.step >= goal > self.agreed_steps:
            self.end_period()

    def _begin_round(self) -> None:
        """Take the pseudo-gradient out of the model, and bring it to the next round."""
        self.receive()
        times = self._clock.take()
        began = time.monotonic()
        self._check_changes()
        if self._sampler is not None:
            self._sampler.gather()
        elif self._state.ledger is not None:
            raise ValidationError(
                "data", "of this replica", "the run shares its data: call diloco.data(…)"
            )
        before = self._state.round
        self._settle_open()
        self._be_honest()
        if self._end_with_others(before):
            return
        if self._group.processes > 1 and any(self._group.gather(self._leave.is_requested)):
            self._leave.make()  # the processes of a replica go together
            self._drain()
            return
        at = self._rounds.round % len(self.fragments)
        offer, mark = self._make_offer(at)
        is_hidden = self._plan.overlap_of(self._state.round) > 0
        mix = 0.0 if self._plan.is_ramp(self._state.round) else self._mix
        flight = Flight(at, offer, mark, self._setup.traffic, is_hidden, mix, times)
        flight.start(lambda: self._rounds.run(offer))
        flight.blocked_s = self._clock.block_since(began)
        self._flight = flight

    def _make_offer(self, at: int) -> tuple[Offer, Mark]:
        """Add the pseudo-gradient of a fragment to its row, and say what it is."""
        fragment = self.fragments[at]
        if not self._is_checked:
            self._checks.before_first_round()
            self._model.check_equal()
            self._is_checked = True
        if self._is_retained and not self._plan.is_ramp(self._state.round):
            self._uploaded = self._model.take_copy(fragment, self._uploaded)
        mark = Mark(self._counted, self.steps)
        weight, tokens, steps = weigh(mark, self._work[at], self._reported, self._group)
        probe = self._checks.begin(fragment)
        if self.steps > self._work[at].uploaded.steps:
            self._model.add_pseudo_gradient(fragment, probe.take)
        sums = self._checks.describe(probe, weight)
        is_finite = "bad" not in sums
        if "moved" in sums:  # in its first rounds a replica tells its settings, too
            terms = None if self._lease is None else self._lease.ledger.terms
            sums = {**self._setup.describe(terms), **sums}
        claim, want, end = self._claim(at, is_finite=is_finite)
        next_s = self._plan.periods.seconds_at(self._state.round + 1)
        offer = Offer(weight, steps, tokens, claim, want, end, sums, is_finite, next_s)
        return offer, mark

    def receive(self) -> None:
        """Wait for the round on its way, if there is one, and take its result into the model."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        began = time.monotonic()
        work = self._work[flight.fragment]
        # Whatever became of it, this training is in the row or in the parameters.
        work.uploaded = flight.mark
        try:
            result, started, ended = flight.job.result()
        except BaseException:
            if not flight.job.done():  # only the wait was interrupted
                self._flight = flight
                raise
            # The model goes on from the values that are there: what it trained lies in the row, and
            # counts once whichever way the round is settled.
            self._unsettled = flight
            work.late = flight.offer.weight
            self._apply_result(flight, LATE)
            raise
        before = self.round
        self._settle(flight, result)
        if self._has_left:
            return
        if self.round > before and (self.round == 1 or not self.round % self._checkpoint_every):
            self._keep_own()
        manifest = self._state.last
        if result.fate == DROPPED or manifest is None:
            return
        self._checks.learn(self.config.rank, self.fragments[flight.fragment], manifest)
        used = self._setup.traffic.since(flight.before)
        hidden_s = max(0.0, min(ended, began) - started) if flight.is_background else 0.0
        blocked_s = flight.blocked_s + self._clock.block_since(began)
        outer = self._setup.outer
        report = make_report(manifest, flight.offer, used, hidden_s, blocked_s, outer, flight.times)
        self._reports.add(report)
        untold = [] if self._group.process else self._checks.take_untold()
        send_round(report, manifest, self._run, self.config.rank, self._group.process, untold)

    def _settle(self, flight: Flight, result: RoundResult) -> None:
        """What became of an offer."""
        self._state = self._rounds.state
        if result.fate == LEFT:
            self._unsettled = flight
            if len(self.fragments) == 1:
                self._depart()
            return
        lease, work = self._lease, self._work[flight.fragment]
        if lease is not None and self._state.ledger is not None:
            lease.ledger = self._state.ledger
        is_member = result.fate == MEMBER
        self._plan.settle(self._state)
        if is_member and lease is not None:
            lease.was_member(flight.fragment, flight.offer.claim)
        self._reported = Mark(
            flight.mark.counted if is_member else self._reported.counted, flight.mark.steps
        )
        if result.fate == DROPPED or self._rounds.values.has_dropped:
            self._take_global()
            if not flight.offer.is_finite:
                self._checks.heal()
            return
        work.late = 0.0 if is_member else flight.offer.weight
        self._apply_result(flight, result.fate)
        self._be_honest()
        self._plan_data()

    def _apply_result(self, flight: Flight, fate: str) -> None:
        """Take the global values into the model; what a late row holds must not stay in it."""
        fragment = self.fragments[flight.fragment]
        mix = flight.mix if fate == MEMBER else 0.0
        if self._uploaded is not None:
            self._model.move_on(fragment, self._uploaded)
        else:
            self._model.apply(fragment, mix)
        if self._lease is None:
            return
        if fate == LATE:
            self._lease.was_late(flight.fragment, flight.offer.claim)
        if not mix and self._uploaded is None:
            self._lease.empty(flight.fragment, self.steps)

    def _settle_open(self) -> None:
        """Settle what an earlier call left open, and take the rounds that went on without us.

        The model stays as far from the global values as it was.
        """
        if not self._rounds.is_behind():
            return
        restore = self._model.keep_distance(self.fragments)
        flight, self._unsettled = self._unsettled, None
        try:
            result = self._rounds.prepare()
        except BaseException:
            self._unsettled = flight
            restore()
            raise
        before, self._state = self._state, self._rounds.state
        if self._lease is not None and self._state.ledger is not None:
            self._lease.ledger = self._state.ledger
        is_dropped = self._rounds.values.has_dropped or (result and result.fate == DROPPED)
        if is_dropped:
            self._take_global()
            return
        restore()
        if flight is not None and result is not None and result.fate == MEMBER:
            self._work[flight.fragment].late = 0.0
            self._reported = Mark(
                max(self._reported.counted, flight.mark.counted), self._reported.steps
            )
            if self._lease is not None:
                self._lease.was_member(flight.fragment, flight.offer.claim)
        if flight is not None and self._state.round > before.round:
            # Its round has gone by, with these steps or with those of others beside them.
            steps = max(self._reported.steps, flight.mark.steps)
            self._reported = self._reported._replace(steps=steps)
        self._plan_data()

    def _end_with_others(self, before: int) -> bool:
        """Whether the others have ended since round `before`: one more would be without them.

        Behind the end all may call `sync()`: whoever is late for that goes by who is done.
        """
        state = self._state
        if state.is_current or not self._goal.is_over(state, len(self.fragments)):
            return False
        if state.round == before and all(
            end.chain != state.chain for end in self._rounds.find_ends()
        ):
            return False
        if self.steps > self._reported.steps:
            log.warning("the run ended with round %d: later steps are in no round", self.round)
        self._step = 0
        self._rounds.values.drop()
        self._take_global()
        return True

    def _check_changes(self) -> None:
        """What changed since this was made is taken in, or refused by name."""
        change = self._model.find_change()
        if change:
            raise ValidationError(
                "model",
                change,
                "expected the parameters that DiLoCo was made with: make it once the model is as "
                "it trains; another model needs another run_id",
            )
        for messages in self._watch.find_changes():
            self._checks.warn(messages)

    def end_period(self, *, is_last: bool = False) -> None:
        """Run a round now, with what was trained since the last one.

        `is_last`: the replica uploads what it has of every fragment, gives back the data that it
        holds, and leaves.
        """
        self._check_open()
        if self._has_left:
            self._leave.exit_soon()
            return
        self.receive()
        self._step = 0
        if is_last:
            self._leave.make()
            self._drain()
            return
        if not self._leave_if_requested():
            self._begin_round()
            self.receive()
            self._leave_if_requested()

    def _check_open(self) -> None:
        if self._is_closed:
            raise DistributedError("this DiLoCo is closed: its optimiser's steps are in no round")

    def sync(self) -> None:
        """Run a round of every fragment, with what was trained since the last one.

        All replicas must call it, for example if a training does not end with a whole round.
        """
        for _ in self.fragments:
            if not self._has_left:
                self.end_period()

    def count(self, amount: float) -> None:
        """Add `amount` to the tokens, or samples, that this process has trained on.

        The weight of a replica in a round is what its processes counted since the last one, or its
        steps if they never count. All replicas must count the same thing.
        """
        check_number("amount", amount, 0, 1e18)
        self._counted += amount

    # -- Leaving --------------------------------------------------------------------------------

    @property
    def leaving(self) -> bool:
        """Whether this replica was asked to leave, or has left.

        Its program may end now, or be ended by one of its next steps, with exit code 143.
        """
        return self._leave.is_requested or self._has_left

    def leave(self) -> None:
        """Upload what was trained since the last round, with the next step or at the end, and leave
        the run. This only sets a flag, so signal handlers may call it.

        SIGTERM does the same. A replica of several processes leaves with its next round.
        """
        self._leave.make()

    def _leave_if_requested(self) -> bool:
        if self._leave.is_requested and not self._has_left and self._group.processes == 1:
            self._drain()
        return self._has_left

    def _drain(self) -> None:
        """Upload what was trained since the last round, of every fragment, and go."""
        try:
            self.receive()
            if self._has_left:
                return
            if self._sampler is not None:
                self._sampler.gather()
            self._be_honest()
            self._drain_all()
        except BackendError as error:
            log.warning("what was trained since the last round is lost: %s", error)
        self._depart()

    def _drain_all(self) -> None:
        """Upload the rows of all fragments; that of an open round is uploaded, or may be."""
        open_at = None if self._unsettled is None else self._unsettled.fragment
        offers: list[Offer] = []
        for at in range(len(self.fragments)):
            if at == open_at:
                offers.append(Offer(0.0, 0))
                continue
            offer, self._work[at].uploaded = self._make_offer(at)
            offers.append(offer)
        end = None if self._sampler is None else self._sampler.end
        whole = merge_offers(offers, self._unsettled, end)
        self._rounds.drain(whole, tuple(offer.weight for offer in offers))

    def _depart(self) -> None:
        if self._has_left:
            return
        self._has_left, self._step = True, 0
        if self._lock is not None:
            self._lock.close()
        self._keep_own()
        mark_left()
        log.warning("left after round %d, with %d steps", self.round, self.steps)

    # -- The run --------------------------------------------------------------------------------

    @property
    def round(self) -> int:
        """How many rounds every fragment has done, also before this replica joined."""
        return self._state.round // len(self.fragments)

    @property
    def step(self) -> int:
        """The step of the run: what its rounds committed, and the steps of this process since.

        It is the same in all replicas at the same step of the same round, also after a restart.
        """
        return self._state.steps + self.steps - self._reported.steps

    @property
    def agreed_steps(self) -> int:
        """The steps of the run up to its last round."""
        return self._state.steps

    @property
    def tokens(self) -> float:
        """What all replicas counted in the committed rounds of the run."""
        return self._state.tokens

    @property
    def epoch(self) -> int | None:
        """The epoch of the run's data; None without `data()`."""
        return None if self._sampler is None else self._sampler.epoch

    def until(
        self,
        batches: Iterable[Any] | None = None,
        *,
        rounds: int | None = None,
        steps: int | None = None,
        tokens: float | None = None,
        epochs: int | None = None,
    ) -> Iterator[Any]:
        """Steps of the run, or `batches`, until the run reaches the first of these goals.

            for batch in diloco.until(loader, steps=10_000): ...

        All replicas end after the same round, also those that were killed and restarted. The last
        period ends with the last step, so everything is synchronised. With `fragments`, that is one
        of them: call `sync()` behind the loop, in all replicas.
        """
        self._check_open()
        if batches is not None and not hasattr(batches, "__iter__"):
            raise ValidationError("batches", batches, "expected batches to iterate over")
        if self._sampler is not None:
            self._sampler.check_batches(batches)
        goal = RunGoal(rounds, steps, tokens, epochs)
        goal.check(None if self._lease is None else self._lease.ledger.terms)
        self._goal = goal
        count = len(self.fragments)
        if self.round and not self._group.process and goal.is_over(self._state, count):
            announce(self._run, self.step, self.round, self.config.rank, is_end=True)
        return go_on(
            lambda: goal.is_reached(self._state, count),
            batches,
            lambda: self.step,
            self._clock.read,
        )

    def _follow_schedule(self) -> None:
        if self._schedule is not None:
            self._schedule.follow(self.step)

    # -- Data -----------------------------------------------------------------------------------

    def data(
        self,
        dataset: Any = None,
        *,
        stream: OpenAt | None = None,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int = 1,
        batch: int = 32,
        fingerprint: str = "",
        part: tuple[int, int] | None = None,
    ) -> DataSampler:
        """Data of which each sample is used once, by one replica, whichever replicas die or join.

        `dataset`: a dataset with a length, or its length. `stream`: `stream(position)` iterates
        over the data from there. `batch`: the samples of one batch of a process. All replicas must
        pass the same arguments except `batch`; `fingerprint` is a text that identifies the data.

        In a replica of several processes, each process has its own batches. Processes of a tensor
        parallel group need the same ones: pass `part=(index, count)`, the group and the number of
        groups.
        """
        self._check_open()
        if self._sampler is not None:
            raise ValidationError("data", "a second one", "a run has one set of data")
        terms = read_terms(
            dataset,
            stream,
            (self.config.world_size, self._group.processes, *self._plan.periods.lease),
            seed=seed,
            shuffle=bool(shuffle),
            epochs=epochs,
            batch=batch,
            fingerprint=str(fingerprint),
            part=part,
        )
        self.receive()
        if self._state.ledger is not None:
            refuse_other_data(terms, self._state.ledger.terms)
        self._rounds.share_data(terms)
        self._state = self._rounds.state
        assert self._state.ledger is not None
        count = len(self.fragments)
        self._lease = DataLease(self._state.ledger, self.config.rank, count, self.steps)
        self._sampler = DataSampler(
            self,
            self._lease,
            self._group,
            batch=batch,
            stream=stream,
            part=part,
            read=self._clock.read,
        )
        return self._sampler

    shard = data  # the name that scripts have for it

    def data_report(self) -> DataReport:
        """What of the data was used, in which round and by whom, as the store has it."""
        self.receive()
        manifests = from_leader(self._group, lambda: self._setup.read_manifests(self._rounds))
        count = len(self.fragments)
        return make_data_report(self._state.ledger, manifests, count, self._lease, self._sampler)

    def step_tail(self) -> None:
        """A step of the optimisers with the gradients of batches that no step came after."""
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _claim(self, at: int, *, is_finite: bool) -> tuple[Ranges, int, int | None]:
        """What an upload of a fragment claims, wants, and says of the end of a stream."""
        lease, sampler = self._lease, self._sampler
        if lease is None or sampler is None:
            return (), 0, None
        claim = lease.claim(at, is_finite=is_finite)
        self._rounds.values.fresh = lease.fresh
        want = 0 if self._leave.is_requested else sampler.want(self._plan.guess_steps(self._state))
        return claim, want, sampler.end

    def _be_honest(self) -> None:
        """Throw away all that was trained and not committed, if others have its data now."""
        if self._lease is None or self._lease.is_honest:
            return
        log.warning("others have the data that this replica trained on: it continues without it")
        self._rounds.values.drop()
        self._take_global()

    def _plan_data(self) -> None:
        if self._sampler is not None:
            self._sampler.plan()

    # -- What is saved --------------------------------------------------------------------------

    def checkpoint(
        self, *, inner: bool = False, extras: Extras | Callable[[], Extras] | None = None
    ) -> None:
        """Store a checkpoint: the run can continue from the global parameters of its last round.

        With `inner`, also the state of this replica: its inner optimisers, the random state of
        Python, numpy and torch, and `extras` of the script, by name. They are stored now, after
        each round with a checkpoint (`checkpoint_every`) and at the end; the newest two copies of
        each rank are kept. A DiLoCo with the same rank restores them when it is made, and the
        script finds its extras in `extras`. A function is called for the extras each time.

        All processes of a replica call it together. Without a store it only warns.
        """
        if extras is not None and not inner:
            raise ValidationError("extras", "given", "expected inner=True with them")
        if self._own is None:
            text = "checkpoint() keeps nothing: there is no store; pass uri="
            if text not in self._checks.warnings:
                self._checks.warn(text)
            return
        self.receive()
        if inner:
            self._own.keep(extras)
            self._own.save(self.round, self.step)
        self._rounds.save()

    @property
    def extras(self) -> Mapping[str, Any] | None:
        """What `checkpoint(inner=True, extras=…)` of this rank kept; None if there is nothing."""
        return None if self._own is None else self._own.extras

    @property
    def restored_step(self) -> int | None:
        """The run's step of which the inner optimisers are, if they were restored."""
        copy = None if self._own is None else self._own.restored
        return None if copy is None else copy.step

    def _keep_own(self) -> None:
        """What is this replica's own is kept once more, if it is to be."""
        if self._own is not None:
            self._own.save_if_retained(self.round, self.step)

    def global_parameters(self) -> dict[str, Floats]:
        """The parameters all agree on, by name; copies, and whole.

        All processes of a replica call it together.
        """
        self.receive()
        return self._model.gather_all(self.fragments)

    def global_state_dict(self) -> dict[str, torch.Tensor]:
        """The model with the parameters all agree on, by plain names, whole, in host memory.

        `model.load_state_dict` takes it. Buffers and frozen parameters are this replica's. All
        processes of a replica call it together, and each has all of it: `save` needs less memory.
        """
        self.receive()
        complete = export.FullModel(self._model, self.fragments)
        return {entry.name: complete.tensor(entry) for entry in complete.entries}

    def save(
        self, target: str | os.PathLike[str], *, file_bytes: int = export.FILE_BYTES
    ) -> list[str]:
        """The model as in `global_state_dict`, as safetensors at `target`; the names of the files.

        `target`: a path or a URI of file:// s3:// gs:// az://. One that ends with `.safetensors` is
        one file; any other is a folder, with files of about `file_bytes` and an index of them. One
        replica saves, and all of its processes call it together: they bring parameter after
        parameter to process 0, which holds one file at a time.
        """
        self.receive()
        summary = export.summary_of(self._run if self._store else "", self.round, self.step)
        complete = export.FullModel(self._model, self.fragments)
        return export.save(complete, target, file_bytes, summary, self._group.process)

    def publish(self, weights: RoundWeights[Any, V], *, timeout: float = 120.0) -> V | None:
        """Publish the global parameters as a version of `weights`, a `weights.ReplicaPublisher`.

        All replicas call it after the same rounds, and each uploads its share. It returns when the
        version is committed, in all of them the same; None if a later round has one, or this
        replica has left. `timeout`: so long it waits for one that does not come. After `Temporary`,
        train on: the next version has everything. All processes of a replica call it together.
        """
        self.receive()
        if self._has_left:
            return None
        complete = export.FullModel(self._model, self.fragments)
        rounds, group = self._rounds, self._group
        return publish(weights, complete, timeout, group, self._store, self._run, rounds)

    @property
    def warnings(self) -> list[str]:
        """What was found wrong with this training, in sentences; they are in the log as well."""
        return list(self._checks.warnings)

    @property
    def reports(self) -> deque[RoundReport]:
        """What the last rounds cost, one entry each."""
        return self._reports.last

    def metrics(self) -> dict[str, float]:
        """Totals since the start: rounds, bytes, seconds hidden and blocked; those of the ramp."""
        return dict(self._reports.totals)

    def describe(self) -> dict[str, str]:
        """What this run does between and in its rounds, and why, in sentences."""
        return describe(self._settings, self._plan.periods, self._setup.outer)
