"""Garbage collection: delete what no replica needs any more, and fold old manifests into history.

Two checkpoints stay, and the older one covers: what it covers can be had from it even if the newest
is damaged. The sweeper has taken every round that it sweeps, so all means of those rounds existed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from atoll.diloco.round import objects
from atoll.diloco.round.effects import Create, Delete, Get, GetAll, List, Steps
from atoll.diloco.round.objects import FLAT, DamagedObject, HistoryBlock

CHECKPOINTS = 2  # that stay: one damaged checkpoint must not lose the run


class Taken(NamedTuple):
    """What the sweeper knows of the run: it has taken all rounds before `round`.

    `chains` and `plans` are of the rounds since it joined. `block`: rounds in an object of history.
    `needed`: the uploads of this round and later ones are brought to rounds that come.
    """

    round: int
    keep: int
    block: int
    chains: Mapping[int, str]
    plans: Mapping[int, str]
    needed: int


class Swept(NamedTuple):
    newest: int  # checkpoint, in rounds
    covered: int  # rounds that the older of the two newest checkpoints covers


def sweep_uploads(taken: Taken, covered: int, keys: Sequence[str] | None = None) -> Steps[None]:
    """Delete uploads, then parts, of rounds whose means replace them.

    A direct round has no means: its uploads stay until a checkpoint covers them.
    """
    first = min(taken.round - taken.keep, taken.needed)
    for folder in ("upload", "part"):  # an upload without its parts would be waited for
        there = [key for key, _ in (yield List(f"{folder}/"))] if keys is None else keys
        yield from _delete(
            there,
            folder,
            lambda round: round < first and (round < covered or taken.plans.get(round) == FLAT),
        )


def sweep(taken: Taken) -> Steps[Swept]:
    """Delete everything that is not needed any more."""
    keys = [key for key, _ in (yield List(""))]  # one request in place of one for each folder
    checkpoints = _find_checkpoints(keys)
    sound = yield from _find_sound(checkpoints, taken)
    covered = sound[-1] if len(sound) == CHECKPOINTS else 0
    yield from sweep_uploads(taken, covered, keys)
    for folder in ("mean", "receipt", "checkpoint", "state"):
        yield from _delete(keys, folder, lambda round: round < covered)
    yield from _fold_manifests(taken, covered, keys)
    return Swept(max((each.round for each in checkpoints), default=0), covered)


def list_checkpoints() -> Steps[list[objects.CheckpointKey]]:
    """All checkpoints, the newest first."""
    return _find_checkpoints([key for key, _ in (yield List("checkpoint/"))])


def _find_checkpoints(keys: Iterable[str]) -> list[objects.CheckpointKey]:
    found = map(objects.parse_checkpoint, keys)
    return sorted((each for each in found if each is not None), reverse=True)


def is_contradicted(checkpoint: objects.CheckpointKey) -> Steps[bool]:
    """Whether the manifest of its number says that nobody goes on from this checkpoint."""
    key = objects.manifest_key(checkpoint.round)
    body = yield Get(key)
    try:
        return body is not None and objects.read_manifest(key, body).chain != checkpoint.chain
    except DamagedObject:
        return False  # it is named by whoever goes on from here


def _find_sound(checkpoints: Iterable[objects.CheckpointKey], taken: Taken) -> Steps[list[int]]:
    """The rounds of the newest checkpoints that are of this run's own chain."""
    found: list[int] = []
    for each in checkpoints:
        if each.round > taken.round or len(found) == CHECKPOINTS:
            continue
        chain = taken.chains.get(each.round)
        if chain is None:
            is_sound = not (yield from is_contradicted(each))
        else:
            is_sound = chain == each.chain
        if is_sound and each.round not in found:
            found.append(each.round)
    return found


def _delete(keys: Iterable[str], folder: str, is_old: Callable[[int], bool]) -> Steps[None]:
    rounds = ((key, objects.parse_round(key)) for key in keys if key.startswith(f"{folder}/"))
    old = tuple(key for key, round in rounds if round is not None and is_old(round))
    if old:
        yield Delete(old)


def _fold_manifests(taken: Taken, covered: int, keys: Iterable[str]) -> Steps[None]:
    """Move manifests of whole blocks, a block below what is covered, into history."""
    blocks: dict[int, list[str]] = defaultdict(list)
    for key in keys:
        round = objects.parse_round(key)
        if round is not None and key == objects.manifest_key(round):
            blocks[round // taken.block].append(key)
    for block, folded in sorted(blocks.items()):
        first = block * taken.block
        if first + 2 * taken.block > covered:
            return
        if len(folded) == taken.block:
            bodies = yield GetAll(tuple(folded))
            if None in bodies.values():
                continue  # somebody else folds it at this moment
            manifests = tuple(objects.read_manifest(key, bodies[key]) for key in folded)
            yield Create(objects.history_key(block), objects.encode(HistoryBlock(first, manifests)))
        elif (yield Get(objects.history_key(block))) is None:
            continue
        # What is left of a folded block, or was created again by one who slept through it.
        yield Delete(tuple(folded))
