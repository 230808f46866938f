"""Error feedback when ranks are absent: what was brought is committed or still owed, once."""

from __future__ import annotations

import contextlib
import random
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.allreduce.world import World, reduce_once, reduce_parts, run_threads

from atoll.diloco import DiLoCo
from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.diloco.allreduce import manifest as manifests
from atoll.diloco.allreduce.exchange import Abandoned
from atoll.diloco.allreduce.layout import Layout
from atoll.diloco.allreduce.manifest import NOTHING, Manifest
from atoll.diloco.allreduce.settle import Decision
from atoll.diloco.allreduce.share import Share
from atoll.diloco.allreduce.upload import read_section
from atoll.diloco.allreduce.work import settle_failed
from atoll.diloco.codecs import Codec

SHARD = 4096


def errors_by_shard(
    codec: str | tuple[str, str], *, world_size: int, present: list[int], rounds: list[int]
) -> list[list[float]]:
    """The rms error of the summed means of constant values, by shard, after so many rounds."""
    world = World(world_size)
    value = [
        np.random.default_rng(rank).standard_normal(world_size * SHARD).astype("f4")
        for rank in range(world_size)
    ]
    mean = np.mean([value[rank] for rank in present], axis=0, dtype="f8")
    errors: dict[int, list[list[float]]] = {}

    up, down = (codec, None) if isinstance(codec, str) else codec
    options: dict[str, Any] = {"codec": up, "down_codec": down, "min_replicas": len(present)}

    def first(rank: int) -> None:
        with world.replica(rank, grace_s=0.1, **options) as replica:
            replica.allreduce([np.zeros(world_size * SHARD, "f4")])

    def go(rank: int) -> None:
        errors[rank] = []
        with world.replica(rank, grace_s=20, **options) as replica:
            total = np.zeros(world_size * SHARD)
            for done in range(1, max(rounds) + 1):
                total += replica.allreduce([value[rank]])[0]
                if done in rounds:
                    off = (total - done * mean).reshape(world_size, SHARD)
                    errors[rank].append(list(np.sqrt((off**2).mean(axis=1))))

    # After this round nobody waits for the absent.
    run_threads(*(lambda rank=rank: first(rank) for rank in present))
    run_threads(*(lambda rank=rank: go(rank) for rank in present))
    assert all(each == errors[present[0]] for each in errors.values())
    return errors[present[0]]


@pytest.mark.parametrize("codec", ["int4", "int8", "e3m0", "bf16", ("fp32", "int4")])
def test_the_shard_of_an_absent_rank_is_as_good_as_any(codec: str | tuple[str, str]) -> None:
    (errors,) = errors_by_shard(codec, world_size=3, present=[0, 1], rounds=[96])
    assert errors[2] < 2 * max(errors[:2])


@pytest.mark.parametrize("reduce", [reduce_parts, reduce_once])
def test_the_shard_of_a_rank_without_weight_is_as_good_as_any(reduce: Any) -> None:
    """It makes means, and brings nothing: what they lack comes with the next ones."""
    world, rounds = World(2), 48
    values = np.random.default_rng(0).standard_normal(2 * SHARD).astype("f4")
    totals = [np.zeros(2 * SHARD) for _ in range(2)]

    def go(rank: int) -> None:
        with world.replica(rank, codec="int4", grace_s=20, min_replicas=2) as replica:
            for _ in range(rounds):
                brought = values if rank else np.zeros_like(values)
                totals[rank] += reduce(replica, brought, 1.0 if rank else NOTHING)

    run_threads(*(lambda rank=rank: go(rank) for rank in range(2)))
    off = (totals[0] - rounds * values).reshape(2, SHARD)
    light, other = np.sqrt((off**2).mean(axis=1))
    assert light < 2 * other


@dataclass
class Script:
    """Who calls in a round, and who is in the manifest of each of its attempts."""

    present: list[int]
    attempts: list[list[int]]


@dataclass
class Ledger:
    """What one rank brought to each element, and what rounds have of it."""

    brought: Any
    committed: Any
    replica: ObjectStoreAllReduce


WORLD, SIZE = 4, 4 * 70 + 3


