"""DiLoCo: replicas train alone for some steps, then take one step together, through a store.

Rank, world and store come from arguments or a rank's environment. A process without either is a
world of one and waits for nobody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from atoll.core.checks import check_int, check_number
from atoll.core.errors import BackendError, ValidationError
from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.diloco.allreduce.manifest import NOTHING
from atoll.diloco.allreduce.settle import Left
from atoll.diloco.allreduce.start import read_start
from atoll.diloco.allreduce.team import is_equal, lead, together
from atoll.diloco.checks import Checks, left_out
from atoll.diloco.claim import claim_run
from atoll.diloco.codecs import get_codec
from atoll.diloco.estimate import MEANS
from atoll.diloco.facts import send_round
from atoll.diloco.goal import RunGoal
from atoll.diloco.group import find_team
from atoll.diloco.inner import StepCount, check_optimizers, unwrap_optimizers
from atoll.diloco.jobs import PendingRound, at_once, in_background
from atoll.diloco.leave import Departure
from atoll.diloco.model import ReplicaModel
from atoll.diloco.outer import Floats, load_bytes, split, to_bytes
from atoll.diloco.own_state import OwnState
from atoll.diloco.pieces import check_module
from atoll.diloco.presets import OuterPreset, read_settings, refuse_unlike
from atoll.diloco.pseudo_gradient import PseudoGradients
from atoll.diloco.replica_config import (
    find_home,
    find_replica_config,
    fragment_run,
    refuse_mixed,
    refuse_spanning,
)
from atoll.diloco.reports import RoundReport, RoundReports
from atoll.diloco.schedule import RunSchedule
from atoll.diloco.shared import SharedData, took
from atoll.diloco.stream import Commit, open_streams
from atoll.diloco.terms import OuterRule
from atoll.diloco.view import ReplicaFace
from atoll.objectstore import ObjectStore

if TYPE_CHECKING:
    import torch

log = logging.getLogger("atoll.diloco")

_MANY = 10**9


class DiLoCo(ReplicaFace):
    """The outer loop around a model and its inner optimiser; `optimizer.step()` drives it.

        with DiLoCo(model, inner_optimizer, sync_every=100) as diloco:
            while diloco.round < 50:
                loss(model).backward()
                inner_optimizer.step()  # every 100th step ends a round
                inner_optimizer.zero_grad()

    Every `sync_every` steps the replicas average how far they moved, and take one step of Nesterov
    momentum with it. With `fragments`, a part of the model is synchronised each
    `sync_every / fragments` steps instead; with `overlap_steps`, a part is sent that many steps
    before its result is due, and training goes on meanwhile. `mix` is how much of a replica's own
    values stays when the result comes: 0 takes the global ones.

    All replicas hold the same bits in `global_parameters()` after the same round. A replica that
    starts later, or again, loads the newest checkpoint from the store and the rounds after it.
    Only parameters with `requires_grad` are synchronised; buffers stay local.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        inner_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        sync_every: int | None = None,
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
        checkpoint_every: int = 10,
        state: dict[str, Any] | None = None,
        allreduce: ObjectStoreAllReduce | None = None,
        on_round: Callable[[RoundReport], None] | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        device_mesh: torch.distributed.device_mesh.DeviceMesh | None = None,
        scheduler: Any = None,
    ) -> None:
        """`inner_optimizer`: one, or several; a step counts when all of them have stepped.

        `preset`: a published method by its name (see `atoll.diloco.presets`); what else is given
        wins over it. `outer_lr` and `outer_momentum` are numbers or (round, value) pairs, `outer`
        is the rule of the outer step. A run in the store keeps its own where none of them is given.

        `codec` is for what a replica uploads, `down_codec` (see `MEANS`) for the means it reads.

        `state`, as from `state_dict`, is where a new run begins; a run in the store wins over it.

        `allreduce` replaces the arguments for the store; it works with one fragment only.

        `process_group` or `device_mesh`: the processes that are this replica together, if not all
        of the default group. Then all of them make a DiLoCo, and step, at the same time.

        `scheduler`, one of `torch.optim.lr_scheduler`, follows the step of the run from here on:
        its own `step()` does nothing.
        """
        check_module(model)
        check_int("checkpoint_every", checkpoint_every, 1, _MANY)
        settings = read_settings(
            preset,
            sum(value.requires_grad for value in model.parameters()),
            sync_every=sync_every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer=outer,
            fragments=fragments,
            overlap_steps=overlap_steps,
            mix=mix,
            codec=codec,
            down_codec=down_codec,
        )
        sync_every, fragments, codec = settings.sync_every, settings.fragments, settings.codec
        down_codec = settings.down_codec or MEANS.get(codec, codec)
        get_codec(codec)
        get_codec(down_codec, "down_codec")
        if allreduce is not None and fragments > 1:
            raise ValidationError("allreduce", allreduce, "each fragment needs one: pass uri=")
        # A round that waits for others must not look like a process that is gone.
        self._team = find_team(process_group, device_mesh, 3 * timeout + 300, rank)
        is_many = self._team.processes > 1
        if allreduce is not None and is_many:
            raise ValidationError("allreduce", allreduce, "it is of one process: pass uri=")
        config, locations = is_equal(
            self._team,
            lambda: find_replica_config(
                uri, rank, world_size, min_replicas, is_one_of_many=is_many
            ),
            lambda config: config._replace(uri=str(config.uri)),
        )
        self.config = config
        if is_many:
            refuse_spanning(locations)
            refuse_unlike(self._team, settings, fragment_run(run_id, 0, 1))
        optimizers = unwrap_optimizers(inner_optimizer)
        self._model = ReplicaModel(model, self._team)
        odd = check_optimizers(optimizers, self._model.parameters)
        self.fragments = split(self._model.shapes, fragments)
        for fragment in self.fragments:
            fragment.terms = settings.terms
        self._model.check_equal()
        self._is_checked = False
        options = {
            "start": read_start(config.world_size, config.min_replicas, min_replicas, grace_s),
            "codec": codec,
            "down_codec": down_codec,
            "timeout_s": timeout,
            "grace_s": grace_s,
            "team": self._team,
        }
        self._streams = open_streams(
            self.config, fragments, checkpoint_every, allreduce, run_id, options
        )
        self._home = home = find_home(config, fragments, run_id, allreduce)
        self._claim = claim_run(home, config.rank, self._team)
        self._period = sync_every // fragments
        self._data = SharedData(self, config.rank, config.world_size, self._team)
        for fragment, stream in zip(self.fragments, self._streams, strict=True):
            fragment.carry(stream.share(fragment.slots))
            fragment.period, stream.ledger_writer = self._period, self._data.journal
        self._overlap, self._mix = settings.overlap_steps, settings.mix
        self._is_retained = settings.is_retained and settings.overlap_steps > 0
        self._pseudo_gradients = PseudoGradients(
            self._model, is_background=self._overlap > 0, is_many=is_many
        )
        self.steps = 0
        self._step = 0
        self._counted = 0.0
        self._sent_at = [(0.0, 0)] * fragments
        self._clock = (0, 0, 0.0)
        self._reported_at: tuple[float, int] = (0.0, 0)  # what of them the run's clock has
        self._goal: RunGoal | None = None
        self._pending: PendingRound | None = None
        self._has_left = False
        self._sent: Floats | None = None  # the model as it was sent, where what follows is kept
        self._rounds = RoundReports(on_round)
        self._checkpoint_every = checkpoint_every
        self._join(state)
        if home is not None and allreduce is None and not self.round:
            lead(self._team, lambda: refuse_mixed(home.blobs.list_folders(), run_id, fragments))
        self._own = None
        if home is not None:
            self._own = OwnState(home.blobs, home.run, config.rank, self._team, optimizers)
        is_group_chosen = process_group is not None or device_mesh is not None
        self._checks = Checks(model, optimizers, self._team, is_group_chosen=is_group_chosen)
        for messages in odd:
            self._checks.warn(messages)
        self._restore(keeps_groups=scheduler is not None)
        self._schedule = None if scheduler is None else RunSchedule(scheduler, optimizers)
        self._follow()
        self._departure = Departure(self._go, self._hand_in)
        self._hook = StepCount(optimizers, self._departure.begin, self._after_step)
        if allreduce is not None or config.uri is not None:
            self._departure.listen()

    def __enter__(self) -> DiLoCo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None = None, *_: object
    ) -> None:
        self._hook.remove()
        self._checks.close()
        self._departure.close()
        if self._schedule is not None:
            self._schedule.close()
        if self._claim is not None:
            self._claim.close()
        # After an error the round is left to the others: they finish it without this replica.
        if error is not None:
            for stream in self._streams:
                stream.leave(error)
        elif kind is None:
            self._receive()
            self._say_unsynchronised()
            self._keep()
            for stream in self._streams:
                stream.close()

    def _say_unsynchronised(self) -> None:
        steps, self._step = self._step, 0
        if steps:
            self._checks.warn(
                f"{steps} steps after round {self.round} were not synchronised: only the model of "
                "this process has them. Train whole rounds, or call sync() in all replicas before"
            )

    def close(self) -> None:
        """Finish the round on its way, if any; then leave the optimiser and close the store."""
        self.__exit__(None)

    def sync(self) -> None:
        """A round of every fragment, with what was trained since the last one.

        All replicas call it, as at the end of a training that does not end with a whole round.
        """
        for _ in self.fragments:
            if not self._has_left:
                self.end_period()

    def end_period(self, *, is_last: bool = False) -> None:
        """A round at once, with what was trained since the last one.

        `is_last`: of every fragment. The replica leaves, and gives back the data that it holds.
        """
        with self._departure.busy():
            if self._has_left:
                self._departure.exit_soon()
                return
            self._receive()
            self._step = 0
            for _ in self.fragments if is_last else self.fragments[:1]:
                with suppress(Left):
                    self._send(is_left=is_last)
                    self._receive()
            if is_last:
                self._depart()

    def count(self, amount: float) -> None:
        """Add `amount` to the tokens, or samples, that this process has trained on.

        The weight of a replica in a round is what its processes counted since the last one, or its
        steps if they never count. All replicas must count the same thing.
        """
        check_number("amount", amount, 0, 1e18)
        self._counted += amount

    def global_parameters(self) -> dict[str, Floats]:
        """The parameters all replicas agree on, by name; copies, and whole.

        All processes of a replica call it together.
        """
        with self._departure.busy():
            self._receive()
            return {
                slot.name: row.copy()
                for fragment in self.fragments
                for slot, row in zip(
                    fragment.slots, fragment.rows(self._model.gather(fragment)), strict=True
                )
            }

    def state_dict(self) -> dict[str, Any]:
        """The outer loop of this process, to be saved with the model and the inner optimiser."""
        with self._departure.busy():
            self._receive()
            for fragment in self.fragments:
                fragment.ledger = self._data.journal.packed()
            return {
                "steps": self.steps,
                "fragments": [to_bytes(fragment) for fragment in self.fragments],
                "feedback": [stream.feedback() for stream in self._streams],
                "carried": self._data.save(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; rounds of this run that are in the store win over it."""
        with self._departure.busy():
            self._receive()
            self._join(state)
            self._follow()

    def _join(self, state: dict[str, Any] | None) -> None:
        """Load the parameters all agree on: the newest in the store, or the first replica's."""
        if state is not None and not {"steps", "fragments", "feedback"} <= set(state):
            raise ValidationError("state", sorted(state), "expected what state_dict() gave")
        saved = None if state is None else state["fragments"]
        if saved is not None and len(saved) != len(self.fragments):
            raise ValidationError("fragments", len(self.fragments), f"the state has {len(saved)}")
        for at, (fragment, stream) in enumerate(zip(self.fragments, self._streams, strict=True)):
            if saved is None:
                self._model.take(fragment, fragment.values)
            else:
                load_bytes(fragment, saved[at])
                stream.load_feedback(state["feedback"][at])  # type: ignore[index]
            self._data.add(at, stream.join(fragment))
            self._model.apply(fragment, 0.0)
        if state is not None:
            self.steps = state["steps"]
        self._data.fold()
        self._data.discard()
        if state is not None:
            self._data.load(state.get("carried"))
        self._restart_period()

    def _set_clock(self) -> None:
        """Not while a round is on its way: it changes the fragments in the background."""
        parts = self.fragments
        self._clock = (
            min(part.rounds for part in parts),
            sum(part.steps for part in parts),
            sum(part.tokens for part in parts),
        )

    def _restart_period(self) -> None:
        self._step = 0
        self._set_clock()
        self._reported_at = (self._counted, self.steps)
        self._sent_at = [self._reported_at] * len(self.fragments)

    def read_more(self, at: int) -> None:
        """Catch up with the rounds of a fragment. The model stays as far from them as it was."""
        fragment = self.fragments[at]
        stream = self._streams[at]
        join = partial(stream.join, fragment)
        self._data.add(at, self._pseudo_gradients.keep(fragment, stream, join))

    def catch_up(self) -> None:
        """All rounds that were decided are known, and none is passed over."""
        while self._streams[at := self._turn()].is_behind():
            self.read_more(at)
            self._data.fold()
            self._set_clock()

    def throw_away(self) -> None:
        """The model is the global one, and nothing is owed to later rounds."""
        for fragment in self.fragments:
            self._model.apply(fragment, 0.0)
        self.forget_late_work()
        self._sent_at = [(self._counted, self.steps)] * len(self.fragments)

    def forget_late_work(self) -> None:
        for stream in self._streams:
            stream.forget_late_work()

    def _turn(self) -> int:
        """The fragment with the fewest rounds, so that a replica that joins sends the one that the
        others send.
        """
        return min(range(len(self.fragments)), key=lambda at: self.fragments[at].rounds)

    def _follow(self) -> None:
        if self._schedule is not None:
            self._schedule.follow(self.step)

    def _after_step(self) -> None:
        with self._departure.busy():
            self._departure.end()
            if self._has_left:
                self._departure.exit_soon()
                return
            self.steps += 1
            self._data.after_step(self.steps)
            try:
                with suppress(Left):  # the rest is handed in when this is over
                    self._drive()
            finally:
                self._follow()

    def _go(self) -> None:
        for stream in self._streams:
            stream.go()

    def _hand_in(self) -> None:
        if self._team.processes > 1:
            return
        for at in range(len(self.fragments)):
            try:
                self._receive()
                if self.steps > self._sent_at[at][1]:
                    with suppress(Left):
                        self._send(at, is_left=True)
                        self._receive()
            except BackendError as error:
                log.warning("what was trained since the last round is lost: %s", error)
        self._depart()

    def _depart(self) -> None:
        if self._has_left:
            return
        self._has_left, self._step = True, 0
        for stream in self._streams:
            stream.depart()
        if self._claim is not None:
            self._claim.close()
        self._keep()
        log.warning("left after round %d, with %d steps", self.round, self.steps)

    def _drive(self) -> None:
        step = self._step + 1
        # Set before the round, so that a round that fails is followed by a period like any other.
        self._step = step % self._period
        if step == self._period - self._overlap:
            self._send()
        if step == self._period:
            self._receive()
        goal = None if self._goal is None else self._goal.steps
        if goal is not None and self.step >= goal > self.agreed_steps:
            self.end_period()

    def _weight(self, at: int) -> tuple[float, float]:
        """How much this replica has trained since the fragment was last sent; what of it was
        counted since the run's clock was told.
        """
        (counted, steps), is_reported = self._sent_at[at], self._reported_at[0]
        messages = together(
            self._team,
            lambda: (
                self._counted,
                self._counted - counted,
                self.steps - steps,
                self._counted - is_reported,
            ),
        )
        tokens = sum(message[3] for message in messages)
        if any(message[0] for message in messages):
            return max(sum(message[1] for message in messages), NOTHING), tokens
        return max(float(max(message[2] for message in messages)), NOTHING), tokens

    def _send(self, at: int | None = None, *, is_left: bool = False) -> None:
        self._receive()
        began = time.monotonic()
        self._data.before_send()
        at = self._turn() if at is None else at
        if self._team.processes > 1 and any(
            together(self._team, lambda: self._departure.is_requested)
        ):
            is_left = self._departure.is_requested = True  # they go together
        fragment, stream = self.fragments[at], self._streams[at]
        if not self._is_checked:
            self._checks.before_first_round()
            self._model.check_equal()
            self._is_checked = True
        if self._is_retained:
            self._sent = self._model.take_copy(fragment, self._sent)
        (weight, tokens), mark = self._weight(at), (self._counted, self.steps)
        pseudo_gradient = self._pseudo_gradients.take(fragment, stream, self._checks)
        is_bad = pseudo_gradient.is_bad
        if is_bad and is_left and self._team.processes == 1:
            raise Left
        if is_bad:
            weight = NOTHING
        header = self._data.header(
            at, self.steps - self._reported_at[1], tokens, is_bad=is_bad, is_left=is_left
        )

        def work() -> tuple[Commit, float, float]:
            started = time.monotonic()
            commit = stream.advance(fragment, pseudo_gradient, weight, header)
            return commit, started, time.monotonic()

        is_background = self._overlap > 0 and not is_left
        try:
            job = in_background(work) if is_background else at_once(work)
        except Left:
            self._sent_at[at] = mark  # it is in the store, and must not be sent again
            stream.forget_late_work()  # that is in it, too
            raise
        self._pending = PendingRound(
            at,
            weight,
            mark,
            job,
            time.monotonic() - began,
            is_bad,
            took(header),
            is_left,
            is_background,
        )

    def _receive(self) -> None:
        """Wait for the round on its way, if there is one, and take its result into the model."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        began = time.monotonic()
        try:
            commit, started, ended = pending.job.result()
        except Left:
            # It is in the store, and must not be sent again, which the steps since would do.
            self._sent_at[pending.fragment] = (self._counted, self.steps)
            self._streams[pending.fragment].forget_late_work()
            return
        self._sent_at[pending.fragment] = pending.mark
        self._reported_at = (
            self._reported_at[0] if commit.is_carried else pending.mark[0],
            pending.mark[1],
        )
        before = self.round
        self._take_result(pending, commit)
        self._set_clock()
        if pending.is_last and self._team.processes > 1:
            self._depart()
        elif self.round > before and (self.round == 1 or not self.round % self._checkpoint_every):
            self._keep()
        if commit.is_behind:
            return
        fragment = self.fragments[pending.fragment]
        self._checks.learn(commit.round, self.config.rank, fragment, commit.notes, commit.committed)
        out = left_out(commit.notes)
        report = RoundReport(
            commit.round,
            pending.fragment,
            tuple(rank for rank in commit.members if rank not in out),
            pending.weight,
            commit.bytes_up,
            commit.bytes_down,
            commit.requests,
            hidden_s=max(0.0, min(ended, began) - started) if pending.is_background else 0.0,
            blocked_s=pending.blocked_s + time.monotonic() - began,
        )
        self._rounds.add(report)
        if not self._team.process:
            size = self.fragments[pending.fragment].slots[-1].stop
            replica = self.config.rank, len(self.fragments), size
            send_round(report, commit.committed, *replica, self._checks.take_untold())

    def _take_result(self, pending: PendingRound, commit: Commit) -> None:
        sent = self.fragments[pending.fragment]
        if not pending.is_bad:
            # What is carried to the next round must not stay in the model as well.
            mix = 0.0 if commit.is_carried else self._mix
            if self._sent is not None:
                self._model.move_on(sent, self._sent)
            else:
                self._model.apply(sent, mix)
            is_emptied = not mix and self._sent is None
            self._data.take(pending.fragment, commit, pending.claimed, is_emptied=is_emptied)
            return
        # The other fragments would make this one what it was again.
        for fragment in self.fragments:
            self._model.apply(fragment, 0.0)
        self._data.take(pending.fragment, commit, pending.claimed, is_emptied=True)
        self._data.discard()
        self._checks.heal()
