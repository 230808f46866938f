"""Which replica this is, of how many, and where they meet: from arguments or the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from atoll.core.checks import check_int
from atoll.core.errors import ValidationError
from atoll.diloco.allreduce import ObjectStoreAllReduce
from atoll.diloco.allreduce.start import least_of, read_launch
from atoll.objectstore import ObjectStore

_MANY = 10**6

# The first variable that is set counts.
RANK = ("ATOLL_RANK", "REPLICA_RANK", "RANK")
# The largest size comes first: tensors are cut into that many shares, which must not change while
# the world grows and shrinks.
WORLD = ("ATOLL_WORLD_MAX", "ATOLL_WORLD_TARGET", "WORLD_SIZE")
MINIMUM = ("ATOLL_WORLD_MIN",)
URI = "ATOLL_RENDEZVOUS_URI"


class ReplicaConfig(NamedTuple):
    rank: int
    world_size: int
    min_replicas: int
    uri: str | ObjectStore | None  # None: alone, nothing is sent


def find_replica_config(
    uri: str | ObjectStore | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    min_replicas: int | None = None,
    *,
    is_one_of_many: bool = False,
) -> ReplicaConfig:
    """An argument wins over the environment; with neither, a world of one without a store.

    `is_one_of_many`: a replica has several processes, so RANK and WORLD_SIZE are of a process.

    Raises ValidationError naming the argument or the variable that does not fit.
    """
    uri = uri or os.environ.get(URI) or None
    last = -1 if is_one_of_many else None
    rank = _number("rank", rank, RANK[:last], 0, 0)
    world_size = _number("world_size", world_size, WORLD[:last], 1, 1)
    if rank >= world_size:
        raise ValidationError("rank", rank, f"expected less than world_size, {world_size}")
    launch = read_launch(world_size)
    if min_replicas is None and launch is not None:
        minimum = least_of(launch)
    else:
        if min_replicas is not None:
            check_int("min_replicas", min_replicas, 1, world_size)
        half = (world_size + 1) // 2
        minimum = min(_number("min_replicas", min_replicas, MINIMUM, 1, half), world_size)
    if uri is None and world_size > 1:
        raise ValidationError(
            "uri", None, f"{world_size} replicas need a store to meet in: pass uri= or set {URI}"
        )
    return ReplicaConfig(rank, world_size, minimum, uri)


def fragment_run(run_id: str | None, at: int, count: int) -> str:
    """The name of a fragment's own run in the store."""
    name = run_id or os.environ.get("ATOLL_RUN_ID") or os.environ.get("ATOLL_UID") or "run"
    return name if count == 1 else f"{name}.{at}-of-{count}"


class RunHome(NamedTuple):
    """Where the objects of the whole run are: in the store, in the folder `run`."""

    blobs: ObjectStore
    run: str
    name: str  # of the run: a part of it has more in its folder's name


def find_home(
    config: ReplicaConfig,
    count: int,
    run_id: str | None,
    allreduce: ObjectStoreAllReduce | None = None,
) -> RunHome | None:
    """The home of a run with `count` fragments, or of `allreduce`; None without a store."""
    if allreduce is not None:
        return RunHome(allreduce.blobs, allreduce.keys.run, allreduce.keys.run)
    if config.uri is None:
        return None
    blobs = config.uri if isinstance(config.uri, ObjectStore) else ObjectStore.open(config.uri)
    return RunHome(blobs, fragment_run(run_id, 0, count), fragment_run(run_id, 0, 1))


def check_fragments(folders: Iterable[str], run_id: str | None, count: int) -> None:
    """Raises ValidationError if the run is in the store with another number of fragments."""
    name, counts = fragment_run(run_id, 0, 1), _counts(folders, run_id)
    if counts and count not in counts:
        raise ValidationError("fragments", count, f"the run {name!r} has {min(counts)}")


def refuse_mixed(folders: Iterable[str], run_id: str | None, count: int) -> None:
    """Raises ValidationError if another replica has begun the run with other fragments."""
    name, others = fragment_run(run_id, 0, 1), _counts(folders, run_id) - {count}
    if others:
        raise ValidationError(
            "fragments",
            count,
            f"another replica began the run {name!r} with {min(others)}: all need the same, and a "
            "run_id that no other number was tried with",
        )


def _counts(folders: Iterable[str], run_id: str | None) -> set[int]:
    """The numbers of fragments that the run is in the store with."""
    cut = re.compile(re.escape(fragment_run(run_id, 0, 1)) + r"(?:\.\d+-of-(\d+))?")
    return {int(match[1] or 1) for match in map(cut.fullmatch, folders) if match}


def _number(field: str, value: int | None, names: tuple[str, ...], low: int, default: int) -> int:
    if value is None:
        name = next((name for name in names if os.environ.get(name)), None)
        if name is None:
            return default
        field, text = name, os.environ[name]
        if not text.strip().isdigit():
            raise ValidationError(field, text, "expected a whole number")
        value = int(text)
    check_int(field, value, low, _MANY)
    return value


def refuse_spanning(places: Sequence[ReplicaConfig]) -> None:
    """Raises ValidationError if the processes are not of one replica."""
    ranks = sorted({config.rank for config in places})
    if len(ranks) > 1:
        raise ValidationError(
            "process_group",
            f"of replicas {', '.join(map(str, ranks))}",
            "expected the processes of one replica, but torch.distributed spans several: start "
            "them with --rendezvous none (rendezvous_backend='none'), or pass process_group= with "
            "the processes of this replica",
        )
    for process, config in enumerate(places):
        if config != places[0]:
            raise ValidationError(
                "process_group",
                f"process {process} with {config}",
                f"expected the arguments of process 0, {places[0]}",
            )