def follow(replica: ObjectStoreAllReduce, script: Script) -> None:
    """Let the script decide the manifests. All attempts but the last are given up."""
    decider = replica._decider

    def settle(decision: Decision, layout: Layout, codec: Codec) -> Manifest:
        decision.blamed.clear()  # the script alone decides
        while set(decision.uploads) != set(script.present):
            decider._look(decision)
        key = decider.keys.manifest(decision.number, decision.attempt)
        ranks = script.attempts[decision.attempt]
        members = decider._members(decision, ranks, layout, codec)
        assert members is not None
        owners = manifests.owners(ranks, layout.shards, decision.number)
        manifest = decider.write(
            key,
            Manifest(
                "run", decision.number, decision.attempt, layout.pack(), members, owners, [], [], ""
            ),
        )
        if decision.attempt + 1 < len(script.attempts):
            exchange = replica.exchange(manifest, layout)
            for location in exchange._all_places():  # so that nobody waits for one
                with contextlib.suppress(Abandoned):
                    exchange._abandon(location, [], "scripted")
        decider.last = manifest
        return manifest

    decider.settle = settle  # type: ignore[method-assign]


def reduce_whole(replica: ObjectStoreAllReduce, values: Any, weight: float = 1.0) -> Any:
    return replica.allreduce([values], weight=weight)[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("reduce", [reduce_whole, reduce_parts, reduce_once])
@pytest.mark.parametrize(
    "codec", [("int4", "int4"), ("e3m0", "bf16"), ("sparse", "int8"), ("fp32", "int3")]
)
def test_what_was_brought_is_what_was_committed_and_what_is_owed(
    codec: tuple[str, str], seed: int, reduce: Any
) -> None:
    """Random manifests and weights, absent owners, given up attempts, late ranks, restarts."""
    chance, world = random.Random(seed), World(WORLD)
    options: dict[str, Any] = {
        "codec": codec[0],
        "down_codec": codec[1],
        "grace_s": 20,
        "timeout_s": 15,
    }
    zeros = np.zeros(SIZE)
    ledgers = [
        Ledger(zeros.copy(), zeros.copy(), world.replica(rank, **options)) for rank in range(WORLD)
    ]
    for number in range(20):
        present = sorted(chance.sample(range(WORLD), chance.randint(1, WORLD)))
        attempts = [
            sorted(chance.sample(present, chance.randint(1, len(present))))
            for _ in range(chance.choice([1, 1, 2, 3]))
        ]
        script = Script(present, attempts)
        values = [
            np.random.default_rng([seed, number, rank]).standard_normal(SIZE).astype("f4")
            for rank in range(WORLD)
        ]
        weights = [chance.choice([1.0, 1.0, 3.0]) for _ in range(WORLD)]
        residuals = [_up(each.replica) for each in ledgers]
        published: dict[int, Any] = {}

        def go(rank: int) -> None:
            replica = ledgers[rank].replica
            replica.go_on_at(number)  # noqa: B023
            follow(replica, script)  # noqa: B023
            published[rank] = reduce(replica, values[rank], weights[rank])  # noqa: B023

        run_threads(*(lambda rank=rank: go(rank) for rank in present))
        assert len({mean.tobytes() for mean in published.values()}) == 1
        mean = published[present[0]]
        replica = ledgers[present[0]].replica
        layout = replica._cargo[""].layout
        manifest = replica._decider.read(replica.keys.manifest(number, len(attempts) - 1))
        assert manifest is not None
        assert [m.rank for m in manifest.members] == attempts[-1]
        total = sum(manifest.weights.values())
        sent = {rank: np.zeros(SIZE) for rank in attempts[-1]}
        for member in manifest.members:
            for shard in range(WORLD):
                at = slice(*layout.bounds(shard))
                if shard == member.rank:  # in no upload: as it is
                    sent[member.rank][at] = values[shard][at] + residuals[shard][at]
                else:
                    sent[member.rank][at] = read_section(
                        replica.blobs, member, shard, Share(layout), replica.codec
                    )
            ledgers[member.rank].committed += sent[member.rank]
        for rank in present:
            if rank in attempts[-1] or codec[0] != "fp32":  # exact codecs carry no late work
                ledgers[rank].brought += values[rank]
        for shard, owner in enumerate(manifest.owners):
            at = slice(*layout.bounds(shard))
            exact = sum(sent[m.rank][at] * m.weight / total for m in manifest.members)
            # Who made the mean brings what it lacks with its own values.
            ledgers[owner].brought[at] += (exact - mean[at]) * total / manifest.weights[owner]
        for ledger in ledgers:
            scale = 1e-5 * max(1.0, np.abs(ledger.brought).max())
            up = _up(ledger.replica)
            np.testing.assert_allclose(ledger.brought, ledger.committed + up, atol=scale)
        if chance.random() < 0.3:  # a planned restart
            ledger = chance.choice(ledgers)
            state = ledger.replica.state_dict()
            ledger.replica.close()
            ledger.replica = world.replica(ledger.replica.rank, **options)
            ledger.replica.load_state_dict(state)
    for ledger in ledgers:
        ledger.replica.close()


def _up(replica: ObjectStoreAllReduce) -> Any:
    feedback = replica._feedback.get("")
    return np.zeros(SIZE) if feedback is None or feedback.up is None else feedback.up.copy()


def meet_first(replica: ObjectStoreAllReduce, barrier: threading.Barrier) -> None:
    """The replica has uploaded, and waits here until the others have, too."""
    settle = replica._decider.settle
    first = [True]

    def settle_together(decision: Decision, layout: Layout, codec: Codec) -> Manifest:
        if first:
            first.clear()
            barrier.wait()
        return settle(decision, layout, codec)

    replica._decider.settle = settle_together  # type: ignore[method-assign]


@pytest.mark.parametrize("reduce", [reduce_whole, reduce_parts, reduce_once])
def test_late_work_is_dropped_when_another_process_of_the_rank_was_taken(reduce: Any) -> None:
    world = World(2)
    replicas = [world.replica(rank, codec="int4", grace_s=20) for rank in (0, 1, 1)]
    # Who comes when the round is decided waits in the next one, for nobody: all upload first.
    barrier = threading.Barrier(len(replicas), timeout=90)
    for replica in replicas:
        follow(replica, Script([0, 1], [[0, 1]]))
        meet_first(replica, barrier)
    run_threads(*(lambda r=r: reduce(r, np.ones(SIZE, "f4")) for r in replicas))
    (left,) = [r for r in replicas if r.last_round and not r.last_round.is_member]
    assert left.rank == 1
    assert not _up(left).any()
    for replica in replicas:
        replica.close()


@pytest.mark.parametrize("reduce", [reduce_whole, reduce_parts, reduce_once])
@pytest.mark.parametrize("is_committed", [True, False])
def test_a_call_that_failed_owes_what_its_round_lacks(is_committed: bool, reduce: Any) -> None:
    """If others commit the round after all, the residual is that of the upload they used."""
    world = World(2)
    value = np.random.default_rng(0).standard_normal(SIZE).astype("f4")
    failing, other = (world.replica(rank, codec="int4", grace_s=0.5) for rank in (1, 0))
    make = failing.exchange

    def fail(manifest: Manifest, layout: Layout) -> Any:
        exchange = make(manifest, layout)
        part = "_gather" if is_committed else "_publish"
        setattr(exchange, part, lambda *_: 1 / 0)
        return exchange

    failing.exchange = fail  # type: ignore[method-assign]

    def go() -> None:
        with pytest.raises(ZeroDivisionError):
            reduce(failing, value)

    run_threads(go, lambda: other.allreduce([value]))
    failing.exchange = make  # type: ignore[method-assign]
    feedback = failing._feedback[""]
    entry = feedback.entry
    assert entry is not None
    assert settle_failed(failing, feedback) is is_committed
    assert feedback.entry is None
    assert np.array_equal(_up(failing), entry.left_out if is_committed else np.zeros(SIZE))
    residual = value - entry.left_out  # what the upload has is on the grid of the codec
    assert np.abs(entry.left_out).max() > 0
    assert len(np.unique(residual)) < SIZE
    failing.close()
    other.close()


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_movement_is_there_for_every_attempt_of_its_round(codec: str, overlap: int) -> None:
    """The mean of an attempt that was given up may lie where the movement was."""

    def train(attempts: list[list[int]]) -> list[bytes]:
        world, values = World(2), dict[int, bytes]()

        def go(rank: int) -> None:
            replica = world.replica(rank, codec=codec, grace_s=20, timeout_s=15)
            follow(replica, Script([0, 1], attempts))
            model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(4 * SHARD))])
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            chance = torch.Generator().manual_seed(rank)
            with DiLoCo(
                model, inner, sync_every=1 + overlap, overlap_steps=overlap, allreduce=replica
            ) as diloco:
                while diloco.round < 3:
                    model[0].grad = torch.randn(4 * SHARD, generator=chance)
                    inner.step()
                values[rank] = diloco.global_parameters()["0"].tobytes()

        run_threads(*(lambda rank=rank: go(rank) for rank in range(2)))
        return [values[0], values[1]]

    straight = train([[0, 1]])
    assert straight[0] == straight[1]
    assert train([[0, 1], [0, 1], [0, 1]]) == straight
