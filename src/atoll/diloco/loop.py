"""DiLoCo: replicas train alone for some steps, then take one step together, through a store.

Rank, world and store come from arguments or a rank's environment. A process without either is a
world of one and waits for nobody.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from atoll.core.checks import check_int, check_number
from atoll.core.errors import ValidationError
from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.diloco.allreduce.start import read_start
from atoll.diloco.allreduce.team import alike, together
from atoll.diloco.blobs import Blobs
from atoll.diloco.estimate import MEANS
from atoll.diloco.group import find_team
from atoll.diloco.model import ReplicaModel
from atoll.diloco.outer import Floats, load_bytes, split, to_bytes
from atoll.diloco.place import Place, find_place, fragment_run
from atoll.diloco.stream import Alone, Commit, StoreStream, Stream

if TYPE_CHECKING:
    import torch

log = logging.getLogger("atoll.diloco")

_MANY = 10**9
_NOTHING = 1e-30  # the weight of a replica that counted nothing in a round: as good as left out


class RoundReport(NamedTuple):
    """What one round of a fragment cost, and which ranks were in it."""

    round: int
    fragment: int
    roster: tuple[int, ...]
    weight: float
    bytes_up: int
    bytes_down: int
    requests: int
    hidden_s: float  # the store worked while the model trained
    blocked_s: float  # the model did not train


class _Pending(NamedTuple):
    """A round on its way: `job` yields its commit and how many seconds it took."""

    fragment: int
    weight: float
    mark: tuple[float, int]  # what was counted, and the steps, when it was sent
    job: Future[tuple[Commit, float]]
    blocked_s: float


class DiLoCo:
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
        inner_optimizer: torch.optim.Optimizer,
        *,
        sync_every: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int = 1,
        overlap_steps: int = 0,
        mix: float = 0.0,
        codec: str = "fp32",
        down_codec: str | None = None,
        uri: str | Blobs | None = None,
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
    ) -> None:
        """`codec` is for what a replica uploads, `down_codec` (see `MEANS`) for the means it reads.

        `state`, as from `state_dict`, is where a new run begins; a run in the store wins over it.

        `allreduce` replaces the arguments for the store; it works with one fragment only.

        `process_group` or `device_mesh`: the processes that are this replica together, if not all
        of the default group. Then all of them make a DiLoCo, and step, at the same time.
        """
        check_int("sync_every", sync_every, 1, _MANY)
        check_int("fragments", fragments, 1, _MANY)
        check_int("checkpoint_every", checkpoint_every, 1, _MANY)
        check_number("outer_lr", outer_lr, 0, 100)
        check_number("outer_momentum", outer_momentum, 0, 1)
        check_number("mix", mix, 0, 1)
        if sync_every % fragments:
            raise ValidationError("sync_every", sync_every, f"expected a multiple of {fragments}")
        check_int("overlap_steps", overlap_steps, 0, sync_every // fragments - 1)
        if allreduce is not None and fragments > 1:
            raise ValidationError("allreduce", allreduce, "each fragment needs one: pass uri=")
        # A round that waits for others must not look like a process that is gone.
        self._team = find_team(process_group, device_mesh, 3 * timeout + 300, rank)
        is_many = self._team.processes > 1
        if allreduce is not None and is_many:
            raise ValidationError("allreduce", allreduce, "it is of one process: pass uri=")
        place, places = alike(
            self._team,
            lambda: find_place(uri, rank, world_size, min_replicas, is_one_of_many=is_many),
            lambda place: place._replace(uri=str(place.uri)),
        )
        self.place = place
        if is_many:
            _refuse_spanning(places)
        self._model = ReplicaModel(model, self._team)
        self.fragments = split(self._model.shapes, fragments, outer_lr, outer_momentum)
        self._model.check_alike()
        self._is_checked = False
        options = {
            "start": read_start(place.world_size, place.min_replicas, min_replicas, grace_s),
            "codec": codec,
            "down_codec": down_codec or MEANS.get(codec, codec),
            "timeout": timeout,
            "grace_s": grace_s,
            "team": self._team,
        }
        self._streams = open_streams(
            self.place, fragments, checkpoint_every, allreduce, run_id, options
        )
        for fragment, stream in zip(self.fragments, self._streams, strict=True):
            fragment.carry(stream.share(fragment.slots))
        self._period = sync_every // fragments
        self._overlap, self._mix = overlap_steps, mix
        self._on_round = on_round
        self.steps = 0
        self._step = 0
        self._counted = 0.0
        self._sent_at = [(0.0, 0)] * fragments
        self._pending: _Pending | None = None
        self.reports: deque[RoundReport] = deque(maxlen=10_000)
        self._totals = dict.fromkeys(_TOTALS, 0.0)
        self._join(state)
        self._hook = inner_optimizer.register_step_post_hook(lambda *_: self._after_step())

    def __enter__(self) -> DiLoCo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None = None, *_: object
    ) -> None:
        self._hook.remove()
        # After an error the round is left to the others: they finish it without this replica.
        if error is not None:
            for stream in self._streams:
                stream.leave(error)
        elif kind is None:
            self._receive()
            for stream in self._streams:
                stream.close()

    def close(self) -> None:
        """Finish the round on its way, if any; then leave the optimiser and close the store."""
        self.__exit__(None)

    @property
    def round(self) -> int:
        """How many outer steps every fragment has taken, also before this replica joined."""
        return min(fragment.rounds for fragment in self.fragments)

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
        self._receive()
        return {
            slot.name: row.copy()
            for fragment in self.fragments
            for slot, row in zip(
                fragment.slots, fragment.rows(self._model.gather(fragment)), strict=True
            )
        }

    def metrics(self) -> dict[str, float]:
        """Totals since the start: rounds, bytes up and down, seconds hidden and blocked."""
        return dict(self._totals)

    def state_dict(self) -> dict[str, Any]:
        """The outer loop of this process, to be saved with the model and the inner optimiser."""
        self._receive()
        return {
            "steps": self.steps,
            "fragments": [to_bytes(fragment) for fragment in self.fragments],
            "feedback": [stream.feedback() for stream in self._streams],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`; rounds of this run that are in the store win over it."""
        self._receive()
        self._join(state)

    def _join(self, state: dict[str, Any] | None) -> None:
        """Load the parameters all agree on: the newest in the store, or the first replica's."""
        saved = None if state is None else state["fragments"]
        if saved is not None and len(saved) != len(self.fragments):
            raise ValidationError("fragments", len(self.fragments), f"the state has {len(saved)}")
        for at, (fragment, stream) in enumerate(zip(self.fragments, self._streams, strict=True)):
            if saved is None:
                self._model.take(fragment, fragment.values)
            else:
                load_bytes(fragment, saved[at])
                stream.load_feedback(state["feedback"][at])  # type: ignore[index]
            stream.join(fragment)
            self._model.apply(fragment, 0.0)
        if state is not None:
            self.steps = state["steps"]
        self._step = 0
        self._sent_at = [(self._counted, self.steps)] * len(self.fragments)

    def _after_step(self) -> None:
        self.steps += 1
        step = self._step + 1
        # Set before the round, so that a round that fails is followed by a period like any other.
        self._step = step % self._period
        if step == self._period - self._overlap:
            self._send()
        if step == self._period:
            self._receive()

    def _weight(self, at: int) -> float:
        """How much this replica has trained since the fragment was last sent."""
        counted, steps = self._sent_at[at]
        words = together(
            self._team, lambda: (self._counted, self._counted - counted, self.steps - steps)
        )
        if any(total for total, _, _ in words):
            return max(sum(amount for _, amount, _ in words), _NOTHING)
        return float(max(count for _, _, count in words))

    def _send(self) -> None:
        self._receive()
        began = time.monotonic()
        # The fragment with the fewest rounds is next, so that a replica that joins sends the one
        # that the others send.
        at = min(range(len(self.fragments)), key=lambda at: self.fragments[at].rounds)
        fragment, stream = self.fragments[at], self._streams[at]
        if not self._is_checked:
            self._model.check_alike()
            self._is_checked = True
        gradient = self._model.movement(fragment)
        weight, mark = self._weight(at), (self._counted, self.steps)

        def work() -> tuple[Commit, float]:
            started = time.monotonic()
            commit = stream.advance(fragment, gradient, weight)
            return commit, time.monotonic() - started

        job = _in_background(work) if self._overlap else _at_once(work)
        self._pending = _Pending(at, weight, mark, job, time.monotonic() - began)

    def _receive(self) -> None:
        """Wait for the round on its way, if there is one, and take its result into the model."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        began = time.monotonic()
        commit, took_s = pending.job.result()
        self._sent_at[pending.fragment] = pending.mark
        self._model.apply(self.fragments[pending.fragment], self._mix)
        waited_s = time.monotonic() - began
        report = RoundReport(
            commit.round,
            pending.fragment,
            commit.roster,
            pending.weight,
            commit.bytes_up,
            commit.bytes_down,
            commit.requests,
            hidden_s=max(0.0, took_s - waited_s) if self._overlap else 0.0,
            blocked_s=pending.blocked_s + waited_s,
        )
        self.reports.append(report)
        self._totals["rounds"] += 1
        for name in _TOTALS[1:]:
            self._totals[name] += getattr(report, name)
        log.info("%s", report)
        if self._on_round:
            self._on_round(report)


_TOTALS = ("rounds", "bytes_up", "bytes_down", "requests", "hidden_s", "blocked_s")


def open_streams(
    place: Place,
    count: int,
    checkpoint_every: int,
    allreduce: ObjectStoreAllReduce | None,
    run_id: str | None,
    options: dict[str, Any],
) -> list[Stream]:
    """One stream for each fragment, each with rounds of its own."""
    if allreduce is not None:
        return [StoreStream(allreduce, checkpoint_every)]
    if place.uri is None:
        return [Alone(options["team"]) for _ in range(count)]
    return [
        StoreStream(
            ObjectStoreAllReduce(
                place.uri,
                place.rank,
                place.world_size,
                min_replicas=place.min_replicas,
                run_id=fragment_run(run_id, at, count),
                **options,
            ),
            checkpoint_every,
        )
        for at in range(count)
    ]


def _refuse_spanning(places: Sequence[Place]) -> None:
    """Raises ValidationError if the processes are not of one replica."""
    ranks = sorted({place.rank for place in places})
    if len(ranks) > 1:
        raise ValidationError(
            "process_group",
            f"of replicas {', '.join(map(str, ranks))}",
            "expected the processes of one replica, but torch.distributed spans several: start "
            "them with --rendezvous none (rendezvous_backend='none'), or pass process_group= with "
            "the processes of this replica",
        )
    for process, place in enumerate(places):
        if place != places[0]:
            raise ValidationError(
                "process_group",
                f"process {process} with {place}",
                f"expected the arguments of process 0, {places[0]}",
            )


def _at_once(work: Callable[[], Any]) -> Future[Any]:
    job: Future[Any] = Future()
    job.set_result(work())
    return job


def _in_background(work: Callable[[], Any]) -> Future[Any]:
    """Run in a daemon thread, so that a replica that has to stop does not wait for the others."""
    job: Future[Any] = Future()

    def run() -> None:
        try:
            job.set_result(work())
        except BaseException as error:
            job.set_exception(error)

    Thread(target=run, name="atoll-diloco-round", daemon=True).start()
    return job
