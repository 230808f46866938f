"""The rounds of a replica, as `DiLoCo` makes them: through a store, or for itself alone."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress

from atoll.core.checks import check_int, check_number
from atoll.core.errors import BackendError
from atoll.diloco.codecs import Codec
from atoll.diloco.data import ledger as ledgers
from atoll.diloco.data.ledger import Claim, Terms
from atoll.diloco.data.ranges import Ranges
from atoll.diloco.group import Processes, ReplicaGroup, from_leader
from atoll.diloco.history import read_manifests
from atoll.diloco.model import ModelFragment, ReplicaModel, check_layout
from atoll.diloco.outer import OuterConfig, OuterRows
from atoll.diloco.periods import PeriodPlan
from atoll.diloco.presets import LoopSettings
from atoll.diloco.replica_config import ReplicaConfig, Start
from atoll.diloco.round import objects
from atoll.diloco.round.cells import Cut, RunLayout, Share
from atoll.diloco.round.driver import RoundDriver
from atoll.diloco.round.effects import (
    DROPPED,
    LEFT,
    MEMBER,
    EndMark,
    Offer,
    RoundConfig,
    RoundResult,
    RunState,
)
from atoll.diloco.round.objects import Manifest, Member
from atoll.diloco.round.pace import Pace
from atoll.diloco.round.reduce import Fragment, ReplicaValues
from atoll.objectstore import ObjectStore, Traffic

# A year: locks, and gloo with three times as much, do not take all numbers.
MAX_TIMEOUT_S = 366 * 86400.0


def check_limits(timeout_s: object, grace_s: object, checkpoint_every: object) -> None:
    """Raises ValidationError, by the names of the arguments of `DiLoCo`."""
    check_number("timeout", timeout_s, 1e-6, MAX_TIMEOUT_S)
    if grace_s is not None:
        check_number("grace_s", grace_s, 1e-6, MAX_TIMEOUT_S)
    check_int("checkpoint_every", checkpoint_every, 1, 10**9)


class RunSetup:
    """What the rounds of a run are made of, and what all replicas of it must have alike."""

    def __init__(
        self,
        config: ReplicaConfig,
        run: str,
        group: Processes,
        store: ObjectStore | None,
        fragments: Sequence[ModelFragment],
        codec: Codec,
        mean_codec: Codec,
        outer: OuterConfig,
    ) -> None:
        self._config, self._run, self._group, self._store = config, run, group, store
        self._fragments, self._codecs, self.outer = fragments, (codec, mean_codec), outer

    @property
    def traffic(self) -> Traffic:
        return Traffic() if self._store is None else self._store.traffic

    def make_rounds(
        self,
        model: ReplicaModel,
        pool: Executor,
        start: Start,
        *,
        is_over: Callable[[RunState], bool],
        timeout_s: float,
        grace_s: float | None,
        group_s: float,
        checkpoint_every: int,
    ) -> RoundDriver | LocalRounds:
        """The values of the model are where the run begins, if it is a new one."""
        group, config, store = self._group, self._config, self._store
        fragments = self._fragments
        for fragment in fragments:
            cut = Cut.of(fragment.size, config.world_size, self._codecs)
            share = Share(cut, group.process, group.processes)
            fragment.carry(share, OuterRows(share.size, self.outer, len(fragments)))
            model.take(fragment, fragment.values)
        rows = [fragment.upload for fragment in fragments]
        if store is None:
            return LocalRounds(rows, config.rank)
        nonce, prefix = from_leader(group, lambda: secrets.token_hex(8)), f"{self._run}/"
        values = ReplicaValues(store, prefix, config.rank, nonce, rows, *self._codecs, pool)
        round_config = RoundConfig(
            config.rank,
            config.world_size,
            nonce,
            self.layout.digest,
            config.world_size,
            tuple(fragment.share.cut.cells for fragment in fragments),
            launch=start.launch,
            processes=group.processes,
            quorum=config.min_replicas,
            first_quorum=start.first_quorum,
            together=tuple(range(start.together or 0)),
            timeout_s=timeout_s,
            checkpoint_every=checkpoint_every * len(fragments),
        )
        pace = Pace(timeout_s, grace_s=grace_s, is_folder=store.is_folder)
        many = ReplicaGroup(group.ranks, group_s) if isinstance(group, ReplicaGroup) else None
        return RoundDriver(
            values, self.layout, round_config, pace, group=many, adopt=self._adopt, is_over=is_over
        )

    def plan_periods(self, settings: LoopSettings, state: RunState) -> PeriodPlan:
        """The periods of a run that was joined, whose ramp may not be that of the settings."""
        group = self._group
        plan = PeriodPlan(
            settings.periods._replace(ramp=self.outer.ramp),
            settings.overlap_steps,
            lambda decide: from_leader(group, decide),
            time.monotonic(),
            is_many=group.processes > 1,
        )
        if state.round:
            plan.settle(state)
        return plan

    def mark_failed(self, launch: str, state: RunState) -> None:
        """The others do not wait for this rank, if its mark can be stored."""
        if self._store is not None:
            key = objects.ended_key(launch, self._config.rank, objects.FAILED)
            with suppress(BackendError):
                self._store.put(f"{self._run}/{key}", f"{state.round} {state.chain}".encode())

    def read_manifests(self, rounds: RoundDriver | LocalRounds) -> list[Manifest]:
        """Of all rounds of the run."""
        if self._store is None:
            assert isinstance(rounds, LocalRounds)
            return rounds.manifests
        return read_manifests(self._store, self._run, rounds.round)

    @property
    def layout(self) -> RunLayout:
        codec, mean_codec = self._codecs
        return RunLayout(
            tuple(fragment.specs for fragment in self._fragments),
            self._config.world_size,
            codec.name,
            mean_codec.name,
            self.outer.text,
            tuple(fragment.names for fragment in self._fragments),
        )

    def _adopt(self, theirs: RunLayout) -> RunLayout:
        """The layout to go on with in a run that began with `theirs`. Raises ValidationError."""
        check_layout(theirs, self._fragments, self._run)
        self.outer = self.outer.take(theirs.outer)
        for fragment in self._fragments:
            fragment.outer.configure(self.outer)
        return self.layout

    def describe(self, terms: Terms | None) -> dict[str, str]:
        """The settings that all replicas must have alike, to name the first that differs."""
        codec, mean_codec = self._codecs
        settings = {
            "codec": codec.name,
            "mean_codec": mean_codec.name,
            "outer": self.outer.description,
        }
        if terms is None:
            return settings | {"data": "the script's own"}
        names = ("length", "seed", "shuffle", "epochs", "fingerprint")
        shared = {name: repr(getattr(terms, name)) for name in names}
        return settings | {"data": "shared by diloco.data()"} | shared


class _LocalValues:
    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self.fragments = fragments
        self.fresh: Ranges = ()
        self.has_dropped = False

    def drop(self) -> None:
        for fragment in self.fragments:
            fragment.clear()
        self.has_dropped = True


class LocalRounds:
    """The rounds of a world of one replica without a store: its own pseudo-gradient is the mean.

    It has the calls of `round.driver.RoundDriver`. All processes of the replica call the same
    methods; each steps what it carries.
    """

    def __init__(self, fragments: Sequence[Fragment], rank: int) -> None:
        self.values = _LocalValues(fragments)
        self.state = RunState()
        self.name = secrets.token_hex(8)
        self.manifests: list[Manifest] = []
        self._rank = rank

    @property
    def round(self) -> int:
        return self.state.round

    def open(self) -> RoundResult:
        return self._result(DROPPED)

    def is_behind(self) -> bool:
        return False

    def prepare(self) -> RoundResult | None:
        return None

    def run(self, offer: Offer) -> RoundResult:
        state, fragments = self.state, self.values.fragments
        fragment = fragments[state.round % len(fragments)]
        if not offer.is_finite:
            self.values.drop()
        elif offer.weight:
            fragment.outer.step(state.round, 0, fragment.row)
            fragment.clear()
        weight = offer.weight if offer.is_finite else 0.0
        member = Member(
            rank=self._rank,
            upload="",
            weight=weight,
            steps=offer.steps,
            tokens=offer.tokens,
            claim=offer.claim,
            want=offer.want,
            end=offer.end,
            sums=offer.sums,
        )
        ledger = state.ledger
        manifest = Manifest(
            round=state.round,
            chain=state.chain,
            layout=state.chain,
            plan="flat",
            shards=1,
            cells=0,
            world=1,
            members=(member,),
            size=fragment.share.cut.size,
            fragments=len(fragments),
            data=None if ledger is None else ledger.terms,
            next_s=offer.next_s,
        )
        if ledger is not None:
            claim = Claim(self._rank, offer.claim, offer.want, offer.end)
            ledger = ledgers.commit(ledger, [claim], 1)
            self.manifests.append(manifest)
        self.state = state._replace(
            round=state.round + 1,
            last=manifest,
            ledger=ledger,
            steps=state.steps + offer.steps,
            tokens=state.tokens + offer.tokens,
            manifest_at=time.monotonic(),
            is_current=True,
        )
        return self._result(MEMBER)

    def share_data(self, terms: Terms) -> None:
        if self.state.ledger is None:
            self.state = self.state._replace(ledger=ledgers.begin(terms, self.state.round))

    def drain(self, offer: Offer, weights: tuple[float, ...]) -> RoundResult:
        return self._result(LEFT)

    def request_leave(self) -> None:
        pass

    def finish(self) -> list[EndMark]:
        return []

    def find_ends(self) -> list[EndMark]:
        return []

    def save(self) -> None:
        pass

    def abandon(self) -> None:
        pass

    def _result(self, fate: str) -> RoundResult:
        state = self.state
        hold = () if state.ledger is None else state.ledger.hold_of(self._rank)
        return RoundResult(fate, state.round, state.chain, hold)
